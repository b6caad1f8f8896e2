"""An owner's world and one engine model a rank, on one clock: a discrete-event run in virtual time.

Theory of operation. The clock jumps from one event to the next: something arrives from outside, or an engine's step
ends. What happens at one time happens in a fixed order: steps that end, in the order in which they began (a report of
load has its place among them); what arrives, in its own order; then idle engines begin their next step. Every event
goes through `forebay.core.step` as an owner applies it, so a decision here is the decision that an owner would make of
the same log. Nothing takes time but engine steps.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256
from heapq import heappop, heappush
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from forebay.core.engine_model import EngineRequest, RequestRefused
from forebay.core.holder_bits import HolderKey
from forebay.core.policies import BUILT_IN
from forebay.core.step import CONSUMED_RUNS_MAX, Decided, InputEvent, advance, open_run, step
from forebay.core.world import World
from forebay.events.base import U32_BYTES
from forebay.events.codec import encode
from forebay.events.control import RouterConfig
from forebay.events.decisions import JournalRecord, RequestAborted, RequestRejected, RequestRouted
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import DECISIONS, KV_EVENTS, METRICS, PROGRESS, Topic
from forebay.simulate.outcome import Served
from forebay.simulate.rank import LOAD_INTERVAL_US, EngineRank

FOREVER_US = 1 << 62  # nothing comes any more: an engine may run until it has something to say

OnArrived = Callable[[int], object]


class Arrival(NamedTuple):
    """A record that comes from outside: requests, and what operators say."""

    at_us: int
    topic: Topic
    event: InputEvent


class Cluster:
    """One run. Add the ranks of all workers, then play what arrives.

    Attributes:
        world: the owner's.
        served: what became of each request, in the order of arrival.
    """

    def __init__(self, world: World, *, reports: bool, speedup: float = 1.0) -> None:
        """`reports`: whether anybody looks at load reports, of which there are more than of all other events.

        Engines run `speedup` times as fast as their model.
        """
        self.world = world
        self.served: dict[str, Served] = {}
        self._speedup = speedup
        self._reports = reports
        self._digest = sha256()
        self._ranks: dict[HolderKey, EngineRank] = {}
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._ready: dict[int, EngineRank] = {}
        self._asked: dict[str, RequestSubmitted] = {}  # not routed yet
        self._records: deque[tuple[Topic, InputEvent]] = deque()  # written and not applied yet
        self._now_us = world.now_us

    def add(self, rank: EngineRank) -> None:
        """A rank takes part. Its worker is, or will be, a member of the fleet."""
        self._ranks[rank.spec.worker_id, rank.rank] = rank

    def play(self, arrivals: Iterable[Arrival], on_arrived: OnArrived) -> None:
        """Run until everybody has an answer; arrivals come in the order of their times.

        `on_arrived` gets how many requests did arrive.
        """
        coming = iter(arrivals)
        arrival = next(coming, None)
        while arrival is not None or self._due:
            arrival_us = FOREVER_US if arrival is None else arrival.at_us
            self._now_us = min(arrival_us, self._due[0][0]) if self._due else arrival_us
            while self._due and self._due[0][0] == self._now_us:
                heappop(self._due)[2]()
            while arrival is not None and arrival_us == self._now_us:
                self._arrive(arrival)
                on_arrived(len(self.served))
                arrival = next(coming, None)
                arrival_us = FOREVER_US if arrival is None else arrival.at_us
            # Who waits in the router may be sent to an engine whenever another is done with something.
            waiting = any(map(self.world.queues.waiting, self.world.pools))
            self._begin_steps(0 if waiting else arrival_us - self._now_us)
        assert not len(self.world.requests), "every request came to an end"

    def apply(self, topic: Topic, event: InputEvent) -> None:
        """One record of `topic`, and then those that it leads to at once."""
        self._records.append((topic, event))
        while self._records:
            self._apply_one(*self._records.popleft())

    def digest(self) -> str:
        """Of all decisions, in hexadecimal, and of the state in which it ended. Ask once, at the end."""
        self._seal(advance(self.world))
        return self._digest.hexdigest()

    def _arrive(self, arrival: Arrival) -> None:
        event = arrival.event
        if isinstance(event, RequestSubmitted):
            self.served[event.request_id] = Served(self._now_us, event.prompt_tokens, event.sampling.max_tokens)
            self._asked[event.request_id] = event
        self.apply(arrival.topic, event)

    def _schedule(self, after_us: int, action: Callable[[], None]) -> None:
        heappush(self._due, (self._now_us + after_us, self._scheduled, action))
        self._scheduled += 1

    def _apply_one(self, topic: Topic, event: InputEvent) -> None:
        """A record as an owner applies it; then what was decided happens."""
        world = self.world
        decided = open_run(world, self._now_us)
        decided += step(world, topic.name, event, self._now_us)
        for decision in decided:
            self._seal(decision)
        if len(world.consumed) >= CONSUMED_RUNS_MAX:
            self._seal(advance(world))
        for decision in decided:
            self._act(decision)

    def _seal(self, record: JournalRecord) -> None:
        self._digest.update(encode(DECISIONS, record) + b"\n")

    def _act(self, decision: Decided) -> None:
        """Let a decision happen: its work begins at once."""
        match decision:
            case RequestRouted():
                self._submit(decision)
            case RequestRejected():
                del self._asked[decision.request_id]
                self.served[decision.request_id].failure = decision.message
            case RequestAborted():
                self._asked.pop(decision.request_id, None)
                if decision.worker_id:
                    self._rank_of(decision.request_id).engine.cancel(decision.request_id)
                self.served[decision.request_id].failure = decision.message
            case _:
                pass  # it changes nothing outside the router

    def _submit(self, routed: RequestRouted) -> None:
        asked = self._asked.pop(routed.request_id)
        rank = self._ranks[routed.worker_id, routed.rank]
        request = EngineRequest(
            request_id=routed.request_id,
            attempt=routed.attempt,
            token_ids=asked.token_ids or bytes(asked.prompt_tokens * U32_BYTES),
            sequence_hashes=asked.sequence_hashes,
            token_seed=xxh3_64_intdigest(routed.request_id.encode()),
            max_tokens=asked.sampling.max_tokens,
        )
        served = self.served[routed.request_id]
        served.worker = rank.number
        try:
            rank.engine.submit(request)
        except RequestRefused as refusal:
            served.failure = str(refusal)
            self._records.append((PROGRESS, rank.refused(routed, served.failure)))
            return
        self._ready[rank.number] = rank

    def _rank_of(self, request_id: str) -> EngineRank:
        number = self.served[request_id].worker
        return next(rank for rank in self._ranks.values() if rank.number == number)

    def _begin_steps(self, until_us: int) -> None:
        """Idle engines that have work begin; nothing that could change it comes for `until_us`."""
        speedup = self._speedup
        for _, rank in sorted(self._ready.items()):
            if rank.step is not None:
                continue
            rank.step = rank.engine.step(until_us if speedup == 1.0 else int(until_us * speedup))
            if rank.step is not None:
                lasts_us = rank.step.duration_us
                lasts_us = lasts_us if speedup == 1.0 else max(1, round(lasts_us / speedup))
                self._schedule(lasts_us, partial(self._end_step, rank))
        self._ready.clear()

    def _end_step(self, rank: EngineRank) -> None:
        """What a step did is known when it ends: to the router in the order in which a worker says it."""
        done, rank.step = rank.step, None
        assert done is not None
        owner_epoch = self.world.owner_epoch
        self._ready[rank.number] = rank
        if rank.spec.kv_events:
            for change in done.cache_changes:
                self.apply(KV_EVENTS, rank.cache_change(change))
        for first in done.first_tokens:
            served = self.served[first.request_id]
            served.first_us, served.cached_tokens = self._now_us, first.cached_tokens
            self.apply(PROGRESS, rank.began(first, owner_epoch))
        for end in done.finished:
            self.served[end.request_id].last_us = self._now_us
            self.apply(PROGRESS, rank.finished(end, owner_epoch))
        rank.load = done.load
        if self._reports and not rank.report_held:
            wait_us = rank.reported_us + LOAD_INTERVAL_US - self._now_us
            if wait_us > 0:
                rank.report_held = True
                self._schedule(wait_us, partial(self._report, rank))
            else:
                self._report(rank)

    def _report(self, rank: EngineRank) -> None:
        rank.report_held = False
        rank.reported_us = self._now_us
        self.apply(METRICS, rank.report())


def needs_reports(router: RouterConfig) -> bool:
    """Whether a router looks at what workers report of their load."""
    return router.mode not in BUILT_IN or router.busy.active_decode_blocks_threshold is not None
