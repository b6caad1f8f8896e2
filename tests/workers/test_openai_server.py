"""The stand-in of a server, `tests/harness/openai_server`: its block cache evicts like that of an engine."""

from hypothesis import given
from hypothesis import strategies as st

from tests.harness.openai_server.cache import BlockRemoved, BlocksStored, LittleCache, StandinRequest

SIZE, BLOCKS = 2, 4
prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=SIZE * BLOCKS), max_size=20)


@given(prompts)
def test_a_cached_block_follows_cached_blocks(prompts: list[list[int]]) -> None:
    cache = LittleCache(SIZE, BLOCKS)
    parents: dict[int, int | None] = {}
    for tokens in prompts:
        request = StandinRequest("request", tokens, 1)
        cache.cached_tokens(request)
        for change in cache.store(request, tokens):
            match change:
                case BlocksStored(hashes, parent, token_ids):
                    assert len(token_ids) == SIZE * len(hashes)
                    parents |= dict(zip(hashes, (parent, *hashes), strict=False))
                case BlockRemoved(gone):
                    del parents[gone]
        assert len(parents) <= BLOCKS
        assert {*parents.values()} <= {None, *parents}
        assert cache.cached_tokens(StandinRequest("again", [*tokens, 0], 1)) == len(tokens) // SIZE * SIZE
