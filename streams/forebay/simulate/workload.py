"""Workloads: requests that arrive at fixed times, or after the responses that they depend on.

A workload can be read repeatedly, in any process, and is the same each time. Prompts are identified by block ids
instead of tokens. An id stands for `block_tokens` tokens and all tokens before them, so prompts that begin with the
same ids share that prefix.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Protocol

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_BYTES, pack_u64


class Turn(msgspec.Struct, frozen=True, gc=False):
    number: int  # unique number of the request. Numbers count from 0 in the order of the workload.
    prompt_tokens: int  # length of the prompt, at least 1
    output_tokens: int  # length of the response, at least 1
    # 64-bit ids of the prompt's blocks; the last block may be partial. Empty if the prompt shares no prefix with
    # others.
    block_ids: tuple[int, ...] = ()
    # Arrival time in microseconds from the start of the workload. For a request with `after`, the earliest possible
    # arrival time.
    at_us: int = 0
    # Numbers of the requests whose responses must be complete before this request arrives. All are lower than `number`.
    after: tuple[int, ...] = ()
    # Microseconds from the end of the last of these responses to the arrival of this request: think time or tool time.
    delay_us: int = 0
    session_id: str = ""  # id of the session of the request; empty if it has none
    model: str = ""  # name of the requested model; empty for the only model


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Transformations of a workload before it is played."""

    # Factor that divides the times between arrivals. Think times are unchanged.
    speed: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    # Keep only requests that arrive in the first `duration_s` seconds. For this, arrival times are computed as if every
    # response were instant.
    duration_s: float | None = None
    requests_max: int | None = None  # keep only the first `requests_max` requests
    columns: str | None = None  # columns of a table, as `--columns` takes them; None for a known format
    by_model: bool = False  # send each request to the model that it names. Otherwise all requests go to the only model.
    # Skip and count rows that cannot be played. Otherwise the first such row raises `ConfigError`.
    skip_bad_rows: bool = False
    seed: int = 0


class Survey(msgspec.Struct, kw_only=True):
    """Summary of a workload: how many requests can be played, and which rows cannot."""

    requests: int = 0
    skipped: int = 0  # number of skipped rows that cannot be played
    # For the first of the skipped rows, the row number and the reason.
    reasons: list[str] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)  # remarks for the user on how the workload was read


class Workload(Protocol):
    """Requests to play in a simulation. Implementations are picklable, because every process reads the workload itself.

    Each id in `Turn.block_ids` stands for `block_tokens` tokens.
    """

    name: str
    block_tokens: int

    def survey(self) -> Survey:
        """Read the workload once and check every row. Raises ConfigError if a row cannot be played."""
        ...

    def turns(self) -> Iterator[Turn]:
        """Yield every request. Requests with a fixed time are ordered by time, then by their position in the file.

        A dependent request comes after all requests on which it depends, but before the next request with a fixed time.
        So a caller that has read a request with a fixed time already knows every request that may arrive earlier.
        Raises ConfigError as `survey` does.
        """
        ...


def sequence_hashes(turn: Turn, block_tokens: int, block_size: int) -> bytes:
    """Return a packed u64 sequence hash per full block of the prompt, computed from its block ids.

    Two prompts have equal hashes exactly as far as they have equal block ids. A prompt without block ids has no hash in
    common with another prompt. A block id stands for `block_tokens` tokens, a hash for `block_size` tokens.
    """
    full = turn.prompt_tokens // block_size
    if not turn.block_ids:
        return _ascending(xxh3_64_intdigest(b"turn %d" % turn.number) >> 1, full)
    before = first = passed = 0
    ones, steps = _lanes(block_tokens // block_size)
    width = block_tokens // block_size * U64_BYTES
    hashes = []
    for block in turn.block_ids:
        before = xxh3_64_intdigest(b"%d" % block, before)
        # Halved, so that adding block numbers does not overflow 64 bits.
        if block_tokens % block_size:
            passed += block_tokens
            end = passed // block_size  # number of blocks that end by the end of this id
            hashes.append(_ascending((before >> 1) + first, end - first))
            first = end
        else:
            hashes.append((((before >> 1) + first) * ones + steps).to_bytes(width, "little"))
            first += block_tokens // block_size
    return b"".join(hashes)[: full * U64_BYTES]


def _ascending(first: int, count: int) -> bytes:
    """Return `count` consecutive u64 from `first`, packed. One big integer avoids an object per number."""
    ones, steps = _lanes(count)
    return (first * ones + steps).to_bytes(count * U64_BYTES, "little")


@lru_cache(maxsize=4_096)
def _lanes(count: int) -> tuple[int, int]:
    """Return two packed sequences of `count` u64, as one integer each: all 1, and 0, 1, 2, …."""
    return int.from_bytes(pack_u64([1] * count), "little"), int.from_bytes(pack_u64(range(count)), "little")
