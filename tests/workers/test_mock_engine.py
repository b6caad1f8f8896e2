"""Batches of the mock engine: tokens, embeddings, log probabilities, refusals, cancellations and resets."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest

from forebay.engine_model.model import Stored
from forebay.events.base import pack_u64
from forebay.events.fleet import WorkerSpec
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.outputs import DIMENSIONS
from tests.engines.driven import Answer, Driven, driven
from tests.workers.conftest import VOCABULARY, engine_config

SPEC = WorkerSpec(
    worker_id="w1", model="m", block_size=4, kv_blocks_total=64, max_num_seqs=8, max_num_batched_tokens=64
)


def mock(speedup: float = 1e4, **sizes: int) -> AbstractAsyncContextManager[Driven]:
    return driven(MockEngine(engine_config(**sizes), speedup=speedup), SPEC)


async def ended(one: Driven, *answers: Answer) -> None:
    await one.until(lambda: all(answer.over for answer in answers))


async def test_same_prompt_and_seed_give_the_same_output_on_every_engine() -> None:
    outputs = []
    for _ in range(2):
        async with mock() as one:
            answers = one.ask([1, 2, 3], 20), one.ask([1, 2, 3], 20, temperature=1.0, seed=9), one.ask([1, 2, 4], 20)
            outputs.append([answer.tokens for answer in await asyncio.gather(*answers)])
    first, second = outputs
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 3
    assert all(len(tokens) == 20 and set(tokens) <= set(VOCABULARY) for tokens in first)


async def test_equal_requests_differ_unless_a_seed_or_temperature_0_determines_the_output() -> None:
    cases: dict[str, dict[str, Any]] = {
        "drawn": {"temperature": None},
        "hot": {"temperature": 2.0},
        "seeded": {"temperature": None, "seed": 9},
        "negative": {"temperature": None, "seed": -9},
        "greedy": {"temperature": 0.0},
        "greedy and seeded": {"temperature": 0.0, "seed": 9},
    }
    async with mock() as one:
        outputs = {
            case: [(await one.ask([1, 2, 3], 20, **sampling)).tokens for _ in range(2)]
            for case, sampling in cases.items()
        }
    assert {case for case, (first, second) in outputs.items() if first != second} == {"drawn", "hot"}
    assert outputs["greedy"] == outputs["greedy and seeded"]


async def test_fast_engine_emits_one_chunk_per_batch() -> None:
    async with mock(1e9) as one:
        first, second = one.submit(one.item([1], 100)), one.submit(one.item([2], 100))
        await ended(one, first, second)
    assert [len(batch.emitted) for batch in one.batches] == [2]
    assert (len(first.tokens), len(second.tokens)) == (100, 100)
    assert (one.batches[0].load.running, one.batches[0].load.kv_blocks_used) == (0, 0)


async def test_at_any_speedup_batches_stay_small_enough_to_share_the_loop() -> None:
    async with mock(1e9, kv_blocks_total=4096) as one:
        answer = await one.ask([1], 10_000)
    assert len(one.batches) > 1
    assert len(answer.tokens) == 10_000


async def test_rejections_are_reported_as_failures() -> None:
    async with mock() as one:
        items = {"context_length_exceeded": [one.item([1], 1000)], "invalid_request": []}
        # One block behind different ones, as no prompts have them.
        for hashes in (b"", pack_u64([1, 2, 3]), pack_u64([2, 9]), pack_u64([1])):
            prompt = one.item([7] * max(9, len(hashes) // 2), 1)
            items["invalid_request"].append(msgspec.structs.replace(prompt, sequence_hashes=hashes))
        for code, refused in items.items():
            answers = [one.submit(item) for item in refused]
            await ended(one, *answers)
            errors = {(answer.error.status, answer.error.code) for answer in answers if answer.error is not None}
            assert errors == {(400, code)}
        assert (await one.ask([1, 2, 3, 4], 2)).error is None


async def test_cancelling_the_last_request_reports_an_idle_engine() -> None:
    async with mock(10.0) as one:
        answer = one.submit(one.item([1, 2, 3], 200))
        await one.until(lambda: one.batches)
        for _ in range(2):
            one.engine.cancel(answer.item.request_id)
        await one.until(lambda: one.batches[-1].load.running == 0)
    assert one.batches[-1].load.kv_blocks_used == 0
    assert not answer.over


async def test_nothing_from_before_a_reset_is_published_after_it() -> None:
    async with mock(1.0) as one:
        before, refused = one.submit(one.item([1, 2, 3, 4], 5)), one.submit(one.item([1], 1000))
        await asyncio.sleep(0)
        one.engine.reset()
        after = await one.ask([1, 2, 3, 4, 5], 1)
    assert (before.tokens, refused.error) == ([], None)
    assert after.cached == 0


@pytest.mark.parametrize("speedup", [0.0, -1.0, float("inf"), float("nan")])
def test_a_speedup_is_a_positive_number(speedup: float) -> None:
    with pytest.raises(ValueError, match="speedup"):
        MockEngine(engine_config(), speedup=speedup)


async def test_an_embedding_is_a_vector_of_length_1_and_no_token() -> None:
    async with mock() as one:
        prompts = (range(10), range(10), range(11))
        answers = [await one.ask(prompt, task="embed") for prompt in prompts]
    first, second, other = (answer.vector for answer in answers)
    assert len(first) == DIMENSIONS
    assert sum(value * value for value in first) == pytest.approx(1.0, abs=1e-5)
    assert first == second != other
    for answer in answers:
        assert answer.finished is not None
        assert (answer.finished.reason, answer.finished.output_tokens) == ("stop", 0)
        assert (answer.tokens, answer.cached) == ([], None)
    for batch in one.batches:  # the vector and its end come together
        assert [vector.request_id for vector in batch.vectors] == [end.request_id for end in batch.finished]
    stored = [change for batch in one.batches for change in batch.cache_changes if isinstance(change, Stored)]
    assert len({block for change in stored for block in change.hashes}) == 2, "prompts are cached like any other"


async def test_log_probabilities_if_requested() -> None:
    async with mock() as one:
        asking, other = await asyncio.gather(one.ask(range(10), 5, logprobs=3), one.ask(range(10, 20), 5))
    assert other.logprobs == []
    assert [found.top[0].token_id for found in asking.logprobs] == asking.tokens
    for found in asking.logprobs:
        assert len({top.token_id for top in found.top}) == 3
        assert found.logprob == found.top[0].logprob > found.top[1].logprob > found.top[2].logprob


async def test_dropped_requests_are_forgotten() -> None:
    engine = MockEngine(engine_config())
    one = Driven(engine, SPEC)
    dropped, kept = (one.submit(one.item(range(10), task="embed")).item.request_id for _ in range(2))
    engine.cancel(dropped)
    assert engine.requests() == {kept: "runs"}
    engine.reset()
    assert not engine.requests()
