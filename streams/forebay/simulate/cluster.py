"""Discrete-event simulation of one owner and one engine model per rank, in virtual time.

Theory of operation. The clock jumps from one event to the next. Events of one time run in a fixed order:

1. ends of steps, and the records that workers emitted, in the order in which they were emitted;
2. events that may give work to engines: delayed requests and work items, and workers that die, join or are lost;
3. arrivals, in their own order;
4. idle engines with work start a step.

Every event goes through `forebay.core.step`, as on a live owner, so each decision is the one that an owner would make
from the same log. A step spans several iterations as long as no event can give work to an engine in that time. Only
ends of steps of prefill workers, and their records, may also do so.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from heapq import heappop, heappush
from itertools import repeat

from msgspec import structs
from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import HASH_SEED, extend_chain
from forebay.core.state.holder_bits import HolderKey
from forebay.core.step import CONSUMED_RUNS_MAX, AnyDecision, InputEvent, advance, open_run, step
from forebay.core.world import World
from forebay.engine_model.model import Computed, EngineRequest, EngineStage, FirstTokenStep, RequestRefused
from forebay.engine_model.sequence import seed_block
from forebay.events.base import U32_BYTES, U64_BYTES, pack_u64
from forebay.events.codec import encode
from forebay.events.decisions import (
    CommandTarget,
    JournalRecord,
    KvReleased,
    RequestAborted,
    RequestRejected,
    RequestRouted,
)
from forebay.events.progress import OnboardedTokens
from forebay.events.requests import TIMEOUT_US_MAX, RequestSubmitted
from forebay.events.topics import DECISIONS, KV_EVENTS, METRICS, PROGRESS, REQUESTS, Topic
from forebay.events.transfer import Prefilled
from forebay.simulate.arrivals import FOREVER_US, Arrival, ListedArrivals
from forebay.simulate.delays import NO_HOPS, Hop, Hops
from forebay.simulate.outcome import RequestOutcome, RequestOutcomes, UtilizationTimeline
from forebay.simulate.rank import LOAD_INTERVAL_US, EngineRank
from forebay.simulate.settings import Transfer
from forebay.simulate.timeline import Recorder
from forebay.simulate.transfers import LEASE_US, RetainedKv, TransferResult, Transfers

OnArrived = Callable[[int], object]
NO_TRANSFER = Transfer()
ScheduledEvent = tuple[int, int, Callable[[], object]]


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """Request that has not ended yet."""

    place: int  # index of the request among all requests of the run, in the order of arrival
    number: int  # number of the request in the workload (`Turn.number`)
    served: RequestOutcome  # outcome of the request so far
    hashes: bytes  # packed hashes of the full blocks of the prompt
    rank: EngineRank | None = None
    emitted: int = 0  # output tokens emitted by earlier attempts
    # KV that a prefill worker retains until the decode worker fetches it; None without remote prefill.
    retained: RetainedKv | None = None
    computing: EngineRank | None = None  # prefill rank to which the prompt was sent last
    prefill_attempt: int = 0

    @classmethod
    def of(cls, submitted: RequestSubmitted, place: int, number: int, now_us: int) -> "SimulatedRequest":
        """Create the state of a request that arrives at `now_us`, with the number of its tokens but not the tokens."""
        served = RequestOutcome(now_us, submitted.prompt_tokens, submitted.sampling.max_tokens, number=number)
        return cls(place, number, served, submitted.sequence_hashes)

    def assign(self, rank: EngineRank, routed: RequestRouted) -> None:
        self.rank = rank
        self.served.attempts = max(self.served.attempts, routed.attempt)
        self.retained = None
        if routed.stage == "prefill":
            self.computing, self.prefill_attempt = rank, routed.attempt
            return
        self.served.worker = rank.number
        if routed.stage == "aggregated":
            self.served.prefiller = None
            return
        assert self.computing is not None, "a decode stage follows a prefill"
        self.retained = RetainedKv(self.computing, self.prefill_attempt)

    def first_token(self, rank: EngineRank, first: FirstTokenStep, at_us: int, recorder: Recorder) -> FirstTokenStep:
        """Record the first token of an attempt, which the client gets at `at_us`.

        Return `first` with the statistics of the transfer, if the KV of the prompt was fetched.
        """
        served = self.served
        if not self.emitted:
            served.first_us = at_us
        if self.retained is None:
            self._computed(rank, first, first.onboarded, recorder)
            return first
        return structs.replace(first, transferred_bytes=served.transferred_bytes, transfer_us=served.transfer_us)

    def prefilled(
        self, rank: EngineRank, one: Computed, onboarded: tuple[OnboardedTokens, ...], now_us: int, recorder: Recorder
    ) -> None:
        """Record that a prefill worker has computed the prompt."""
        self.served.prefiller, self.served.prefilled_us = rank.number, now_us
        self._computed(rank, one, onboarded, recorder)

    def _computed(
        self,
        rank: EngineRank,
        one: FirstTokenStep | Computed,
        onboarded: tuple[OnboardedTokens, ...],
        recorder: Recorder,
    ) -> None:
        served = self.served
        served.record_prompt(one.cached_tokens, onboarded)
        recorder.count_prompt(rank.number, served.prompt_tokens, served.cached_tokens)

    def attempt(self, request_id: str, attempt: int, block_size: int, stage: EngineStage) -> EngineRequest:
        """Return this attempt as a request to the engine model.

        A later attempt continues after the output tokens of earlier attempts, so its prompt includes these tokens.
        Their blocks have the same hashes as blocks of an engine that emits no token ids.
        """
        served = self.served
        token_seed = xxh3_64_intdigest(request_id.encode())
        tokens = served.prompt_tokens + self.emitted
        hashes = self.hashes
        more = tokens // block_size - len(hashes) // U64_BYTES if self.emitted else 0
        if more:
            last = int.from_bytes(hashes[-U64_BYTES:], "little") if hashes else None
            hashes += pack_u64(extend_chain(last, repeat(seed_block(token_seed, HASH_SEED), more)))
        return EngineRequest(
            request_id=request_id,
            attempt=attempt,
            token_ids=bytes(tokens * U32_BYTES),
            sequence_hashes=hashes,
            token_seed=token_seed,
            max_tokens=served.output_tokens - self.emitted,
            stage=stage,
        )


class EventQueue(list[ScheduledEvent]):
    """Heap of actions scheduled for virtual times. Actions of one time run in insertion order."""

    def __init__(self) -> None:
        super().__init__([(FOREVER_US, 0, _never)])
        self._put = 0

    def put(self, at_us: int, action: Callable[[], object]) -> None:
        self._put += 1
        heappush(self, (at_us, self._put, action))


def _number(rank: EngineRank) -> int:
    return rank.number


def _never() -> None:
    raise AssertionError("the sentinel of the event queue ran")


class SimulatedCluster:
    """One simulated run of an owner and its workers. Add the ranks of all workers with `add`, then call `play`.

    Attributes:
        requests: outcome of each request, in the order of arrival.
        lasted_us: virtual time at which the last client got the end of its response, or its failure.
        now_us: current virtual time.
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
        """Create a cluster without workers. The cluster modifies `world`.

        Args:
            reports: whether workers send load reports. They outnumber all other events, so set it only if needed.
            speedup: how much faster than their model the engines run.
            hops: latencies of the records that clients and the router send.
            transfer: time that KV transfers take; used only if there are prefill workers.
        """
        self.world = world
        self.requests = RequestOutcomes()
        self.lasted_us = 0
        self._speedup = speedup
        self._reports = reports
        self._hops = hops
        self._digest = sha256()
        self._disaggregated = False
        self._rank_of: dict[HolderKey, EngineRank] = {}
        self.ranks: dict[int, EngineRank] = {}
        self._recorder = Recorder()
        self._output_events = EventQueue()  # ends of steps, and records from workers
        self._work_events = EventQueue()  # events that may give work to engines
        self._ready: dict[int, EngineRank] = {}
        self._blocked: set[int] = set()  # prefill ranks that wait for cache space; a fetch frees some
        self._expired_leases: set[str] = set()  # requests whose KV lease expired before the decode worker noticed
        self._active: dict[str, SimulatedRequest] = {}
        self._records: deque[tuple[Topic, InputEvent]] = deque()  # written, but not applied yet
        self.now_us = world.now_us
        self._opened_us = -1  # time of the last clock reading of the world
        self._arrivals: ListedArrivals
        self._transfers = Transfers(transfer, self.at, self._transferred)

    def add(self, rank: EngineRank) -> None:
        """Add a rank, which may replace a dead rank. Its worker may join the fleet before or after this call."""
        self._rank_of[rank.spec.worker_id, rank.rank] = rank
        self.ranks[rank.number] = rank
        self._disaggregated |= rank.spec.role == "prefill"

    def play(self, arrivals: ListedArrivals, on_arrived: OnArrived) -> None:
        """Run until every request has ended. `on_arrived` gets the number of requests that have arrived so far."""
        self._arrivals = arrivals
        output_events, work_events, recorder = self._output_events, self._work_events, self._recorder
        while True:
            now_us = min(output_events[0][0], work_events[0][0], arrivals.next_us)
            if output_events[0][0] == FOREVER_US == arrivals.next_us:
                if not self._active and not len(self.world.requests):
                    break
                deadline_us = max(self.world.next_due_us() or 0, self.now_us)
                if len(self.world.requests) and deadline_us < now_us:
                    # The remaining requests wait for workers that never come, or come after the deadline.
                    now_us = deadline_us
                    work_events.put(now_us, self.tick)
            if now_us >= recorder.end_us:
                recorder.advance(now_us, *self._state())
            self.now_us = now_us
            while output_events[0][0] == now_us:
                heappop(output_events)[2]()
            while work_events[0][0] == now_us:
                heappop(work_events)[2]()
            if arrivals.next_us == now_us:
                while arrivals.next_us == now_us:
                    self._arrive(arrivals.take())
                on_arrived(len(self.requests))
            while self._ready:
                self._begin_steps()
        arrivals.close()

    def apply(self, topic: Topic, *events: InputEvent) -> None:
        """Apply records of `topic`, each followed by the records that it causes at once."""
        for event in events:
            decided = self.derive(topic, event)
            if decided or len(self.world.consumed) >= CONSUMED_RUNS_MAX:
                self._execute(decided)
            if self._records:
                self._apply_all()

    def derive(self, topic: Topic, event: InputEvent) -> list[AnyDecision]:
        """Apply one record to the world at the current time, and return the decisions. Subclasses may store it."""
        decided = [] if self._opened_us == self.now_us else self._open()
        decided += step(self.world, topic.name, event, self.now_us)
        return decided

    def journal(self, record: JournalRecord) -> None:
        """Add a record of the owner's journal to the digest. Subclasses may store it."""
        self._digest.update(encode(DECISIONS, record) + b"\n")

    def at(self, at_us: int, action: Callable[[], object]) -> None:
        """Schedule an action for `at_us`, for example one that gives work to an engine."""
        self._work_events.put(at_us, action)

    def later(self, at_us: int, action: Callable[[], object]) -> None:
        """Schedule an action for `at_us` that gives no work to an engine."""
        self._output_events.put(at_us, action)

    def tiers_changed(self, rank: EngineRank, *, is_loaded: bool) -> None:
        """Emit the changes of a rank's tiers. `is_loaded`: the load of a request has ended, so its engine has work."""
        if is_loaded:
            self._ready[rank.number] = rank
            if costs := rank.measured_costs():
                self._deliver(rank.hops.metrics, METRICS, costs, self._output_events)
        if events := rank.tier_events():
            self._deliver(rank.hops.kv_events, KV_EVENTS, events, self._output_events)

    def tick(self) -> None:
        """Advance the clock of the world without an event, so that requests past their deadline expire."""
        self._execute(self._open())
        self._apply_all()

    def die(self, rank: EngineRank) -> None:
        """Kill a rank. Work that was sent to the rank is lost; output that the rank has sent still arrives."""
        for request_id, emitted in rank.die(self.now_us).items():
            request = self._active.get(request_id)
            if request is not None:
                request.emitted += emitted
        self._expired_leases.update(self._active.keys() & rank.retained)
        self._blocked.discard(rank.number)
        self._ready.pop(rank.number, None)

    def digest(self) -> str:
        """Return the hash, in hexadecimal, of all decisions and of the final state. Call once, at the end."""
        self.journal(advance(self.world))
        return self._digest.hexdigest()

    def timeline(self) -> UtilizationTimeline:
        """Return the load and the throughput of the run over time. Call once, at the end."""
        return self._recorder.end(*self._state())

    def _state(self) -> tuple[int, int, Mapping[int, EngineRank]]:
        return len(self.world.queues), len(self.world.fleet), self.ranks

    def _arrive(self, arrival: Arrival) -> None:
        event = arrival.event
        if not isinstance(event, RequestSubmitted):
            # Operators and leases have no latency. Records of clients do.
            hop = self._hops.submit if arrival.topic == REQUESTS else None
            self._deliver(hop, arrival.topic, [event], self._work_events)
            return
        request = SimulatedRequest.of(event, len(self.requests), arrival.number, self.now_us)
        self.requests.append(request.served)
        self._active[event.request_id] = request
        self._recorder.arrived += 1
        if self._hops.submit is None:
            self._submit(event)
        else:
            self.at(self._hops.submit.arrives(self.now_us), partial(self._submit, event))

    def _submit(self, event: RequestSubmitted) -> None:
        """Apply a submitted request at the router, and schedule its deadline."""
        if event.timeout_us < TIMEOUT_US_MAX:  # at the maximum of a day, any later event expires the request
            self.at(self.now_us + event.timeout_us, partial(self._expire, event.request_id))
        self.apply(REQUESTS, event)

    def _expire(self, request_id: str) -> None:
        if self.world.requests.get(request_id) is not None:
            self.tick()

    def _deliver(self, hop: Hop | None, topic: Topic, events: Sequence[InputEvent], queue: EventQueue) -> None:
        """Deliver records that were sent together to the router, after the latency of `hop`."""
        if hop is not None:
            queue.put(hop.arrives(self.now_us), partial(self.apply, topic, *events))
            return
        self.apply(topic, *events)

    def _apply_all(self) -> None:
        while self._records:
            self._execute(self.derive(*self._records.popleft()))

    def _open(self) -> list[AnyDecision]:
        """Advance the clock of the world. Once per time is enough, because deadlines are always in the future."""
        if self._opened_us == self.now_us:
            return []
        self._opened_us = self.now_us
        return open_run(self.world, self.now_us)

    def _execute(self, decided: list[AnyDecision]) -> None:
        """Journal the decisions like an owner, then execute them."""
        for decision in decided:
            self.journal(decision)
        if len(self.world.consumed) >= CONSUMED_RUNS_MAX:
            self.journal(advance(self.world))
        for decision in decided:
            self._act(decision)

    def _act(self, decision: AnyDecision) -> None:
        match decision:
            case RequestRouted():
                self._route(decision)
            case RequestRejected():
                self._fail(decision.request_id, decision.message)
            case RequestAborted():
                request = self._active.get(decision.request_id)
                if request is not None and request.rank is not None and decision.worker_id:
                    self._send(request.rank, partial(request.rank.drop, decision.request_id))
                if request is not None and decision.holder is not None:
                    self._release_prefill(decision.holder, decision.request_id, request.prefill_attempt)
                self._fail(decision.request_id, decision.message)
            case KvReleased():
                self._release_prefill(decision.holder, decision.request_id, decision.attempt)
            case _:
                pass  # it has no effect outside the router

    def _release_prefill(self, target: CommandTarget, request_id: str, prefill_attempt: int) -> None:
        worker = self.world.fleet.get(target.worker_id)
        assert worker is not None, "KV is released only at members"
        for number in worker.spec.ranks:
            holder = self._rank_of[target.worker_id, number]
            if holder.retains(request_id, prefill_attempt):
                self._send(holder, partial(self._release, holder, request_id, prefill_attempt))

    def _route(self, routed: RequestRouted) -> None:
        rank = self._rank_of[routed.worker_id, routed.rank]
        request = self._active.get(routed.request_id)
        if request is not None:
            request.assign(rank, routed)
            self._expired_leases.discard(routed.request_id)
        self._send(rank, partial(self._work, rank, routed))

    def _send(self, rank: EngineRank, action: Callable[[], object]) -> None:
        """Send work or a cancellation to an engine."""
        if rank.hops.work is None:
            action()
        else:
            self.at(rank.hops.work.arrives(self.now_us), partial(self._arrive_at_engine, action))

    def _arrive_at_engine(self, action: Callable[[], object]) -> None:
        action()
        self._apply_all()

    def _work(self, rank: EngineRank, routed: RequestRouted) -> None:
        """Submit a routed request to an engine."""
        if rank.dead:
            return
        request = self._active.get(routed.request_id)
        if request is None:
            # The request expired, or the client got its whole response before the router, which then lost the worker.
            self._emit_progress(rank, rank.already_finished(routed))
            return
        assert routed.stage != "encode", "simulated prompts have no images"
        rank.drop(routed.request_id)  # KV of an earlier attempt that was never fetched
        try:
            rank.submit(request.attempt(routed.request_id, routed.attempt, rank.spec.block_size, routed.stage))
        except RequestRefused as refusal:
            if routed.stage != "prefill":  # a prefill worker has no connection to clients
                self._fail(routed.request_id, str(refusal))
            self._emit_progress(rank, rank.rejected(routed, refusal))
            return
        self._ready[rank.number] = rank

    def _emit_progress(self, rank: EngineRank, event: InputEvent) -> None:
        """Emit a progress event caused by a decision. The router applies it after the decision's other effects."""
        if rank.hops.progress is None:
            self._records.append((PROGRESS, event))
        else:
            self._deliver(rank.hops.progress, PROGRESS, [event], self._queue_of(rank))

    def _queue_of(self, rank: EngineRank) -> EventQueue:
        return self._work_events if rank.spec.role == "prefill" else self._output_events

    def _fail(self, request_id: str, reason: str) -> None:
        """Fail a request at its client, unless the client already has the whole response."""
        request = self._active.get(request_id)
        if request is None:
            return
        request.served.failure = reason
        self._end(request_id, request, self._arrival_us(self._hops))

    def _end(self, request_id: str, request: SimulatedRequest, at_us: int) -> None:
        """End a request. Its client gets nothing after `at_us`."""
        del self._active[request_id]
        self._expired_leases.discard(request_id)
        self.requests.put(request.place, request.served)
        self.lasted_us = max(self.lasted_us, at_us)
        self._arrivals.ended(request.number, at_us)

    def _arrival_us(self, hops: Hops) -> int:
        """Return the time at which the client gets a record that is sent now."""
        return self.now_us if hops.tokens is None else hops.tokens.arrives(self.now_us)

    def _begin_steps(self) -> None:
        """Start a step on every idle engine that has work."""
        ready = [rank for rank in self._ready.values() if rank.step is None]
        alone = len(self._ready) == 1
        if not alone:
            ready.sort(key=_number)
        self._ready.clear()
        if self._disaggregated:
            # Start these first: their state limits how many iterations the other engines may run in one step.
            for rank in ready:
                (self._begin_prefill if rank.spec.role == "prefill" else self._fetch)(rank)
            ready = [rank for rank in ready if rank.spec.role != "prefill"]
            for _, rank in sorted(self._ready.items()):
                if rank.spec.role == "prefill" and rank.step is None:  # its KV was fetched without delay
                    self._begin_prefill(rank)
        until_us = self.lookahead_us(alone=alone)
        for rank in ready:
            self._begin_step(rank, until_us if self._speedup == 1.0 else int(until_us * self._speedup))

    def _fetch(self, rank: EngineRank) -> None:
        """Start the transfers for which an engine has reserved cache space."""
        for fetch in rank.engine.fetches():
            request = self._active.get(fetch.request_id)
            if request is not None and request.retained is not None:  # otherwise it expired; the abort is on its way
                self._transfers.begin(rank, fetch, request.retained, self.now_us)

    def _begin_prefill(self, rank: EngineRank) -> None:
        self._begin_step(rank, 0)
        self._blocked.discard(rank.number)
        if rank.step is None and rank.engine.load().waiting:
            self._blocked.add(rank.number)

    def _begin_step(self, rank: EngineRank, until_us: int) -> None:
        begun = rank.begin_step(until_us)
        if begun is not None:
            speedup = self._speedup
            lasts_us = begun.duration_us if speedup == 1.0 else max(1, round(begun.duration_us / speedup))
            rank.began_us, rank.ends_us = self.now_us, self.now_us + lasts_us
            self._queue_of(rank).put(rank.ends_us, partial(self._end_step, rank))

    def lookahead_us(self, *, alone: bool) -> int:
        """Return for how many us no event can add or remove work. `alone`: only one engine starts a step now."""
        if len(self.world.queues):
            return 0  # a queued request may be dispatched as soon as another engine has capacity
        until_us = min(self._arrivals.next_us, self._work_events[0][0])
        if self._blocked or self._expired_leases:
            # A decode worker with free cache space fetches KV, or finds it expired. Either way prefill goes on.
            until_us = min(until_us, self._output_events[0][0] if alone else self.now_us)
        think_us = self._arrivals.think_us
        if think_us < FOREVER_US:
            # The next response of another engine bounds the next dependent arrival. It may come at once.
            answer_us = self._output_events[0][0] if alone else self.now_us
            until_us = min(until_us, answer_us + think_us)
        return until_us - self.now_us

    def _end_step(self, rank: EngineRank) -> None:
        """Emit the results of a step at its end, in the order in which a worker emits them."""
        done, rank.step = rank.step, None
        if done is None:
            return  # the rank died during the step
        hops, owner_epoch = rank.hops, self.world.owner_epoch
        self._ready[rank.number] = rank
        if kv_events := rank.step_events(done.cache_changes):
            self._deliver(hops.kv_events, KV_EVENTS, kv_events, self._output_events)
        if done.first_tokens or done.finished:
            at_us = self._arrival_us(hops)
            emitted: list[InputEvent] = [
                rank.first_token_emitted(self._record_first_token(rank, first, at_us), owner_epoch)
                for first in done.first_tokens
            ]
            for end in done.finished:
                request = self._active.get(end.request_id)
                if request is not None:
                    # Output of a lost worker may still be on its way, and comes first.
                    last_us = request.served.last_us = max(at_us, request.served.first_us)
                    self._end(end.request_id, request, last_us)
                emitted.append(rank.finished(end, owner_epoch))
            self._deliver(hops.progress, PROGRESS, emitted, self._output_events)
        if done.computed:
            emitted = [rank.computed(one, *self._retain(rank, one), owner_epoch) for one in done.computed]
            self._deliver(hops.progress, PROGRESS, emitted, self._work_events)
        rank.load = done.load
        if self._reports and not rank.report_held:
            wait_us = rank.reported_us + LOAD_INTERVAL_US - self.now_us
            if wait_us > 0:
                rank.report_held = True
                self._output_events.put(self.now_us + wait_us, partial(self._report, rank))
            else:
                self._report(rank)

    def _record_first_token(self, rank: EngineRank, first: FirstTokenStep, at_us: int) -> FirstTokenStep:
        """Record the first token of an attempt, and add the statistics of the loads and the transfer of its KV."""
        request = self._active.get(first.request_id)
        is_fetched = request is not None and request.retained is not None
        first = structs.replace(first, onboarded=rank.prompt_computed(first, is_fetched=is_fetched))
        return first if request is None else request.first_token(rank, first, at_us, self._recorder)

    def _retain(self, rank: EngineRank, one: Computed) -> tuple[Prefilled, tuple[OnboardedTokens, ...]]:
        """Retain prefilled KV for the decode worker until its lease expires. Return it and the loaded tokens."""
        onboarded = rank.prompt_computed(one, is_fetched=False)
        rank.retained[one.request_id] = one.attempt
        self.at(self.now_us + LEASE_US, partial(self._expire_lease, rank, one.request_id, one.attempt))
        request = self._active.get(one.request_id)
        if request is not None:
            request.prefilled(rank, one, onboarded, self.now_us, self._recorder)
        tokens = 0 if request is None else request.served.prompt_tokens + request.emitted
        return self._transfers.prefilled(rank, tokens), onboarded

    def _expire_lease(self, rank: EngineRank, request_id: str, prefill_attempt: int) -> None:
        """Release prefilled KV that the decode worker did not fetch before its lease expired."""
        if rank.retains(request_id, prefill_attempt) and request_id in self._active:
            self._expired_leases.add(request_id)
        self._release(rank, request_id, prefill_attempt)

    def _release(self, rank: EngineRank, request_id: str, prefill_attempt: int) -> None:
        """Release prefilled KV that was fetched or is no longer needed. The engine regains that cache space."""
        if rank.release(request_id, prefill_attempt):
            self._ready[rank.number] = rank

    def _transferred(self, over: TransferResult) -> None:
        """Handle the end of a fetch. Its decode worker may have died or dropped the request in the meantime."""
        reader, name = over.reader, over.fetch.request_id
        request = self._active.get(name)
        if reader.dead or request is None or request.rank is not reader:
            return
        if over.error:
            reader.drop(name)
            failed = reader.transfer_failed(name, over.fetch.attempt, over.error, self.world.owner_epoch)
            self._deliver(reader.hops.progress, PROGRESS, [failed], self._work_events)  # its prompt is prefilled again
        elif reader.engine.fetched(name):
            assert over.holder is not None, "a successful fetch has a source"
            self._release(over.holder, name, request.prefill_attempt)
            request.served.transferred_bytes, request.served.transfer_us = over.bytes, over.took_us
        self._ready[reader.number] = reader

    def _report(self, rank: EngineRank) -> None:
        if rank.dead:
            return
        self._deliver(rank.hops.metrics, METRICS, [rank.send_report(self.now_us)], self._output_events)
