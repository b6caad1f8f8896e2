"""Where the prompt tokens of a request came from: caches, transfers or computing, and what loading them saved."""

from collections.abc import Sequence
from typing import Literal

from forebay.core.world import World
from forebay.events.progress import FirstTokenEmitted, OnboardedTokens
from forebay.events.transfer import Prefilled

TokenSource = Literal["device", "host", "disk", "store", "transferred", "computed"]
PLACES = {"host": "host memory", "disk": "disk", "store": "the shared store"}


def tokens_by_source(
    event: FirstTokenEmitted, prompt_tokens: int | None, kept: Prefilled | None
) -> dict[TokenSource, int]:
    """Return the prompt tokens from each source, without sources of no tokens.

    Args:
        prompt_tokens: length of the prompt; None if unknown, so that the computed tokens are unknown too.
        kept: the KV that a prefill worker kept for the request; None if there was none.
    """
    found: dict[TokenSource, int] = {"device": 0}
    for one in event.onboarded:
        found[one.tier] = found.get(one.tier, 0) + one.tokens
    left = max(0, event.cached_tokens - sum(found.values()))
    if event.transferred_bytes and kept is not None and kept.bytes:
        found["transferred"] = min(left, round(event.transferred_bytes * kept.tokens / kept.bytes))
        left -= found["transferred"]
    found["device"] = left
    if prompt_tokens is not None:
        found["computed"] = max(0, prompt_tokens - event.cached_tokens)
    return {source: tokens for source, tokens in found.items() if tokens}


def load_us(onboarded: Sequence[OnboardedTokens]) -> int:
    """Return the microseconds of the longest load. Loads of one request run at the same time."""
    return max((one.us for one in onboarded), default=0)


def saved_us(world: World, worker_id: str, rank: int, onboarded: Sequence[OnboardedTokens]) -> int | None:
    """Return how many microseconds sooner the tokens were loaded than they would have been computed.

    The result is negative if computing would have been faster, and None if no tokens were loaded or the rank has not
    reported how long it computes a block.
    """
    worker = world.fleet.get(worker_id)
    if not onboarded or worker is None or rank not in worker.spec.ranks:
        return None
    costs = world.load.rank_load(worker_id, rank).costs
    if costs is None or not costs.prefill_block_us:
        return None
    tokens = sum(one.tokens for one in onboarded)
    return round(tokens / worker.spec.block_size * costs.prefill_block_us) - load_us(onboarded)


def onboarded_text(onboarded: Sequence[OnboardedTokens], saved: int | None) -> str:
    """Return how many tokens were loaded from where and what this saved, as a part of a sentence; empty for none."""
    loads = [f"{one.tokens:,} from {PLACES[one.tier]} in {one.us / 1e3:,.1f} ms" for one in onboarded]
    if not loads:
        return ""
    if saved is None:
        return f"; loaded {', '.join(loads)}"
    compared = "sooner" if saved >= 0 else "later"
    return f"; loaded {', '.join(loads)}, {abs(saved) / 1e3:,.1f} ms {compared} than by computing them"
