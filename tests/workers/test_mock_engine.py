"""Batches of the mock engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forebay.engine_model.sequence import generate_tokens
from forebay.events.base import pack_u64, unpack_u32
from forebay.events.fleet import WorkerSpec
from forebay.events.requests import Sampling
from forebay.workers.engine import EngineBatch
from forebay.workers.engines.mock.engine import MockEngine
from tests.workers.conftest import VOCABULARY, engine_config, until, work_item

SPEC = WorkerSpec(
    worker_id="w1", model="m", block_size=4, kv_blocks_total=64, max_num_seqs=8, max_num_batched_tokens=64
)


@asynccontextmanager
async def running(engine: MockEngine) -> AsyncIterator[list[EngineBatch]]:
    batches: list[EngineBatch] = []
    await engine.start(SPEC)
    task = asyncio.create_task(engine.run(batches.append))
    try:
        yield batches
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.stop()


def generated(batches: list[EngineBatch], name: str) -> list[int]:
    tokens: list[int] = []
    for batch in batches:
        for chunk in batch.emitted:
            if chunk.request_id == name:
                assert chunk.first_index == len(tokens)
                tokens += unpack_u32(chunk.token_ids)
    return tokens


def ended(batches: list[EngineBatch], *names: str) -> Callable[[], bool]:
    return lambda: {end.request_id for batch in batches for end in batch.finished}.issuperset(names)


async def test_same_prompt_and_seed_give_the_same_output_on_every_engine() -> None:
    answers = []
    for _ in range(2):
        engine = MockEngine(engine_config(), speedup=1e4)
        async with running(engine) as batches:
            engine.submit(work_item("a", [1, 2, 3], 20))
            engine.submit(work_item("b", [1, 2, 3], 20, sampling=Sampling(max_tokens=20, seed=9)))
            engine.submit(work_item("c", [1, 2, 4], 20))
            await until(ended(batches, "a", "b", "c"))
            answers.append([generated(batches, name) for name in "abc"])
    first, second = answers
    assert first == second
    assert len({tuple(answer) for answer in first}) == 3
    assert all(len(answer) == 20 and set(answer) <= set(VOCABULARY) for answer in first)


async def test_equal_requests_differ_unless_a_seed_or_temperature_0_determines_the_output() -> None:
    engine = MockEngine(engine_config(), speedup=1e4)
    cases: dict[str, dict[str, float]] = {
        "drawn": {},
        "hot": {"temperature": 2.0},
        "seeded": {"seed": 9},
        "negative": {"seed": -9},
        "greedy": {"temperature": 0.0},
        "greedy and seeded": {"temperature": 0.0, "seed": 9},
    }
    names = [f"{case}-{number}" for case in cases for number in range(2)]
    async with running(engine) as batches:
        for name in names:
            sampling: Any = cases[name.rpartition("-")[0]]
            engine.submit(work_item(name, [1, 2, 3], 20, sampling=Sampling(max_tokens=20, **sampling)))
        await until(ended(batches, *names))
        outputs = {case: [generated(batches, f"{case}-{number}") for number in range(2)] for case in cases}
    assert {case for case, (first, second) in outputs.items() if first != second} == {"drawn", "hot"}
    assert outputs["greedy"] == outputs["greedy and seeded"]
    assert len({tuple(output) for pair in outputs.values() for output in pair}) == 4 + 3


async def test_fast_engine_emits_one_chunk_per_batch() -> None:
    engine = MockEngine(engine_config(), speedup=1e9)
    async with running(engine) as batches:
        for name in ("a", "b"):
            engine.submit(work_item(name, [ord(name)], 100))
        await until(ended(batches, "a", "b"))
    assert [len(batch.emitted) for batch in batches] == [2]
    assert [len(generated(batches, name)) for name in "ab"] == [100, 100]
    assert (batches[0].load.running, batches[0].load.kv_blocks_used) == (0, 0)


async def test_at_any_speedup_batches_stay_small_enough_to_share_the_loop() -> None:
    engine = MockEngine(engine_config(kv_blocks_total=4096), speedup=1e9)
    async with running(engine) as batches:
        engine.submit(work_item("a", [1], 10_000))
        await until(ended(batches, "a"))
    assert len(batches) > 1
    assert len(generated(batches, "a")) == 10_000


async def test_rejections_are_reported_as_failures() -> None:
    engine = MockEngine(engine_config(), speedup=1e4)
    async with running(engine) as batches:
        engine.submit(work_item("large", [1], 1000))
        engine.submit(work_item("odd", [1] * 9, 1, sequence_hashes=b""))
        await until(lambda: batches)
    failures = {failed.request_id: failed.error for batch in batches for failed in batch.failed}
    assert (failures["large"].status, failures["large"].code) == (400, "context_length_exceeded")
    assert (failures["odd"].status, failures["odd"].code) == (400, "invalid_request")


async def test_wrong_hashes_are_refused() -> None:
    engine = MockEngine(engine_config(), speedup=1000)
    async with running(engine) as batches:
        # One block behind different ones, as no prompts have them.
        for name, blocks in (("a", [1, 2, 3]), ("b", [2, 9]), ("c", [1])):
            engine.submit(work_item(name, [7] * 4 * len(blocks), 2, sequence_hashes=pack_u64(blocks)))
        engine.submit(work_item("real", [1, 2, 3, 4], 2))
        await until(ended(batches, "real"))
        failed = [failure for batch in batches for failure in batch.failed]
    assert [one.request_id for one in failed] == ["a", "b", "c"]
    assert {one.error.status for one in failed} == {400}


async def test_cancelling_the_last_request_reports_an_idle_engine() -> None:
    engine = MockEngine(engine_config(), speedup=10.0)
    async with running(engine) as batches:
        engine.submit(work_item("a", [1, 2, 3], 200))
        await until(lambda: batches)
        engine.cancel("a")
        engine.cancel("a")
        await until(lambda: batches[-1].load.running == 0)
    assert batches[-1].load.kv_blocks_used == 0
    assert not ended(batches, "a")()


async def test_nothing_from_before_a_reset_is_published_after_it() -> None:
    engine = MockEngine(engine_config(), speedup=1.0)
    async with running(engine) as batches:
        engine.submit(work_item("before", [1, 2, 3, 4], 5))
        engine.submit(work_item("refused", [1], 1000))
        await asyncio.sleep(0)
        engine.reset()
        engine.submit(work_item("after", [1, 2, 3, 4, 5], 1))
        await until(ended(batches, "after"))
    assert generated(batches, "before") == []
    assert not any(batch.failed for batch in batches)
    assert batches[0].finished[0].cached_tokens == 0


async def test_ranks_are_independent() -> None:
    engine = MockEngine(engine_config(), dp_size=2, speedup=1e4)
    async with running(engine) as batches:
        engine.submit(work_item("a", list(range(8)), 2))
        engine.submit(work_item("b", list(range(8)), 2, rank=1))
        await until(ended(batches, "a", "b"))
    by_rank = {batch.rank: batch for batch in batches if batch.cache_changes}
    assert sorted(by_rank) == [0, 1]
    assert generated(batches, "a") == generated(batches, "b")


@pytest.mark.parametrize("speedup", [0.0, -1.0, float("inf"), float("nan")])
def test_a_speedup_is_a_positive_number(speedup: float) -> None:
    with pytest.raises(ValueError, match="speedup"):
        MockEngine(engine_config(), speedup=speedup)


def test_output_uses_only_the_vocabulary() -> None:
    assert set(generate_tokens(1, 0, 64, VOCABULARY)) <= set(VOCABULARY)
