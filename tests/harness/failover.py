"""Break a distributed system under load, measure how long it does not route, and check that no request suffers.

A request suffers if its client gets no response, two responses or other tokens than those of an undisturbed run, or if
the log holds a request that never ended.
"""

import asyncio
import contextlib
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import redis

from forebay.core.state.reply_slot import ResponseState, apply
from forebay.events.base import unpack_u32
from forebay.events.decisions import CacheResyncRequested
from forebay.events.fleet import WorkerLost, WorkerSuspect
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import DECISIONS, FLEET, HEARTBEATS, REQUESTS
from forebay.workers.engines.mock.outputs import sampler_seed
from tests.harness.brokers import StoppableBroker
from tests.harness.cluster import GROUP, Cluster
from tests.harness.local import StoppableRedis
from tests.harness.mock_words import Words
from tests.integration.stream_clients import StreamClients, StreamResult, prompt, stream_clients

TOKENS = 6  # output tokens of a short response
PATIENCE_S = 180.0
TAKEN_S = 60.0
LONG_TOKENS = 120
SETTLED_S = 120.0
FOLLOWED_EVERY_S = 0.5  # between two reads of all heartbeats
HEARD_S = 0.5  # a standby that follows has read a heartbeat of the owner, which writes four per second
UNACKNOWLEDGED_US = 500_000  # an owner makes its last decision before an outage within this time


@dataclass(slots=True)
class Counts:
    """Requests of one part, as their clients and the log saw them.

    Attributes:
        rejected: times that an ingress answered 503 and the client sent the request again.
        problems: a line for each request that suffered.
    """

    sent: int = 0
    rejected: int = 0
    problems: list[str] = field(default_factory=list)


class System:
    """A cluster, and the checks of its requests."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._replaced = 0
        self._words = Words()

    async def replace_router(self) -> None:
        """Start a router in place of one that ended, and wait until it is ready to take over. Raises ProcessError."""
        self._replaced += 1
        name = f"r{self._replaced}-again"
        end = max(beat.position for beat in await self.cluster.events(HEARTBEATS))
        self.cluster.router(name)
        await self.cluster.until_owned()
        deadline = time.monotonic() + PATIENCE_S
        while not any(
            beat.router_id == name and beat.position >= end for beat in await self.cluster.events(HEARTBEATS)
        ):
            assert time.monotonic() < deadline, f"{name} does not follow the journal"
            await asyncio.sleep(FOLLOWED_EVERY_S)
        await asyncio.sleep(HEARD_S)

    async def until_members(self, count: int) -> None:
        """Wait until `count` workers are members. Raises ProcessError."""

        async def joined() -> bool:
            return len(await self.cluster.members()) == count

        await self.cluster.processes.until(f"{count} workers are members", joined)

    def pids(self) -> dict[str, int]:
        """Return the process ids of the services."""
        return {one.name: one.process.pid for one in self.cluster.processes.running()}

    async def owner(self) -> str:
        owner = await self.cluster.owner()
        assert owner is not None, "no router owns the group"
        return owner

    @contextlib.asynccontextmanager
    async def load(self, every_s: float, counts: Counts, tokens: int = TOKENS) -> AsyncIterator[StreamClients]:
        """Send requests while the body runs, wait for all responses, and add what their clients saw to `counts`."""
        async with stream_clients(list(self.cluster.urls.values()), uuid.uuid4().hex[:8]) as clients:
            async with clients.load(every_s, tokens, first=counts.sent):
                await self.cluster.processes.until("responses arrive", lambda: served(clients, 5))
                yield clients
            self.count(clients, tokens, counts)

    def count(self, clients: StreamClients, tokens: int, counts: Counts) -> None:
        """Add ended requests to `counts`."""
        counts.sent += len(clients.results)
        counts.rejected += clients.rejected
        counts.problems += [line for one in clients.results if (line := self._problem(one, tokens))]

    async def settled(self) -> list[str]:
        """Wait until every request on the log has ended; return a line for each that did not, or ended wrongly."""
        deadline = time.monotonic() + SETTLED_S
        while True:
            submitted = [one for one in await self.cluster.events(REQUESTS) if isinstance(one, RequestSubmitted)]
            states = {one.request_id: ResponseState(one.reply_key) for one in submitted}
            for event in await self.cluster.replies():
                apply(states, event, GROUP)
            hung = [name for name, state in states.items() if state.ended is None]
            if not hung or time.monotonic() > deadline:
                break
            await asyncio.sleep(1.0)
        found = [f"{name} has not ended" for name in hung]
        for one in submitted:
            state = states[one.request_id]
            # A request that its ingress cancelled may have begun; the client sent it again under another id.
            complete = state.ended is not None and state.ended.error is None
            seed = sampler_seed(one.request_id, one.sampling)
            expected = self._words.tokens(unpack_u32(one.token_ids), one.sampling.max_tokens, seed)
            if state.tokens != (expected if complete else expected[: len(state.tokens)]):
                found.append(f"{one.request_id} has other tokens on the log")
        return found

    def _problem(self, one: StreamResult, tokens: int) -> str:
        if one.problem or one.ends != 1:
            return f"{one.request_id}: {one.ends} ends, {one.problem or 'no error'}"
        if one.text != self._words.text(one.prompt, tokens):
            return f"{one.request_id}: other tokens than without a failure"
        return ""


async def served(clients: StreamClients, count: int, first: int = 0) -> bool:
    """Return whether `count` responses from number `first` on have ended."""
    return sum(one.ends for one in clients.results[first:]) >= count


async def kill_owner(system: System) -> tuple[float, float]:
    """Kill the owner, and start a replacement once another router owns the group.

    Returns:
        Seconds from the kill until another router claimed the group, and until that router routed a request.
    """
    owner = await system.owner()
    killed_us = system.cluster.kill(owner)
    newest = await system.cluster.taken_over(owner, within_s=TAKEN_S)
    assert newest.first_routed_us is not None
    await system.replace_router()
    return (newest.claimed_us - killed_us) / 1e6, (newest.first_routed_us - killed_us) / 1e6


async def stop_owner(system: System) -> float:
    """Stop the owner as planned, and start a replacement.

    Returns:
        Seconds between the last request that the old owner routed and the first one of the new owner.
    """
    owner = await system.owner()
    await system.cluster.stop(owner)
    newest = await system.cluster.taken_over(owner, within_s=TAKEN_S)
    before = next(one for one in reversed(await system.cluster.ownerships()) if one.router == owner)
    assert newest.first_routed_us is not None
    assert before.last_routed_us is not None
    await system.replace_router()
    return (newest.first_routed_us - before.last_routed_us) / 1e6


async def kill_worker(system: System, victim: str, streams: int, counts: Counts) -> tuple[float, int]:
    """Kill a worker once all of `streams` long responses have begun.

    Returns:
        Seconds from the kill until the owner recorded the loss, and the number of streams that moved.
    """
    async with stream_clients(list(system.cluster.urls.values()), uuid.uuid4().hex[:8]) as clients:
        results = [clients.submit(prompt(number), LONG_TOKENS) for number in range(streams)]

        async def begun() -> bool:
            return all(one.text or one.problem for one in results)

        await system.cluster.processes.until("all streams have begun", begun, within_s=PATIENCE_S)
        killed_us = system.cluster.kill(victim)
        fact = await lost(system.cluster, victim)
        await clients.all()
        system.count(clients, LONG_TOKENS, counts)
        moved = sum(one.attempts > 1 for one in results if one.served)
    return (fact.at_us - killed_us) / 1e6, moved


async def stop_worker(system: System, name: str) -> float:
    """Stop a worker as planned. Return the seconds from its exit until the owner recorded that it is gone."""
    await system.cluster.stop(name, within_s=TAKEN_S)
    exited_us = time.time_ns() // 1000
    return ((await lost(system.cluster, name)).at_us - exited_us) / 1e6


async def lost(cluster: Cluster, worker: str) -> WorkerLost:
    """Wait until the owner has recorded the loss of a worker, and return the event."""

    async def found() -> WorkerLost | None:
        facts = [one for one in await cluster.events(FLEET) if isinstance(one, WorkerLost)]
        return next((one for one in reversed(facts) if one.worker_id == worker), None)

    return await cluster.processes.until(f"{worker} is lost", found)


async def restart_broker(system: System, broker: StoppableBroker, clients: StreamClients) -> tuple[float, float]:
    """Kill the broker and restart it with its data.

    Returns:
        Seconds without a broker, and seconds from its return until a request of after the kill was complete.
    """
    broker.kill()
    killed_s, first = time.monotonic(), len(clients.results)
    await broker.restart()
    back_s = time.monotonic()
    await system.cluster.processes.until("requests are served", lambda: served(clients, 1, first), within_s=PATIENCE_S)
    served_s = time.monotonic()
    await system.cluster.processes.until(
        "more requests are served", lambda: served(clients, 20, first), within_s=PATIENCE_S
    )
    return back_s - killed_s, served_s - back_s


async def kill_leader(system: System, leader: StoppableBroker, clients: StreamClients) -> tuple[float, float]:
    """Kill the broker that leads all partitions.

    Returns:
        Seconds from the kill until the owner routed a request, and until a response of after the kill was complete.
    """
    leader.kill()
    killed_us, first = time.time_ns() // 1000, len(clients.results)
    await system.cluster.processes.until("requests are served", lambda: served(clients, 1, first), within_s=PATIENCE_S)
    served_s = time.time_ns() / 1e9 - killed_us / 1e6
    # A decision of the moment of the kill waits for its acknowledgement. Later ones are made once it has arrived.
    begin_us = killed_us + UNACKNOWLEDGED_US
    routed_us = min(at for one in await system.cluster.ownerships() for at in one.routed_us if at > begin_us)
    return (routed_us - killed_us) / 1e6, served_s


async def flush_redis(system: System, store: StoppableRedis, clients: StreamClients) -> None:
    """Flush Redis, and wait until every worker holds its lease again and further requests were served."""
    first = len(clients.results)
    with redis.Redis.from_url(store.url) as client:
        client.flushall()
    await _until_held(system, store)
    await system.cluster.processes.until("requests are served", lambda: served(clients, 20, first))


async def restart_redis(system: System, store: StoppableRedis, clients: StreamClients, away_s: float) -> None:
    """Stop Redis, start it empty after `away_s`, and wait until every worker holds its lease again."""
    store.stop()
    first = len(clients.results)
    await asyncio.sleep(away_s)
    await system.cluster.processes.until("requests are served without Redis", lambda: served(clients, 20, first))
    await asyncio.to_thread(store.start)
    await _until_held(system, store)
    first = len(clients.results)
    await system.cluster.processes.until("requests are served", lambda: served(clients, 20, first))


async def _until_held(system: System, store: StoppableRedis) -> None:
    members = len(await system.cluster.members())
    with redis.Redis.from_url(store.url) as client:

        async def held() -> bool:
            return len(list(client.scan_iter(match=f"{system.cluster.namespace}:lease:*"))) == members

        await system.cluster.processes.until("leases are held again", held)


@dataclass(slots=True)
class FleetFacts:
    """Facts and orders of the owner about workers."""

    suspect: int
    lost: int
    resyncs: int


async def fleet_facts(cluster: Cluster) -> FleetFacts:
    """Count suspect and lost workers, and orders to re-announce a cache, since the beginning of the log."""
    fleet = await cluster.events(FLEET)
    decided = await cluster.events(DECISIONS)
    return FleetFacts(
        suspect=sum(isinstance(one, WorkerSuspect) for one in fleet),
        lost=sum(isinstance(one, WorkerLost) for one in fleet),
        resyncs=sum(isinstance(one, CacheResyncRequested) for one in decided),
    )


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()
