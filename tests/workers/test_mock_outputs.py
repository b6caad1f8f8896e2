"""Embeddings and log probabilities of the mock engine."""

from array import array

import pytest

from forebay.engine_model.model import EngineConfig, Stored
from forebay.events.base import unpack_u32
from forebay.events.requests import Sampling
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.outputs import DIMENSIONS
from tests.workers.work_items import finish, item

CONFIG = EngineConfig(vocabulary=tuple(range(100, 140)), block_size=4, kv_blocks_total=64, max_num_seqs=8)


async def run(*items: WorkItem) -> list[EngineBatch]:
    """All batches until every item has ended."""
    return await finish(MockEngine(CONFIG, speedup=1000.0), *items)


@pytest.mark.timeout(60)
async def test_an_embedding_is_a_vector_of_length_1_and_no_token() -> None:
    batches = await run(
        item("a", range(10), task="embed"), item("b", range(10), task="embed"), item("c", range(11), task="embed")
    )
    vectors = {one.request_id: array("f", one.packed) for batch in batches for one in batch.vectors}
    assert [len(one) for one in vectors.values()] == [DIMENSIONS] * 3
    assert all(sum(value * value for value in one) == pytest.approx(1.0, abs=1e-5) for one in vectors.values())
    assert vectors["a"] == vectors["b"] != vectors["c"]
    finished = [end for batch in batches for end in batch.finished]
    assert {(end.reason, end.output_tokens) for end in finished} == {("stop", 0)}
    assert not [generated for batch in batches for generated in batch.emitted]
    assert not [first for batch in batches for first in batch.first_tokens]
    for batch in batches:  # the vector and its end come together
        assert [one.request_id for one in batch.vectors] == [end.request_id for end in batch.finished]
    stored = [change for batch in batches for change in batch.cache_changes if isinstance(change, Stored)]
    assert len({one for change in stored for one in change.hashes}) == 2  # its prompt is cached like any other


@pytest.mark.timeout(60)
async def test_log_probabilities_if_requested() -> None:
    asking = Sampling(max_tokens=5, logprobs=3)
    batches = await run(item("a", range(10), sampling=asking), item("b", range(10, 20)))
    generated = [chunk for batch in batches for chunk in batch.emitted]
    for chunk in generated:
        token_ids = unpack_u32(chunk.token_ids)
        if chunk.request_id == "b":
            assert chunk.logprobs == ()
            continue
        assert [one.top[0].token_id for one in chunk.logprobs] == token_ids
        for one in chunk.logprobs:
            assert len({top.token_id for top in one.top}) == 3
            assert one.logprob == one.top[0].logprob > one.top[1].logprob > one.top[2].logprob
    assert sum(len(chunk.logprobs) for chunk in generated) == 5


def test_dropped_requests_have_no_outputs() -> None:
    engine = MockEngine(CONFIG)
    engine.submit(item("a", range(10), task="embed"))
    engine.cancel("a")
    engine.submit(item("b", range(10), task="embed"))
    assert engine.requests() == {"b": "output"}
    engine.reset()
    assert not engine.requests()
