"""Load on a distributed system while a test or demo breaks it, and the check that no request suffers.

A request suffers if its client gets no response, two responses or other tokens than those of an undisturbed run, or if
the log holds a request that never ended.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from forebay.core.state.reply_slot import ResponseState, apply
from forebay.events.base import unpack_u32
from forebay.events.fleet import WorkerLost
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import FLEET, HEARTBEATS, REQUESTS
from forebay.workers.engines.mock.outputs import sampler_seed
from tests.harness.cluster import GROUP, Cluster
from tests.harness.mock_words import Words
from tests.integration.stream_clients import StreamClients, StreamResult, stream_clients

TOKENS = 6  # output tokens of a short response
PATIENCE_S = 180.0
TAKEN_S = 60.0
SETTLED_S = 120.0
HEARD_S = 0.5  # a standby that follows has read a heartbeat of the owner, which writes four per second


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
        end = await self.journal_end()
        self.cluster.router(name)
        await self.cluster.until_owned()
        await self.until_followed([name], end)
        await asyncio.sleep(HEARD_S)

    async def journal_end(self) -> int:
        """Return the end of the journal that the routers have read so far."""
        beats: list[RouterHeartbeat] = await self.cluster.events(HEARTBEATS)
        return max(beat.position for beat in beats)

    async def until_followed(self, routers: list[str], end: int) -> None:
        """Wait until these routers have read the journal up to its former end. Raises ProcessError."""
        await self.cluster.until(
            f"{routers} follow the journal",
            lambda: self.cluster.events(HEARTBEATS),
            lambda beats: set(routers) <= {beat.router_id for beat in beats if beat.position >= end},
            within_s=PATIENCE_S,
        )

    def pids(self) -> dict[str, int]:
        return {one.name: one.process.pid for one in self.cluster.processes.running()}

    @contextlib.asynccontextmanager
    async def clients(self) -> AsyncIterator[StreamClients]:
        async with stream_clients(list(self.cluster.urls.values()), uuid.uuid4().hex[:8]) as clients:
            yield clients

    @contextlib.asynccontextmanager
    async def load(self, every_s: float, counts: Counts) -> AsyncIterator[StreamClients]:
        """Send requests while the body runs, wait for all responses, and add what their clients saw to `counts`."""
        async with self.clients() as clients:
            async with clients.load(every_s, TOKENS, first=counts.sent):
                await self.until_served(clients, 5)
                yield clients
            self.count(clients, TOKENS, counts)

    async def until_served(self, clients: StreamClients, count: int, first: int = 0) -> None:
        """Wait until `count` responses from number `first` on have ended. Raises ProcessError."""

        def ended() -> int:
            return sum(one.ends for one in clients.results[first:])

        await self.cluster.until("requests are served", ended, lambda ends: ends >= count, within_s=PATIENCE_S)

    def count(self, clients: StreamClients, tokens: int, counts: Counts) -> None:
        """Add ended requests to `counts`."""
        counts.sent += len(clients.results)
        counts.rejected += clients.rejected
        counts.problems += [line for one in clients.results if (line := self._problem(one, tokens))]

    async def settled(self) -> list[str]:
        """Wait until every request on the log has ended; return a line for each that did not, or ended wrongly."""
        deadline = time.monotonic() + SETTLED_S
        while True:
            submitted = await self.cluster.events(REQUESTS, RequestSubmitted)
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


async def stop_worker(cluster: Cluster, name: str) -> float:
    """Stop a worker as planned. Return the seconds from its exit until the owner recorded that it is gone."""
    await cluster.stop(name, within_s=TAKEN_S)
    exited_us = time.time_ns() // 1000
    return ((await lost(cluster, name)).at_us - exited_us) / 1e6


async def lost(cluster: Cluster, worker: str) -> WorkerLost:
    """Wait until the owner has recorded the loss of a worker, and return the event."""

    async def losses() -> list[WorkerLost]:
        return [one for one in await cluster.events(FLEET, WorkerLost) if one.worker_id == worker]

    found: list[WorkerLost] = await cluster.until(f"{worker} is lost", losses)
    return found[-1]
