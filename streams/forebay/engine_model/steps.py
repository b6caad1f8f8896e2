"""What the engine model says it did, and what it asks for."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from forebay.events.kv import Tier
from forebay.events.tokens import TokenLogprob


class Emitted(msgspec.Struct, frozen=True, gc=False):
    """New output tokens of a request, packed u32; `first_index` counts its output tokens from 0."""

    request_id: str
    attempt: int
    first_index: int
    token_ids: bytes
    logprobs: tuple[TokenLogprob, ...] = ()


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """A prompt is there; `cached_tokens` of it were not computed: they were in the cache, or fetched.

    Of these, `transferred_bytes` came from another engine in `transfer_us`: whoever fetched them fills that in.
    """

    request_id: str
    attempt: int
    cached_tokens: int
    transferred_bytes: int = 0
    transfer_us: int = 0


class Computed(msgspec.Struct, frozen=True, gc=False):
    """A prompt was computed for another engine, `cached_tokens` of it were in the cache; its blocks are kept."""

    request_id: str
    attempt: int
    cached_tokens: int


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """Blocks `[first_block, blocks)` of a prompt are to be fetched, the last may be partial; those before are here."""

    request_id: str
    attempt: int
    first_block: int
    blocks: int


class Finished(msgspec.Struct, frozen=True, gc=False):
    """A request got its last token."""

    request_id: str
    attempt: int
    reason: Literal["length", "stop"]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks entered one tier: a chain that continues `parent`, or starts a sequence when it is None.

    `hashes` may be an array ("Q"), which is packed at once. `engine_hashes` are the engine's own names of them, where
    it has others.
    """

    parent: int | None
    hashes: Sequence[int]
    tier: Tier = "device"
    engine_hashes: tuple[int, ...] = ()


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks left one tier; `hashes` and `engine_hashes` as in `Stored`."""

    hashes: Sequence[int]
    tier: Tier = "device"
    engine_hashes: tuple[int, ...] = ()


CacheChange = Stored | Removed


class Load(msgspec.Struct, frozen=True, gc=False):
    """How busy the engine is."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int


class Step(msgspec.Struct, frozen=True, gc=False):
    """What one scheduler iteration did, or `iterations` of them in which the same sequences decoded.

    With none of them, and no time, it only says what happened to the cache meanwhile.
    """

    duration_us: int
    iterations: int
    emitted: list[Emitted]
    first_tokens: list[FirstToken]
    finished: list[Finished]
    cache_changes: list[CacheChange]
    load: Load
    computed: list[Computed] = []
