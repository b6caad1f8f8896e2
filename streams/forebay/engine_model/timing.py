"""Duration of an engine step in integer microseconds. Only + - * / are used, so every machine gets the same result.

`MockerTiming` uses the polynomials of Dynamo's mocker (lib/mocker `perf_model.rs`; measured by Dynamo, not here).
`LinearTiming` is fitted to measurements. `RooflineTiming` is derived from the sizes of a model and a GPU. All three get
the same description of a step: its prompt tokens, the (query, key) pairs of their attention, and its decoding
sequences.
"""

from functools import lru_cache
from typing import NamedTuple, Protocol

import msgspec

US_PER_MS = 1000


class StepWork(NamedTuple):
    prefill_tokens: int  # prompt tokens to compute
    prefill_attended: int  # (query, key) pairs of the attention of these tokens, including cached keys
    decode_sequences: int
    # Capacity in tokens of the KV blocks that these sequences use; a shared block counts per sequence.
    decode_tokens: int
    cache_tokens: int  # capacity in tokens of all KV blocks of the engine


class EngineTiming(Protocol):
    def step_us(self, work: StepWork) -> int:
        """Return the duration in microseconds: at least 1 if the step computes anything, and equal for equal work."""
        ...


def prefill_us(new_tokens: int) -> int:
    """Return the microseconds that Dynamo's mocker takes to compute `new_tokens` prompt tokens in one step."""
    assert new_tokens > 0
    return round((4.209989e-07 * new_tokens * new_tokens + 1.518344e-02 * new_tokens + 16.50142) * US_PER_MS)


@lru_cache(maxsize=1 << 14)  # most steps of a decoding engine take as long as an earlier one
def decode_us(active: int, total: int) -> int:
    """Return the microseconds that Dynamo's mocker takes to decode one token per sequence.

    `active` and `total` are capacities in tokens: of the KV blocks that the sequences use, and of all blocks.
    """
    assert active >= 0
    assert total > 0
    usage = min(active / total, 1.0)
    return round(max(1.0, -25.74 * usage * usage + 54.01 * usage + 5.74) * US_PER_MS)


class MockerTiming(msgspec.Struct, frozen=True):
    """Timing by Dynamo's two polynomials: of prompt tokens, and of the cache share that decoding sequences use."""

    def step_us(self, work: StepWork) -> int:
        took_us = prefill_us(work.prefill_tokens) if work.prefill_tokens else 0
        return took_us + decode_us(work.decode_tokens, work.cache_tokens) if work.decode_sequences else took_us


class LinearTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Timing by a weighted sum of the work of a step. All weights are in microseconds, at least 0, and not all 0."""

    step: float = 0.0
    prefill_token: float = 0.0  # weight per prompt token
    attended_pair: float = 0.0  # weight per (query, key) pair of the prompt tokens' attention
    decode_step: float = 0.0  # constant part of steps with decoding sequences
    decode_sequence: float = 0.0  # weight per decoding sequence
    context_token: float = 0.0  # weight per token of capacity of the KV blocks that decoding sequences use

    def __post_init__(self) -> None:
        _require_costs(self)
        if not any(getattr(self, name) for name in self.__struct_fields__):
            raise ValueError("all costs are 0: at least one cost must be above 0")

    def step_us(self, work: StepWork) -> int:
        us = self.step + self.prefill_token * work.prefill_tokens + self.attended_pair * work.prefill_attended
        if work.decode_sequences:
            sequences, tokens = work.decode_sequences, work.decode_tokens
            us += self.decode_step + self.decode_sequence * sequences + self.context_token * tokens
        return max(1, round(us))


class RooflineTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Timing by the larger of compute time and memory time, plus all-reduce time and overhead.

    Source: roofline model (Williams, Waterman, Patterson, CACM 2009). If several GPUs share the work, all numbers are
    per GPU.
    """

    # Floating-point operations of the layers' matrices per token (2 per weight: Kaplan et al. 2020, table 1).
    flops_token: float
    flops_sampled: float  # operations of the output matrix per sampled token
    flops_pair: float  # operations of attention per (query, key) pair
    bytes_weights: float  # bytes of weights read in every step, regardless of its work
    bytes_kv_token: float  # bytes of keys and values per token
    flops_us: float  # operations per microsecond
    bytes_us: float  # bytes read per microsecond
    bytes_experts: float = 0.0  # bytes of all experts of all layers
    experts: int = 1
    experts_active: int = 1  # experts per layer that a token uses
    reduce_us: float = 0.0  # all-reduce time per step, in microseconds
    reduce_us_token: float = 0.0  # additional all-reduce time per token, in microseconds
    overhead_us: float = 0.0  # remaining time per step, in microseconds

    def __post_init__(self) -> None:
        _require_costs(self)
        if min(self.flops_us, self.bytes_us, self.bytes_weights + self.bytes_experts) <= 0:
            raise ValueError("flops_us, bytes_us and the bytes of the weights must be above 0")
        if not 1 <= self.experts_active <= self.experts:
            raise ValueError(f"experts_active ({self.experts_active}) must be 1 to experts ({self.experts})")

    def step_us(self, work: StepWork) -> int:
        tokens = work.prefill_tokens + work.decode_sequences
        flops = (
            self.flops_token * tokens
            + self.flops_sampled * work.decode_sequences
            + self.flops_pair * (work.prefill_attended + work.decode_tokens)
        )
        read = self.bytes_weights + self.bytes_kv_token * (work.prefill_tokens + work.decode_tokens)
        if self.bytes_experts:
            read += self.bytes_experts * (1.0 - _power(1.0 - self.experts_active / self.experts, tokens))
        busy_us = max(flops / self.flops_us, read / self.bytes_us)
        return max(1, round(busy_us + self.reduce_us + self.reduce_us_token * tokens + self.overhead_us))


def _power(base: float, exponent: int) -> float:
    """Return `base` ** `exponent` by squaring: the last bit of libm's result differs between machines."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _require_costs(timing: msgspec.Struct) -> None:
    """Raise ValueError for a cost that is negative or not finite."""
    for name in timing.__struct_fields__:
        value = getattr(timing, name)
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{name} must be a number from 0 on, not {value}")
