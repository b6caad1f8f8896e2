"""Results of a step of the engine model, and the fetches it requests."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from forebay.events.kv import Tier
from forebay.events.tokens import TokenLogprob


class Emitted(msgspec.Struct, frozen=True, gc=False):
    """New output tokens of a request, packed u32; `first_index` is the position of the first one, from 0."""

    request_id: str
    attempt: int
    first_index: int
    token_ids: bytes
    logprobs: tuple[TokenLogprob, ...] = ()


class FirstTokenStep(msgspec.Struct, frozen=True, gc=False):
    """First token of a request, after which its prompt is no longer load.

    Attributes:
        request_id: id of the request.
        attempt: number of the attempt.
        cached_tokens: prompt tokens that were not computed, because they were cached or fetched.
        transferred_bytes: bytes of KV fetched from another engine; set by the caller that fetched them.
        transfer_us: duration of the fetch in microseconds; set by the same caller.
    """

    request_id: str
    attempt: int
    cached_tokens: int
    transferred_bytes: int = 0
    transfer_us: int = 0


class Computed(msgspec.Struct, frozen=True, gc=False):
    """Prompt computed for another engine, which keeps its blocks; `cached_tokens` of it were in the cache."""

    request_id: str
    attempt: int
    cached_tokens: int


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """Request to fetch blocks `[first_block, blocks)` of a prompt.

    Earlier blocks are cached here, the last may be partial.
    """

    request_id: str
    attempt: int
    first_block: int
    blocks: int


class Finished(msgspec.Struct, frozen=True, gc=False):
    """End of a request after its last token."""

    request_id: str
    attempt: int
    reason: Literal["length", "stop"]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that entered one tier. They continue `parent`, or start a sequence if it is None.

    `hashes` may be an array of type "Q", which is packed without conversion. `engine_hashes` are the engine's own
    hashes of the blocks, if they differ.
    """

    parent: int | None
    hashes: Sequence[int]
    tier: Tier = "device"
    engine_hashes: tuple[int, ...] = ()


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks that left one tier; `hashes` and `engine_hashes` as in `Stored`."""

    hashes: Sequence[int]
    tier: Tier = "device"
    engine_hashes: tuple[int, ...] = ()


CacheChange = Stored | Removed


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    """Load of the engine."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int


class EngineStep(msgspec.Struct, frozen=True, gc=False):
    """Result of one scheduler iteration, or of `iterations` of them that decode the same sequences.

    A step with 0 iterations takes no time and only reports cache changes.
    """

    duration_us: int
    iterations: int
    emitted: list[Emitted]
    first_tokens: list[FirstTokenStep]
    finished: list[Finished]
    cache_changes: list[CacheChange]
    load: EngineLoad
    computed: list[Computed] = []
