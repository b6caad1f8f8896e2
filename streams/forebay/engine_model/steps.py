"""Results of a step of the engine model, and the KV fetches and loads that the engine requests."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from forebay.events.kv import Tier
from forebay.events.progress import OnboardedTokens
from forebay.events.tokens import TokenLogprob


class Emitted(msgspec.Struct, frozen=True, gc=False):
    request_id: str
    attempt: int
    first_index: int  # position of the first of these tokens in the output, from 0
    token_ids: bytes  # tokens, as packed u32
    logprobs: tuple[TokenLogprob, ...] = ()  # log probabilities of the tokens; empty if not requested
    text_only: bool = False  # whether the engine returned text, from which the tokens were computed
    objects: tuple[str, ...] = ()  # JSON values of a call, one per token


class FirstTokenStep(msgspec.Struct, frozen=True, gc=False):
    """The engine has generated the first token of a request, so its prompt no longer counts as load."""

    request_id: str
    attempt: int
    cached_tokens: int  # prompt tokens that were not computed, because they were cached or fetched
    transferred_bytes: int = 0  # bytes of KV fetched from another engine; set by the caller that fetched them
    transfer_us: int = 0  # duration of the fetch in microseconds; set by the same caller
    # The part of `cached_tokens` that was loaded from other tiers; set by the caller that loaded them.
    onboarded: tuple[OnboardedTokens, ...] = ()


class Computed(msgspec.Struct, frozen=True, gc=False):
    """The engine has computed the prompt of a request for another engine, and keeps its KV blocks."""

    request_id: str
    attempt: int
    cached_tokens: int  # prompt tokens that were not computed, because they were in the cache


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """Request to the caller to fetch the KV of a prompt. The engine has the blocks before `first_block`."""

    request_id: str
    attempt: int
    first_block: int  # index of the first block to fetch, from 0
    blocks: int  # number of blocks of the prompt; the last may be partial


class Load(msgspec.Struct, frozen=True, gc=False):
    """Request to the caller to load blocks from slower tiers. The engine has the blocks before `first_block`."""

    request_id: str
    attempt: int
    first_block: int  # index of the first block to load, from 0
    blocks: int


class Finished(msgspec.Struct, frozen=True, gc=False):
    request_id: str
    attempt: int
    reason: Literal["length", "stop"]  # `length` if the output has the maximum length, otherwise `stop`
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # prompt tokens that were not computed
    filtered: bool = False  # whether a content filter of the engine ended the output


class Stored(msgspec.Struct, frozen=True, gc=False):
    """One tier of the cache has stored consecutive blocks of a prompt or its output."""

    parent: int | None  # sequence hash of the block before the first of them; None if they start a prompt
    hashes: Sequence[int]  # sequence hashes of the blocks; an array of type "Q" is encoded fastest
    tier: Tier = "device"
    engine_hashes: tuple[int, ...] = ()  # the engine's own hashes of the blocks; empty if they are the same


class Removed(msgspec.Struct, frozen=True, gc=False):
    hashes: Sequence[int]  # sequence hashes of the blocks; an array of type "Q" is encoded fastest
    tier: Tier = "device"
    engine_hashes: tuple[int, ...] = ()  # the engine's own hashes of the blocks; empty if they are the same


CacheChange = Stored | Removed


class StoreChange(msgspec.Struct, frozen=True, gc=False):
    """Change of the content of a shared store, observed by one rank. The removed blocks were not stored again since."""

    stored: Sequence[int] = ()  # sequence hashes of blocks that the store has now
    removed: Sequence[int] = ()  # sequence hashes of blocks that the rank has removed from the store
    # Sequence hashes of blocks that the rank expected in the store, but did not find or could not use.
    stale: Sequence[int] = ()


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    running: int
    waiting: int  # sequences that wait in the queue or for their KV
    kv_blocks_used: int
    kv_blocks_total: int


class EngineStep(msgspec.Struct, frozen=True, gc=False):
    """Result of `iterations` consecutive scheduler iterations.

    Several iterations are combined only while the same sequences decode and nothing else happens. A step with 0
    iterations takes no time and only reports cache changes.
    """

    duration_us: int  # duration of all iterations, in microseconds
    iterations: int
    emitted: list[Emitted]  # new output tokens
    first_tokens: list[FirstTokenStep]
    finished: list[Finished]  # requests that have generated their last token
    cache_changes: list[CacheChange]  # blocks stored and removed, in order
    load: EngineLoad
    computed: list[Computed] = []
