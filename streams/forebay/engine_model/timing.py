"""How long an engine step takes, in integer microseconds. Only + - * / : every machine agrees.

`MockerTiming` are the polynomials of Dynamo's mocker (lib/mocker `perf_model.rs`; measured there, not here),
`LinearTiming` is what measurements are fitted to, `RooflineTiming` follows from a model and a GPU. Each has the same
view of a step: prompt tokens, the (query, key) pairs that they attend, and one token of each decoding sequence.
"""

from typing import Protocol

import msgspec

US_PER_MS = 1000


class EngineTiming(Protocol):
    """The time of one scheduler iteration."""

    def step_us(
        self,
        *,
        prefill_tokens: int,
        prefill_attended: int,
        decode_sequences: int,
        decode_tokens: int,
        cache_tokens: int,
    ) -> int:
        """At least 1 where anything is computed; the same for the same work.

        Args:
            prefill_tokens: prompt tokens that are computed.
            prefill_attended: (token, token before it or itself) pairs of these, cached ones before it included.
            decode_sequences: sequences of which one token each is computed.
            decode_tokens: room of the KV blocks that these sequences hold together; a shared block counts for each.
            cache_tokens: room of all KV blocks of the engine.
        """
        ...


def prefill_us(new_tokens: int) -> int:
    """Time to compute `new_tokens` prompt tokens in one step; nothing to compute takes no time."""
    assert new_tokens >= 0
    if new_tokens == 0:
        return 0
    return round((4.209989e-07 * new_tokens * new_tokens + 1.518344e-02 * new_tokens + 16.50142) * US_PER_MS)


def decode_us(active: int, total: int) -> int:
    """Time to decode one token of sequences whose contexts are `active` together, of `total`; both blocks or tokens."""
    assert active >= 0
    assert total > 0
    usage = min(active / total, 1.0)
    return round(max(1.0, -25.74 * usage * usage + 54.01 * usage + 5.74) * US_PER_MS)


class MockerTiming(msgspec.Struct, frozen=True):
    """Dynamo's polynomials: of the prompt tokens of a step, and of the share of the cache that is decoded from."""

    def step_us(
        self,
        *,
        prefill_tokens: int,
        prefill_attended: int,
        decode_sequences: int,
        decode_tokens: int,
        cache_tokens: int,
    ) -> int:
        """Prefill and decode, one after the other."""
        took_us = prefill_us(prefill_tokens)
        return took_us + decode_us(decode_tokens, cache_tokens) if decode_sequences else took_us


class LinearTiming(msgspec.Struct, frozen=True, kw_only=True):
    """A sum of what a step does, each with its cost in microseconds; none below 0, nor all of them 0."""

    step: float = 0.0
    prefill_token: float = 0.0
    attended_pair: float = 0.0
    decode_step: float = 0.0
    decode_sequence: float = 0.0
    context_token: float = 0.0

    def __post_init__(self) -> None:
        _require_costs(self)
        if not any(getattr(self, name) for name in self.__struct_fields__):
            raise ValueError("nothing takes any time: at least one cost must be above 0")

    def step_us(
        self,
        *,
        prefill_tokens: int,
        prefill_attended: int,
        decode_sequences: int,
        decode_tokens: int,
        cache_tokens: int,
    ) -> int:
        """The sum, rounded, at least 1."""
        us = self.step + self.prefill_token * prefill_tokens + self.attended_pair * prefill_attended
        if decode_sequences:
            us += self.decode_step + self.decode_sequence * decode_sequences + self.context_token * decode_tokens
        return max(1, round(us))


class RooflineTiming(msgspec.Struct, frozen=True, kw_only=True):
    """max(compute, memory) + all-reduce + overhead (roofline model: Williams, Waterman, Patterson, CACM 2009).

    One GPU's share of the work where several work together.

    Attributes:
        flops_token: of the layers' matrices, for one token (2 a weight: Kaplan et al. 2020, table 1).
        flops_sampled: of the output matrix, for one token that is sampled.
        flops_pair: of attention, for one (query, key) pair.
        bytes_weights: read in every step, whatever is in it.
        bytes_experts: of all experts of all layers; `experts` a layer, of which a token goes to `experts_active`.
        bytes_kv_token: one token's keys and values.
        flops_us: what the GPU computes in a microsecond; `bytes_us` what it reads.
        reduce_us: the all-reduces of a step, in microseconds, and `reduce_us_token` more for each token.
        overhead_us: what a step takes beside all that.
    """

    flops_token: float
    flops_sampled: float
    flops_pair: float
    bytes_weights: float
    bytes_kv_token: float
    flops_us: float
    bytes_us: float
    bytes_experts: float = 0.0
    experts: int = 1
    experts_active: int = 1
    reduce_us: float = 0.0
    reduce_us_token: float = 0.0
    overhead_us: float = 0.0

    def __post_init__(self) -> None:
        _require_costs(self)
        if min(self.flops_us, self.bytes_us, self.bytes_weights + self.bytes_experts) <= 0:
            raise ValueError("flops_us, bytes_us and the bytes of the weights must be above 0")
        if not 1 <= self.experts_active <= self.experts:
            raise ValueError(f"experts_active ({self.experts_active}) must be 1 to experts ({self.experts})")

    def step_us(
        self,
        *,
        prefill_tokens: int,
        prefill_attended: int,
        decode_sequences: int,
        decode_tokens: int,
        cache_tokens: int,
    ) -> int:
        """As the class says, rounded, at least 1."""
        tokens = prefill_tokens + decode_sequences
        flops = (
            self.flops_token * tokens
            + self.flops_sampled * decode_sequences
            + self.flops_pair * (prefill_attended + decode_tokens)
        )
        read = self.bytes_weights + self.bytes_kv_token * (prefill_tokens + decode_tokens)
        if self.bytes_experts:
            read += self.bytes_experts * (1.0 - _power(1.0 - self.experts_active / self.experts, tokens))
        busy_us = max(flops / self.flops_us, read / self.bytes_us)
        return max(1, round(busy_us + self.reduce_us + self.reduce_us_token * tokens + self.overhead_us))


def _power(base: float, exponent: int) -> float:
    """`base` ** `exponent` by squaring: libm's differs between machines in the last bit."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _require_costs(timing: msgspec.Struct) -> None:
    """Raises ValueError for a number that is negative or none."""
    for name in timing.__struct_fields__:
        value = getattr(timing, name)
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{name} must be a number from 0 on, not {value}")
