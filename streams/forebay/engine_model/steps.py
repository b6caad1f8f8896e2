"""Results of a step of the engine model, and the KV fetches and loads that the engine requests."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from forebay.events.kv import Tier
from forebay.events.progress import OnboardedTokens
from forebay.events.tokens import TokenLogprob


class Emitted(msgspec.Struct, frozen=True, gc=False):
    """New output tokens of a request.

    Attributes:
        first_index: position of the first of these tokens in the output, from 0.
        token_ids: tokens, as packed u32.
        logprobs: log probabilities of the tokens; empty if not requested.
        text_only: whether the engine returned text, from which the tokens were computed.
    """

    request_id: str
    attempt: int
    first_index: int
    token_ids: bytes
    logprobs: tuple[TokenLogprob, ...] = ()
    text_only: bool = False


class FirstTokenStep(msgspec.Struct, frozen=True, gc=False):
    """The engine has generated the first token of a request, so its prompt no longer counts as load.

    Attributes:
        cached_tokens: prompt tokens that were not computed, because they were cached or fetched.
        transferred_bytes: bytes of KV fetched from another engine; set by the caller that fetched them.
        transfer_us: duration of the fetch in microseconds; set by the same caller.
        onboarded: the part of `cached_tokens` that was loaded from other tiers; set by the caller that loaded them.
    """

    request_id: str
    attempt: int
    cached_tokens: int
    transferred_bytes: int = 0
    transfer_us: int = 0
    onboarded: tuple[OnboardedTokens, ...] = ()


class Computed(msgspec.Struct, frozen=True, gc=False):
    """The engine has computed the prompt of a request for another engine, and keeps its KV blocks.

    Attributes:
        cached_tokens: prompt tokens that were not computed, because they were in the cache.
    """

    request_id: str
    attempt: int
    cached_tokens: int


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """Request of the engine to its caller to fetch the KV of a prompt from another engine.

    The engine has the blocks before `first_block` in its own cache.

    Attributes:
        first_block: index of the first block to fetch, from 0.
        blocks: number of blocks of the prompt; the last may be partial.
    """

    request_id: str
    attempt: int
    first_block: int
    blocks: int


class Load(msgspec.Struct, frozen=True, gc=False):
    """Request of the engine to its caller to load blocks of a prompt from slower tiers.

    The engine has the blocks before `first_block` in its own cache.

    Attributes:
        first_block: index of the first block to load, from 0.
    """

    request_id: str
    attempt: int
    first_block: int
    blocks: int


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The engine has generated the last token of a request.

    Attributes:
        reason: `length` if the output has the maximum length, otherwise `stop`.
        cached_tokens: prompt tokens that were not computed.
        filtered: whether a content filter of the engine ended the output.
    """

    request_id: str
    attempt: int
    reason: Literal["length", "stop"]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    filtered: bool = False


class Stored(msgspec.Struct, frozen=True, gc=False):
    """One tier of the cache has stored consecutive blocks of a prompt or its output.

    Attributes:
        parent: sequence hash of the block before the first of them; None if they start a prompt.
        hashes: sequence hashes of the blocks; an array of type "Q" is encoded fastest.
        engine_hashes: the engine's own hashes of the blocks; empty if they are the same.
    """

    parent: int | None
    hashes: Sequence[int]
    tier: Tier = "device"
    engine_hashes: tuple[int, ...] = ()


class Removed(msgspec.Struct, frozen=True, gc=False):
    """One tier of the cache has removed blocks.

    Attributes:
        hashes: sequence hashes of the blocks; an array of type "Q" is encoded fastest.
        engine_hashes: the engine's own hashes of the blocks; empty if they are the same.
    """

    hashes: Sequence[int]
    tier: Tier = "device"
    engine_hashes: tuple[int, ...] = ()


CacheChange = Stored | Removed


class StoreChange(msgspec.Struct, frozen=True, gc=False):
    """Change of the content of a shared store, observed by one rank. The removed blocks were not stored again since.

    Attributes:
        stored: sequence hashes of blocks that the store has now.
        removed: sequence hashes of blocks that the rank has removed from the store.
        stale: sequence hashes of blocks that the rank expected in the store, but did not find or could not use.
    """

    stored: Sequence[int] = ()
    removed: Sequence[int] = ()
    stale: Sequence[int] = ()


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    """Load of the engine.

    Attributes:
        waiting: sequences that wait in the queue or for their KV.
    """

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int


class EngineStep(msgspec.Struct, frozen=True, gc=False):
    """Result of `iterations` consecutive scheduler iterations.

    Several iterations are combined only while the same sequences decode and nothing else happens. A step with 0
    iterations takes no time and only reports cache changes.

    Attributes:
        duration_us: duration of all iterations, in microseconds.
        emitted: new output tokens.
        finished: requests that have generated their last token.
        cache_changes: blocks stored and removed, in order.
    """

    duration_us: int
    iterations: int
    emitted: list[Emitted]
    first_tokens: list[FirstTokenStep]
    finished: list[Finished]
    cache_changes: list[CacheChange]
    load: EngineLoad
    computed: list[Computed] = []
