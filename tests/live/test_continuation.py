"""If a worker is lost during a response, another worker continues it and the client gets each token once."""

import asyncio
import functools
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from xxhash import xxh3_64_intdigest

from forebay.engine_model.model import EngineConfig
from forebay.engine_model.sequence import generate_tokens
from forebay.events.base import pack_u32
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import WorkerSpec
from forebay.events.progress import RequestFinished
from forebay.events.tokens import AttemptStarted, ResponseEnded, TokensEmitted
from forebay.events.topics import FLEET, PROGRESS, TOKENS
from forebay.ingress.streams import ReplySlot
from forebay.transport.base import Record, Tail, Wake
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.runtime.worker import Worker
from tests.harness.faulty_log import FaultyLog
from tests.system import BLOCK, MODEL, SLOT, System, submitted, until

PROMPT = list(range(10))
VOCABULARY = tuple(range(50))
LENGTH = 150
SLOW = 3.0  # speedup at which a response takes long enough to lose a worker during it


@dataclass
class Client:
    """The tokens and the end that one client received."""

    tokens: list[int] = field(default_factory=list)
    ended: ResponseEnded | None = None


@asynccontextmanager
async def listening(log: SqliteLog, name: str) -> AsyncIterator[Client]:
    """Follow the response as an ingress does, and yield its client."""
    client = Client()
    slot = ReplySlot(log, SLOT, 0, lambda: None, lambda _: None)
    stream = slot.reader(MODEL).open(name, submitted(name, PROMPT).reply_key)

    async def take() -> None:
        while client.ended is None:
            await stream.ready()
            assert stream.interrupt_reason is None
            client.tokens += stream.tokens
            stream.tokens = []
            client.ended = stream.ended

    tasks = [asyncio.create_task(slot.run()), asyncio.create_task(take())]
    try:
        yield client
        await tasks[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def generated(text: list[int], count: int) -> list[int]:
    """Return the tokens that a mock engine generates for a prompt."""
    return generate_tokens(xxh3_64_intdigest(pack_u32(text), 0), 0, count, VOCABULARY)


def first_index(system: System, attempt: int) -> int | None:
    """Return the position of the first token of an attempt in the response; None before this token."""
    chunks = [event.chunks[0] for event in system.events(TOKENS, TokensEmitted, SLOT)]
    return next((chunk.first_index for chunk in chunks if chunk.attempt == attempt), None)


def has_begun(system: System, attempt: int) -> bool:
    return first_index(system, attempt) is not None


def require_continuation(system: System, client: Client, attempts: int = 2) -> list[int]:
    """Check that each attempt continued the undisturbed response; return the valid tokens of attempt 1."""
    begins = [first_index(system, attempt) or 0 for attempt in range(1, attempts + 1)]
    assert begins == sorted(set(begins))
    assert client.tokens == generated(PROMPT, LENGTH)
    assert client.ended is not None
    assert client.ended.usage is not None
    assert (client.ended.usage.prompt_tokens, client.ended.usage.output_tokens) == (len(PROMPT), LENGTH)
    assert [routed.attempt for routed in system.decisions(RequestRouted)] == [*range(1, attempts + 1)]
    return client.tokens[: begins[1]]


@pytest.mark.parametrize("losses", [1, 2])
async def test_the_response_of_a_stopped_worker_continues_on_another(log: SqliteLog, losses: int) -> None:
    async with System(log).started(workers=0) as system, system.owned() as owner, listening(log, "r") as client:
        for attempt in range(1, losses + 1):
            system.start_worker(f"lost-{attempt}", speedup=SLOW)
            await until(lambda: len(owner.world.fleet) == 1)
            if attempt == 1:
                system.send(submitted("r", PROMPT, max_tokens=LENGTH))
            await until(functools.partial(has_begun, system, attempt))
            await system.stop_worker(f"lost-{attempt}")
            await until(lambda: not len(owner.world.fleet))
        system.start_worker("last")
        await until(lambda: client.ended)
        require_continuation(system, client, attempts=losses + 1)
        await until(lambda: not len(owner.world.requests))


async def test_a_worker_with_a_vanished_lease_continues_as_a_new_incarnation(log: SqliteLog) -> None:
    async with System(log).started(workers=0) as system, system.owned() as owner, listening(log, "r") as client:
        system.start_worker("a", speedup=SLOW)
        await until(lambda: len(owner.world.fleet) == 1)
        system.send(submitted("r", PROMPT, max_tokens=LENGTH))
        await until(lambda: client.tokens)
        (lease,) = system.leases.poll(MODEL)
        system.leases.release(MODEL, "a", lease.token)
        await until(lambda: client.ended)
        require_continuation(system, client)
        await until(lambda: not len(owner.world.requests))


class DeafLog(FaultyLog):
    """A log that hides new fleet events once `deaf` is set, so that its worker does not learn that it is lost."""

    def __init__(self, log: SqliteLog) -> None:
        super().__init__(log, crash_after=sys.maxsize)
        self.deaf = False

    def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> Tail:
        tail = super().tail(topic, partition, offset, wake)
        return DeafTail(self, tail) if topic == FLEET.name else tail


class DeafTail:
    """The tail of the fleet topic on a DeafLog."""

    def __init__(self, log: DeafLog, tail: Tail) -> None:
        self._log = log
        self._tail = tail

    def take(self, limit: int) -> list[Record]:
        return [] if self._log.deaf else self._tail.take(limit)

    def __len__(self) -> int:
        return 0 if self._log.deaf else len(self._tail)

    def close(self) -> None:
        self._tail.close()


@asynccontextmanager
async def zombie(system: System, log: DeafLog) -> AsyncIterator[None]:
    """Run a slow worker on its own view of the log."""
    config = EngineConfig(block_size=BLOCK, kv_blocks_total=256, vocabulary=VOCABULARY)
    spec = WorkerSpec(
        worker_id="zombie",
        model=MODEL,
        block_size=BLOCK,
        kv_blocks_total=config.kv_blocks_total,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    worker = Worker(log, system.keeper, spec, MockEngine(config, speedup=SLOW), token="zombie-1", group=MODEL)
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_worker_unaware_of_its_loss_does_not_disturb_the_response(log: SqliteLog) -> None:
    deaf = DeafLog(log)
    async with System(log).started(workers=0) as system, system.owned() as owner, listening(log, "r") as client:
        async with zombie(system, deaf):
            await until(lambda: len(owner.world.fleet) == 1)
            system.send(submitted("r", PROMPT, max_tokens=LENGTH))
            await until(lambda: client.tokens)
            deaf.deaf = True
            system.leases.release(MODEL, "zombie", "zombie-1")
            await until(lambda: owner.world.fleet.get("zombie") is None)
            system.start_worker("b")
            await until(lambda: {end.attempt for end in system.events(PROGRESS, RequestFinished)} == {1, 2})
        await until(lambda: client.ended)
        emitted = require_continuation(system, client)
        events = system.events(TOKENS, None, SLOT)
        begin = next(at for at, event in enumerate(events) if isinstance(event, AttemptStarted))
        stale = [event for event in events[begin:] if isinstance(event, TokensEmitted) and event.chunks[0].attempt == 1]
        assert stale, "the zombie emitted nothing, so the test checks nothing"
        assert stale[0].chunks[0].first_index == len(emitted)
        assert client.ended is not None
        assert client.ended.attempt == 2
        assert sorted(end.attempt for end in system.ends()["r"]) == [1, 2]
        await until(lambda: not len(owner.world.requests))
