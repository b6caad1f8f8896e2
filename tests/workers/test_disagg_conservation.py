"""Random histories of requests at a prefill and a decode engine: each ends once, and all blocks are freed."""

import asyncio
from collections import Counter
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from forebay.engine_model.sequence import generate_tokens
from forebay.events.base import unpack_u32
from forebay.events.control import Command, Role
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch
from forebay.workers.engines.mock.engine import MockEngine
from tests.depth import examples
from tests.workers.conftest import VOCABULARY, engine_config, until, work_item
from tests.workers.disagg import kv_settings
from tests.workers.hosted import HOSTED_SPEC

PROMPTS = ([1], [1, 2, 3, 4], list(range(8)), list(range(11)), [*range(8), 70, 71, 72], list(range(50, 70)))
BLOCKS = 12  # the longest prompt takes five, and two for its answer: not all find room at once
MAX_TOKENS = 7

prompts = st.sampled_from(PROMPTS)
sides = st.sampled_from(["prefill", "decode"])
which = st.integers(0, 9)  # of those that are there
operations = st.one_of(
    st.tuples(st.just("compute"), prompts),
    st.tuples(st.just("answer"), which),
    st.tuples(st.just("cancel"), sides, which),
    st.tuples(st.just("release"), which),
    st.tuples(st.just("wait"), st.integers(0, 4)),
    st.tuples(st.just("command"), sides, st.sampled_from(["sleep", "wake_up", "pause", "resume"])),
    st.tuples(st.just("reset"), sides),
)


class EngineSide:
    """One engine, with at most one request in flight per id, as its worker guarantees."""

    def __init__(self, role: Role, run: "Run") -> None:
        config = engine_config(kv_blocks_total=BLOCKS)
        self.engine = MockEngine(config, speedup=1e5, kv=kv_settings(lease_s=60.0))
        self.spec = msgspec.structs.replace(HOSTED_SPEC, worker_id=role, role=role, kv_blocks_total=BLOCKS)
        self.epoch = 0
        self.under_way: dict[str, WorkItem] = {}
        self._run = run

    async def serve(self) -> None:
        await self.engine.run(lambda batch: self._run.observed(self, batch))

    def submit(self, item: WorkItem) -> None:
        self.under_way[item.request_id] = item
        self.engine.submit(item)

    def cancel(self, name: str) -> None:
        self.under_way.pop(name, None)
        self.engine.cancel(name)

    def reset(self) -> None:
        self.epoch += 1
        self.under_way.clear()
        self.engine.reset()

    async def idle(self) -> None:
        engine, rank = self.engine, self.engine.ranks[0]
        await until(lambda: not (engine.kept() or rank.model.pool.used or engine.requests()))
        await until(lambda: engine.kv is not None and not engine.kv.slots.used)
        await until(lambda: engine.kv_stats().offered == sum(engine.kv_stats().freed.values()))
        stats = engine.kv_stats()
        assert (stats.held_offers, stats.held_blocks, stats.in_flight, stats.waiting) == (0, 0, 0, 0)


class Run:
    """Both engines, and the outcomes of their requests."""

    def __init__(self) -> None:
        self.prefill, self.decode = EngineSide("prefill", self), EngineSide("decode", self)
        self.made: list[str] = []
        self.kept: dict[str, tuple[WorkItem, Prefilled]] = {}
        self.expected: Counter[str] = Counter()  # answers that were not given up
        self.ends: Counter[str] = Counter()
        self.generated: dict[str, list[int]] = {}

    def observed(self, half: EngineSide, batch: EngineBatch) -> None:
        for one in batch.emitted:
            if one.request_id in half.under_way:
                self.generated.setdefault(one.request_id, []).extend(unpack_u32(one.token_ids))
        for prompt in batch.prefilled:
            if prompt.request_id in half.under_way:
                self.kept[prompt.request_id] = half.under_way.pop(prompt.request_id), prompt.prefilled
            else:
                half.engine.release(prompt.request_id)  # as a worker does
        ended = [end.request_id for end in batch.finished]
        ended += [end.request_id for end in batch.failed]
        ended += [end.request_id for end in batch.not_fetched]
        for name in ended:
            self.ends[name] += half.under_way.pop(name, None) is not None
        for end in batch.finished:
            right = generate_tokens(xxh3_64_intdigest(self.token_ids(end.request_id), 0), 0, MAX_TOKENS, VOCABULARY)
            if end.request_id in self.expected:
                assert self.generated[end.request_id] == right

    def token_ids(self, name: str) -> bytes:
        return work_item(name, PROMPTS[int(name.partition(".")[0])], 1).token_ids

    def compute(self, prompt: list[int]) -> None:
        name = f"{PROMPTS.index(prompt)}.{len(self.made)}"
        self.made.append(name)
        self.prefill.submit(work_item(name, prompt, MAX_TOKENS, stage="prefill", worker_epoch=self.prefill.epoch))

    def answer(self, number: int) -> None:
        if (name := _nth(list(self.kept), number)) is not None:
            item, prefilled = self.kept.pop(name)
            self.expected[name] += 1
            fields = {"stage": "decode", "worker_epoch": self.decode.epoch, "prefilled": prefilled}
            self.decode.submit(msgspec.structs.replace(item, **fields))

    def cancel(self, half: EngineSide, number: int) -> None:
        kept = list(self.kept) if half is self.prefill else []
        if (name := _nth([*half.under_way, *kept], number)) is not None:
            self.kept.pop(name, None)
            del self.expected[name]
            half.cancel(name)

    def reset(self, half: EngineSide) -> None:
        if half is self.prefill:
            self.kept.clear()
        for name in half.under_way:
            del self.expected[name]
        half.reset()

    async def act(self, operation: tuple[Any, ...]) -> None:
        half = self.prefill if "prefill" in operation else self.decode
        match operation:
            case ("compute", prompt):
                self.compute(prompt)
            case ("answer", number):
                self.answer(number)
            case ("cancel", _, number):
                self.cancel(half, number)
            case ("release", number) if (name := _nth(list(self.kept), number)) is not None:
                del self.kept[name]
                self.prefill.engine.release(name)
            case ("wait", moments):
                for _ in range(moments * 3):  # whatever is ready by then
                    await asyncio.sleep(0)
            case ("command", _, action):
                await half.engine.command(Command(action=action))
            case ("reset", _):
                self.reset(half)

    async def end(self) -> None:
        """Run all requests to their end and check that nothing is left."""
        for half in (self.prefill, self.decode):
            for action in ("wake_up", "resume"):
                await half.engine.command(Command(action=action))
        # Prompts may wait for the room of what is kept.
        await until(self._over)
        await self.prefill.idle()
        await self.decode.idle()
        assert +self.expected == Counter({name: self.ends[name] for name in self.expected})

    def _over(self) -> bool:
        """Return whether all kept KV was fetched, or released because its reader could not notify the holder."""
        self.answer(0)
        for name in self.made:
            if name not in self.kept and name not in self.prefill.under_way and name not in self.decode.under_way:
                self.prefill.engine.release(name)
        return not (self.prefill.under_way or self.kept or self.decode.under_way)


def _nth(found: list[str], number: int) -> str | None:
    return found[number % len(found)] if found else None


@examples(0.5)
@given(st.lists(operations, min_size=1, max_size=40))
def test_disagg_requests_end_once_and_all_blocks_are_freed(drawn: list[tuple[Any, ...]]) -> None:
    async def scenario() -> None:
        run = Run()
        for half in (run.prefill, run.decode):
            await half.engine.start(half.spec)
        serving = [asyncio.create_task(half.serve()) for half in (run.prefill, run.decode)]
        try:
            for operation in drawn:
                await run.act(operation)
                await asyncio.sleep(0)
            await run.end()
        finally:
            for task in serving:
                task.cancel()
            ended = await asyncio.gather(*serving, return_exceptions=True)
            for half in (run.prefill, run.decode):
                await half.engine.stop()
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended

    asyncio.run(scenario())
