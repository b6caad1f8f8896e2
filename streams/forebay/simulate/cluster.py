"""An owner's world and one engine model a rank, on one clock: a discrete-event run in virtual time.

Theory of operation. The clock jumps from one event to the next. What happens at one time happens in a fixed order:
steps that end, and what workers said, as they began and said it; then what may give engines work (requests and work
that were on their way, workers that die, join or are lost); what arrives, in its own order; then idle engines begin.
Every event goes through `forebay.core.step` as an owner applies it, so a decision here is the decision that an owner
would make of the same log. A step goes on beyond one iteration while nothing can come that gives engines work; steps
of prefill workers, and what these say, may do that.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from heapq import heappop

from msgspec import structs

from forebay.core.state.holder_bits import HolderKey
from forebay.core.step import CONSUMED_RUNS_MAX, AnyDecision, InputEvent, advance, open_run, step
from forebay.core.world import World
from forebay.engine_model.model import Computed, FirstTokenStep, QueueFull, RequestRefused
from forebay.events.codec import encode
from forebay.events.decisions import (
    CommandTarget,
    JournalRecord,
    KvReleased,
    RequestAborted,
    RequestRejected,
    RequestRouted,
)
from forebay.events.requests import TIMEOUT_US_MAX, RequestSubmitted
from forebay.events.topics import DECISIONS, KV_EVENTS, METRICS, PROGRESS, REQUESTS, Topic
from forebay.events.transfer import Prefilled
from forebay.simulate.arrivals import FOREVER_US, Arrival, Arrivals
from forebay.simulate.delays import NO_HOPS, Hop, Hops
from forebay.simulate.outcome import EXPLAINED_MAX, Requests, Timeline
from forebay.simulate.rank import LOAD_INTERVAL_US, EngineRank
from forebay.simulate.requests import UnderWay
from forebay.simulate.scheduled_events import Happenings
from forebay.simulate.settings import Transfer
from forebay.simulate.timeline import Recorder
from forebay.simulate.transfers import LEASE_US, Kept, Transferred, Transfers

OnArrived = Callable[[int], object]
NO_TRANSFER = Transfer()
BAD_REQUEST, UNAVAILABLE = 400, 503


class Cluster:
    """One run. Add the ranks of all workers, then play what arrives.

    Attributes:
        world: the owner's.
        requests: what became of each, in the order of arrival.
        routed: the last decision that sent each of the first `EXPLAINED_MAX` somewhere, by place.
        lasted_us: when the last answer was there.
    """

    def __init__(
        self,
        world: World,
        *,
        reports: bool,
        speedup: float = 1.0,
        hops: Hops = NO_HOPS,
        transfer: Transfer = NO_TRANSFER,
    ) -> None:
        """`reports`: whether anybody looks at load reports, of which there are more than of all other events.

        Engines run `speedup` times as fast as their model. `hops` are those of clients and of the router. `transfer`
        is how KV moves, where there are prefill workers.
        """
        self.world = world
        self.requests = Requests()
        self.routed: dict[int, RequestRouted] = {}
        self.lasted_us = 0
        self._speedup = speedup
        self._reports = reports
        self._hops = hops
        self._digest = sha256()
        self._disaggregated = False
        self._ranks: dict[HolderKey, EngineRank] = {}
        self._numbered: dict[int, EngineRank] = {}
        self._recorder = Recorder()
        self._due, self._coming = Happenings(), Happenings()  # what ends or is said, and what may give an engine work
        self._ready: dict[int, EngineRank] = {}
        self._blocked: set[int] = set()  # ranks of prefill workers that wait for room: who fetches gives them some
        self._lapsed: set[str] = set()  # requests whose KV is kept no longer, until who is to fetch it knows
        self._under_way: dict[str, UnderWay] = {}
        self._records: deque[tuple[Topic, InputEvent]] = deque()  # written and not applied yet
        self.now_us = world.now_us
        self._opened_us = -1  # when time was last let pass in the world
        self._arrivals: Arrivals
        self._transfers = Transfers(transfer, self.at, self._transferred)

    def add(self, rank: EngineRank) -> None:
        """A rank takes part, perhaps in place of one that died. Its worker is, or will be, a member of the fleet."""
        self._ranks[rank.spec.worker_id, rank.rank] = rank
        self._numbered[rank.number] = rank
        self._disaggregated |= rank.spec.role == "prefill"

    def play(self, arrivals: Arrivals, on_arrived: OnArrived) -> None:
        """Run until everybody has an answer; `on_arrived` gets how many requests did arrive."""
        self._arrivals = arrivals
        due, coming, recorder = self._due, self._coming, self._recorder
        while True:
            now_us = min(due[0][0], coming[0][0], arrivals.next_us)
            if due[0][0] == FOREVER_US == arrivals.next_us:
                if not self._under_way and not len(self.world.requests):
                    break
                deadline_us = max(self.world.next_due_us() or 0, self.now_us)
                if len(self.world.requests) and deadline_us < now_us:
                    # Whoever is left waits for workers that do not come, or come later than its deadline.
                    now_us = deadline_us
                    coming.put(now_us, self.tick)
            if now_us >= recorder.end_us:
                recorder.advance(now_us, *self._state())
            self.now_us = now_us
            while due[0][0] == now_us:
                heappop(due)[2]()
            while coming[0][0] == now_us:
                heappop(coming)[2]()
            while arrivals.next_us == now_us:
                self._arrive(arrivals.take())
                on_arrived(len(self.requests))
            while self._ready:
                self._begin_steps()
        arrivals.close()

    def apply(self, topic: Topic, event: InputEvent) -> None:
        """One record of `topic`, and then those that it leads to at once."""
        self._take_in(topic, (event,))

    def at(self, at_us: int, action: Callable[[], object]) -> None:
        """Let something happen that may give engines work, now or later."""
        self._coming.put(at_us, action)

    def tick(self) -> None:
        """Nothing but time passed: whose deadline is over is given up."""
        self._carry_out(self._open())
        self._apply_all()

    def die(self, rank: EngineRank) -> None:
        """A rank stops without a word. What is on its way to it is lost, what it said is not."""
        for request_id, said in rank.die(self.now_us).items():
            request = self._under_way.get(request_id)
            if request is not None:
                request.said += said
        self._lapsed.update(self._under_way.keys() & rank.kept)
        self._blocked.discard(rank.number)
        self._ready.pop(rank.number, None)

    def digest(self) -> str:
        """Of all decisions, in hexadecimal, and of the state in which it ended. Ask once, at the end."""
        self._seal(advance(self.world))
        return self._digest.hexdigest()

    def timeline(self) -> Timeline:
        """How the run went. Ask once, at the end."""
        return self._recorder.end(*self._state())

    def _state(self) -> tuple[int, int, Mapping[int, EngineRank]]:
        return len(self.world.queues), len(self.world.fleet), self._numbered

    def _arrive(self, arrival: Arrival) -> None:
        event = arrival.event
        if not isinstance(event, RequestSubmitted):
            # What operators and leases say is known at once; what clients say takes its way.
            hop = self._hops.submit if arrival.topic == REQUESTS else None
            self._tell(hop, arrival.topic, [event], self._coming)
            return
        request = UnderWay.of(event, len(self.requests), arrival.number, self.now_us)
        self.requests.append(request.served)
        self._under_way[event.request_id] = request
        self._recorder.arrived += 1
        if self._hops.submit is None:
            self._submit(event)
        else:
            self.at(self._hops.submit.arrives(self.now_us), partial(self._submit, event))

    def _submit(self, event: RequestSubmitted) -> None:
        """The router gets a request."""
        if event.timeout_us < TIMEOUT_US_MAX:  # who would wait for a day is given up when something else happens
            self.at(self.now_us + event.timeout_us, partial(self._give_up, event.request_id))
        self.apply(REQUESTS, event)

    def _give_up(self, request_id: str) -> None:
        if self.world.requests.get(request_id) is not None:
            self.tick()

    def _tell(self, hop: Hop | None, topic: Topic, events: Sequence[InputEvent], queue: Happenings) -> None:
        """The router gets records that were sent together."""
        if hop is not None:
            queue.put(hop.arrives(self.now_us), partial(self._take_in, topic, events))
            return
        self._take_in(topic, events)

    def _take_in(self, topic: Topic, events: Sequence[InputEvent]) -> None:
        """Records of `topic`, each followed by those that it leads to at once."""
        world, now_us, name = self.world, self.now_us, topic.name
        for event in events:
            decided = [] if self._opened_us == now_us else self._open()
            decided += step(world, name, event, now_us)
            if decided or len(world.consumed) >= CONSUMED_RUNS_MAX:
                self._carry_out(decided)
            if self._records:
                self._apply_all()

    def _apply_all(self) -> None:
        while self._records:
            topic, event = self._records.popleft()
            decided = self._open()
            decided += step(self.world, topic.name, event, self.now_us)
            self._carry_out(decided)

    def _open(self) -> list[AnyDecision]:
        """Let time pass; once at each time is enough, as every deadline is later than what sets it."""
        if self._opened_us == self.now_us:
            return []
        self._opened_us = self.now_us
        return open_run(self.world, self.now_us)

    def _carry_out(self, decided: list[AnyDecision]) -> None:
        """As an owner applied it; then what was decided happens."""
        for decision in decided:
            self._seal(decision)
        if len(self.world.consumed) >= CONSUMED_RUNS_MAX:
            self._seal(advance(self.world))
        for decision in decided:
            self._act(decision)

    def _seal(self, record: JournalRecord) -> None:
        self._digest.update(encode(DECISIONS, record) + b"\n")

    def _act(self, decision: AnyDecision) -> None:
        """Let a decision happen."""
        match decision:
            case RequestRouted():
                self._route(decision)
            case RequestRejected():
                self._fail(decision.request_id, decision.message)
            case RequestAborted():
                request = self._under_way.get(decision.request_id)
                if request is not None and request.rank is not None and decision.worker_id:
                    self._send(request.rank, partial(request.rank.drop, decision.request_id))
                if request is not None and decision.holder is not None:
                    self._give_back(decision.holder, decision.request_id, request.prefill_attempt)
                self._fail(decision.request_id, decision.message)
            case KvReleased():
                self._give_back(decision.holder, decision.request_id, decision.attempt)
            case _:
                pass  # it changes nothing outside the router

    def _give_back(self, target: CommandTarget, request_id: str, prefill_attempt: int) -> None:
        worker = self.world.fleet.get(target.worker_id)
        assert worker is not None, "who is not there is told nothing"
        for number in worker.spec.ranks:
            holder = self._ranks[target.worker_id, number]
            if holder.keeps(request_id, prefill_attempt):
                self._send(holder, partial(self._release, holder, request_id, prefill_attempt))

    def _route(self, routed: RequestRouted) -> None:
        rank = self._ranks[routed.worker_id, routed.rank]
        request = self._under_way.get(routed.request_id)
        if request is not None:
            request.rank = rank
            self._note(request, rank, routed)
            if request.place < EXPLAINED_MAX:
                self.routed[request.place] = routed
        self._send(rank, partial(self._work, rank, routed))

    def _note(self, request: UnderWay, rank: EngineRank, routed: RequestRouted) -> None:
        """Who gets a request now."""
        served = request.served
        served.attempts = max(served.attempts, routed.attempt)
        request.kept = None
        self._lapsed.discard(routed.request_id)
        if routed.stage == "prefill":
            request.computing, request.prefill_attempt = rank, routed.attempt
            return
        served.worker = rank.number
        if routed.stage == "aggregated":
            served.prefiller = None
            return
        assert request.computing is not None, "what is to be decoded was computed"
        request.kept = Kept(request.computing, request.prefill_attempt)

    def _send(self, rank: EngineRank, action: Callable[[], object]) -> None:
        """To an engine: work, or that nobody wants it any more."""
        if rank.hops.work is None:
            action()
        else:
            self.at(rank.hops.work.arrives(self.now_us), partial(self._arrive_at_engine, action))

    def _arrive_at_engine(self, action: Callable[[], object]) -> None:
        action()
        self._apply_all()

    def _work(self, rank: EngineRank, routed: RequestRouted) -> None:
        """An engine gets a request."""
        if rank.dead:
            return
        request = self._under_way.get(routed.request_id)
        if request is None:
            # Its worker was lost before the router heard that the client has all of the answer; or it was given up.
            self._say(rank, rank.said_before(routed))
            return
        assert routed.stage != "encode", "prompts have no images"
        rank.drop(routed.request_id)  # what it keeps of an earlier attempt nobody fetched
        try:
            rank.engine.submit(request.attempt(routed.request_id, routed.attempt, rank.spec.block_size, routed.stage))
        except RequestRefused as refusal:
            status = UNAVAILABLE if isinstance(refusal, QueueFull) else BAD_REQUEST
            if routed.stage != "prefill":  # a prefill worker says nothing to clients
                self._fail(routed.request_id, str(refusal))
            self._say(rank, rank.refused(routed, str(refusal), status))
            return
        self._ready[rank.number] = rank

    def _say(self, rank: EngineRank, event: InputEvent) -> None:
        """Progress that follows from a decision: it is applied after all that was decided with it."""
        if rank.hops.progress is None:
            self._records.append((PROGRESS, event))
        else:
            self._tell(rank.hops.progress, PROGRESS, [event], self._queue_of(rank))

    def _queue_of(self, rank: EngineRank) -> Happenings:
        """For its steps, and for what it says of requests."""
        return self._coming if rank.spec.role == "prefill" else self._due

    def _fail(self, request_id: str, reason: str) -> None:
        """The client is told that there is no answer, unless it has all of it."""
        request = self._under_way.get(request_id)
        if request is None:
            return
        request.served.failure = reason
        self._end(request_id, request, self._arrives(self._hops))

    def _end(self, request_id: str, request: UnderWay, at_us: int) -> None:
        """Its client hears nothing more of it after `at_us`."""
        del self._under_way[request_id]
        self._lapsed.discard(request_id)
        self.requests.put(request.place, request.served)
        self.lasted_us = max(self.lasted_us, at_us)
        self._recorder.finished += 1
        self._arrivals.ended(request.number, at_us)

    def _arrives(self, hops: Hops) -> int:
        """When its client gets what is said now."""
        return self.now_us if hops.tokens is None else hops.tokens.arrives(self.now_us)

    def _begin_steps(self) -> None:
        """Idle engines that have work begin."""
        ready = [rank for _, rank in sorted(self._ready.items()) if rank.step is None]
        alone = len(self._ready) == 1
        self._ready.clear()
        if self._disaggregated:
            # What these do now decides for how long nothing can come.
            for rank in ready:
                (self._begin_prefill if rank.spec.role == "prefill" else self._fetch)(rank)
            ready = [rank for rank in ready if rank.spec.role != "prefill"]
            for _, rank in sorted(self._ready.items()):
                if rank.spec.role == "prefill" and rank.step is None:  # what it kept was fetched in no time
                    self._begin_prefill(rank)
        until_us = self._calm_us(alone=alone)
        for rank in ready:
            self._begin_step(rank, until_us if self._speedup == 1.0 else int(until_us * self._speedup))

    def _fetch(self, rank: EngineRank) -> None:
        """What an engine has got room for is on its way."""
        for fetch in rank.engine.fetches():
            request = self._under_way.get(fetch.request_id)
            if request is not None and request.kept is not None:  # else it was given up: that is on its way
                self._transfers.begin(rank, fetch, request.kept, self.now_us)

    def _begin_prefill(self, rank: EngineRank) -> None:
        self._begin_step(rank, 0)
        self._blocked.discard(rank.number)
        if rank.step is None and rank.engine.load().waiting:
            self._blocked.add(rank.number)

    def _begin_step(self, rank: EngineRank, until_us: int) -> None:
        rank.step = begun = rank.engine.step(until_us)
        if begun is not None:
            speedup = self._speedup
            lasts_us = begun.duration_us if speedup == 1.0 else max(1, round(begun.duration_us / speedup))
            rank.began_us, rank.ends_us = self.now_us, self.now_us + lasts_us
            self._queue_of(rank).put(rank.ends_us, partial(self._end_step, rank))

    def _calm_us(self, *, alone: bool) -> int:
        """For how long nothing can come that gives an engine work, or takes it away; of one that begins `alone`."""
        if len(self.world.queues):
            return 0  # who waits in the router may be sent to an engine whenever another is done with something
        until_us = min(self._arrivals.next_us, self._coming[0][0])
        if self._blocked or self._lapsed:
            # A decode worker that gets room fetches KV, or finds it gone: then a prompt is computed, and goes on.
            until_us = min(until_us, self._due[0][0] if alone else self.now_us)
        think_us = self._arrivals.think_us
        if think_us < FOREVER_US:
            # The next answer of another engine: of those that begin now it may be as soon as they begin.
            answer_us = self._due[0][0] if alone else self.now_us
            until_us = min(until_us, answer_us + think_us)
        return until_us - self.now_us

    def _end_step(self, rank: EngineRank) -> None:
        """What a step did is known when it ends: to the router in the order in which a worker says it."""
        done, rank.step = rank.step, None
        if done is None:
            return  # it died
        hops, owner_epoch = rank.hops, self.world.owner_epoch
        self._ready[rank.number] = rank
        if rank.spec.kv_events and done.cache_changes:
            self._tell(hops.kv_events, KV_EVENTS, [*map(rank.cache_change, done.cache_changes)], self._due)
        if done.first_tokens or done.finished:
            at_us = self._arrives(hops)
            said: list[InputEvent] = [
                rank.began(self._began(rank, first, at_us), owner_epoch) for first in done.first_tokens
            ]
            for end in done.finished:
                request = self._under_way.get(end.request_id)
                if request is not None:
                    # What a worker said that is lost may be on its way still, and comes first.
                    last_us = request.served.last_us = max(at_us, request.served.first_us)
                    self._end(end.request_id, request, last_us)
                said.append(rank.finished(end, owner_epoch))
            self._tell(hops.progress, PROGRESS, said, self._due)
        if done.computed:
            said = [rank.computed(one, self._keep(rank, one), owner_epoch) for one in done.computed]
            self._tell(hops.progress, PROGRESS, said, self._coming)
        rank.load = done.load
        if self._reports and not rank.report_held:
            wait_us = rank.reported_us + LOAD_INTERVAL_US - self.now_us
            if wait_us > 0:
                rank.report_held = True
                self._due.put(self.now_us + wait_us, partial(self._report, rank))
            else:
                self._report(rank)

    def _began(self, rank: EngineRank, first: FirstTokenStep, at_us: int) -> FirstTokenStep:
        """A prompt is there, and its first token said; with what there is to tell of its KV, if that was fetched."""
        request = self._under_way.get(first.request_id)
        if request is None:
            return first
        served = request.served
        if not request.said:
            served.first_us = at_us
        if request.kept is None:
            served.cached_tokens = min(first.cached_tokens, served.prompt_tokens)
            self._recorder.count_prompt(rank.number, served.prompt_tokens, served.cached_tokens)
            return first
        moved, took_us = served.transferred_bytes, served.transfer_us
        return structs.replace(first, transferred_bytes=moved, transfer_us=took_us)

    def _keep(self, rank: EngineRank, one: Computed) -> Prefilled:
        """A prompt is computed, and kept for who answers."""
        rank.kept[one.request_id] = one.attempt
        self.at(self.now_us + LEASE_US, partial(self._lapse, rank, one.request_id, one.attempt))
        request = self._under_way.get(one.request_id)
        if request is None:
            return self._transfers.prefilled(rank, 0)
        served = request.served
        served.prefiller, served.prefilled_us = rank.number, self.now_us
        served.cached_tokens = min(one.cached_tokens, served.prompt_tokens)
        self._recorder.count_prompt(rank.number, served.prompt_tokens, served.cached_tokens)
        return self._transfers.prefilled(rank, served.prompt_tokens + request.said)

    def _lapse(self, rank: EngineRank, request_id: str, prefill_attempt: int) -> None:
        """Nobody fetched it in time."""
        if rank.keeps(request_id, prefill_attempt) and request_id in self._under_way:
            self._lapsed.add(request_id)
        self._release(rank, request_id, prefill_attempt)

    def _release(self, rank: EngineRank, request_id: str, prefill_attempt: int) -> None:
        """Somebody fetched it, or nobody will: the engine has room for others."""
        if rank.release(request_id, prefill_attempt):
            self._ready[rank.number] = rank

    def _transferred(self, over: Transferred) -> None:
        """A fetch is over. The worker that asked may have died, or been told that nobody wants it any more."""
        reader, name = over.reader, over.fetch.request_id
        request = self._under_way.get(name)
        if reader.dead or request is None or request.rank is not reader:
            return
        if over.error:
            reader.drop(name)
            failed = reader.not_fetched(name, over.fetch.attempt, over.error, self.world.owner_epoch)
            self._tell(reader.hops.progress, PROGRESS, [failed], self._coming)  # its prompt is computed again
        elif reader.engine.fetched(name):
            assert over.holder is not None, "somebody sent it"
            self._release(over.holder, name, request.prefill_attempt)
            request.served.transferred_bytes, request.served.transfer_us = over.bytes, over.took_us
        self._ready[reader.number] = reader

    def _report(self, rank: EngineRank) -> None:
        if rank.dead:
            return
        rank.report_held = False
        rank.reported_us = self.now_us
        self._tell(rank.hops.metrics, METRICS, [rank.report()], self._due)
