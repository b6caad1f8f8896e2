"""Token ids for the prompts of a workload, to send the requests to a live system."""

import random
from functools import lru_cache

from forebay.simulate.workload import Turn

TOKEN_IDS = 1_000  # prompts use the lowest token ids, which every vocabulary has
CACHED_TOKENS = 1 << 21


def prompt(turn: Turn, block_tokens: int) -> list[int]:
    """Return prompt tokens of a request. Equal block ids give equal tokens; prompts without block ids share none."""
    if not turn.block_ids:
        return list(_tokens_of(f"turn {turn.number}", turn.prompt_tokens))
    tokens: list[int] = []
    for block in turn.block_ids:
        tokens += _tokens_of(block, block_tokens)
    return tokens[: turn.prompt_tokens]


@lru_cache(maxsize=CACHED_TOKENS // 512)
def _tokens_of(what: int | str, count: int) -> tuple[int, ...]:
    rng = random.Random(what)
    return tuple(rng.randrange(TOKEN_IDS) for _ in range(count))
