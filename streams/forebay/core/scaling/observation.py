"""Observe the pools of one group: demand, latency, size and load per interval, from the events of the group.

Theory of operation. The planner follows the topics of a group side by side, so it may read an event before its cause on
another topic. Each event therefore only adds facts to its request, and a value counts once all of its facts are known.
A request counts once per stage, whatever the number of attempts. All times are readings of the caller's one clock, so
no two clocks are compared. They contain the delay of the log, which is milliseconds unless the caller lags.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from forebay.core.phases import ON_WORKER, Phase
from forebay.core.state.fleet import Fleet, FleetWorker, WorkerPhase
from forebay.core.state.requests import ACTIVE_REQUESTS_MAX
from forebay.core.state_machine import IllegalTransition
from forebay.events.base import Event
from forebay.events.control import Role
from forebay.events.decisions import (
    Decision,
    OwnerClaimed,
    RejectReason,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
)
from forebay.events.fleet import AnyFleetEvent, WorkerLost
from forebay.events.metrics import LoadReported
from forebay.events.progress import (
    FirstTokenEmitted,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    RequestProgress,
    StageEnd,
)
from forebay.events.requests import RequestSubmitted
from forebay.events.scaling import PoolObserved, PoolScaling, WorkerObserved
from forebay.events.snapshots import Booking, Chunk, Reported, RequestState, WorkerState, WorldState

READY_MAX = 10_000  # highest number of workers in an observation
TOKENS_MAX = (1 << 63) - 1  # highest number of tokens in an observation
ORPHAN_US = 60_000_000  # more than the delay between topics, and between a deadline and the owner's abort
DROPPED = ACTIVE_REQUESTS_MAX // 10  # at once, because finding the oldest request of a dict is slow
GENERATING: tuple[Role, ...] = ("aggregated", "decode")
# More workers would have served a request that was rejected for one of these reasons, so it counts as demand.
LACK_OF_WORKERS: frozenset[RejectReason] = frozenset({"no_workers", "overloaded", "busy", "queue_full", "pool_full"})
RequestStage = Literal["encode", "prefill", "generate"]
OUTPUT_MAX = (1 << 31) - 1  # highest `max_tokens` of a request


@dataclass(slots=True)
class Mean:
    """Weighted mean of durations."""

    total_us: int = 0
    count: int = 0

    def add(self, us: int, count: int = 1) -> None:
        self.total_us += us
        self.count += count

    @property
    def ms(self) -> float | None:
        return self.total_us / self.count / 1000 if self.count else None


@dataclass(slots=True)
class Latency:
    """Time to first token and inter-token latency during one interval."""

    ttft: Mean = field(default_factory=Mean)
    itl: Mean = field(default_factory=Mean)


@dataclass(slots=True)
class PoolTally:
    """Sums over the requests of one pool in one interval.

    `routed_tokens` are of prompts that a worker of the pool was sent to compute, `cached_tokens` those of them that the
    router found in the worker's cache.
    """

    requests: int = 0
    prompt_tokens: int = 0
    routed_tokens: int = 0
    cached_tokens: int = 0
    ended: int = 0
    output_tokens: int = 0
    latency: Latency = field(default_factory=Latency)


@dataclass(frozen=True, slots=True)
class Place:
    """Worker rank to which a request was routed."""

    pool: str
    worker_id: str
    rank: int


@dataclass(slots=True)
class TrackedRequest:
    """Facts about one request, from events that may arrive in any order across topics.

    Attributes:
        expires_us: when the planner forgets the request, even if no event has ended it.
        submitted_us: when its submission was read; None if it was not read, or before the first interval.
        prompt_tokens: length of its prompt; None before its submission.
        embeds: whether it requests an embedding, or the output of an endpoint, so it may have no output tokens.
        queued_in: pool in whose queue it waits; empty if it waits in none.
        place: rank that has it now; None if none has it.
        prompted: rank that computes or computed its prompt; None before.
        cached_tokens: prompt tokens that the router found in the cache of that rank.
        is_routed: whether `cached_tokens` was counted.
        computing: whether that rank has not finished the prompt.
        attempt: last attempt at the response that was routed.
        begun: last attempt at the response with a first token.
        prefilled: last remote prefill that has ended.
        first_us: when its first token was read; None before.
        grown: time and number of output tokens at the last event about its output; None if unknown.
        output_tokens: number of output tokens at its end; None before, or if it failed.
        closed: whether the owner has ended it, so that no other decision about it follows.
    """

    expires_us: int
    submitted_us: int | None = None
    prompt_tokens: int | None = None
    output_max: int = OUTPUT_MAX
    embeds: bool = False
    pools: dict[RequestStage, str] = field(default_factory=dict)
    counted: set[RequestStage] = field(default_factory=set)
    queued_in: str = ""
    place: Place | None = None
    placed_us: int = 0
    prompted: Place | None = None
    cached_tokens: int = 0
    is_routed: bool = False
    computing: bool = False
    attempt: int = 0
    begun: int = 0
    prefilled: int = 0
    first_us: int | None = None
    grown: tuple[int, int] | None = None
    output_tokens: int | None = None
    ended: bool = False
    closed: bool = False

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that its worker must still compute; 0 if the prompt is computed or unknown."""
        return max(0, (self.prompt_tokens or 0) - self.cached_tokens) if self.computing else 0

    def assign(self, stage: RequestStage, pool: str | None) -> None:
        """Record the pool of a stage, unless it is None or another pool is known."""
        if pool is not None:
            self.pools.setdefault(stage, pool)

    def forget_times(self) -> None:
        """Forget the times of all events, because they were not read as they happened."""
        self.submitted_us = self.first_us = self.grown = None


@dataclass(frozen=True, slots=True)
class _Report:
    """Newest load report of a rank, limited to what the rank can have."""

    running: int
    waiting: int
    kv_blocks: int
    at_us: int


class GroupObservation:
    """Observation of the pools of one group.

    Call `restore` with the parts of a snapshot if there is one, then `apply` with each event after it, and `begin` when
    all earlier events are applied. From then on `observe` returns what happened since its last call. `forgotten` counts
    requests that were forgotten without an end.
    """

    def __init__(self, pools: Sequence[PoolScaling]) -> None:
        self.forgotten = 0
        self._pools = {pool.pool: pool for pool in pools}
        self._fleet = Fleet()
        self._requests: dict[str, TrackedRequest] = {}
        self._reports: dict[tuple[str, int], _Report] = {}
        self._ready: Counter[str] = Counter()
        self._epoch = -1
        self._now_us = 0
        self._begun_us = 0
        self._tallies: dict[str, PoolTally] = {}
        self._latencies: dict[str, Latency] = {}
        self._reset()

    def restore(self, parts: Iterable[Chunk], now_us: int) -> None:
        """Start with the state in a snapshot, whose parts come in its order. Parts with caches may be missing."""
        self._advance(now_us)
        owner_us = 0
        for part in parts:
            match part:
                case WorldState():
                    owner_us, self._epoch = part.now_us, part.owner_epoch
                    self._fleet.restore_owner(part.fleet_epoch)
                case WorkerState():
                    self._fleet.restore(part)
                case Reported():
                    self._report(part.worker_id, part.rank, part)
                case Booking():
                    self._request(part.request_id).cached_tokens = part.prompt_tokens - part.prefill_tokens
                case RequestState():
                    self._restore_request(part, max(0, part.due_us - owner_us))
                case _:
                    pass
        self._count_ready()

    def apply(self, event: Event, offset: int, now_us: int) -> None:
        """Apply an event of `requests`, `fleet`, `progress`, `metrics` or `decisions`. Other events have no effect.

        A clock reading `now_us` below an earlier one counts as the earlier one.
        """
        self._advance(now_us)
        if isinstance(event, RequestSubmitted):
            self._submit(event)
        elif isinstance(event, AnyFleetEvent):
            self._apply_fleet(event, offset)
        elif isinstance(event, LoadReported):
            worker = self._fleet.get(event.worker_id)
            if worker is not None and worker.worker_epoch == event.worker_epoch:
                self._report(event.worker_id, event.rank, event)
        elif isinstance(event, OwnerClaimed):
            self._epoch = offset
        elif isinstance(event, Decision):
            if event.owner_epoch >= self._epoch:
                self._apply_decision(event)
        elif isinstance(event, RequestProgress):
            self._apply_progress(event)

    def begin(self, now_us: int) -> None:
        """Begin the first interval, without requests and times of the events applied so far."""
        self._advance(now_us)
        for request in self._requests.values():
            request.forget_times()
        self._reset()

    def observe(self, now_us: int) -> tuple[PoolObserved, ...]:
        """Return the observation of each pool since the last call or `begin`, and begin a new interval."""
        self._advance(now_us)
        self._expire()
        queued: Counter[str] = Counter()
        pending: Counter[str] = Counter()
        occupied: set[tuple[str, int]] = set()
        for request in self._requests.values():
            if request.queued_in:
                queued.update(self._pools_of(request.queued_in))
            if request.computing and request.prompted is not None:
                pending[request.prompted.worker_id] += request.pending_tokens
            place = request.place
            if place is not None and request.prompt_tokens is not None and request.placed_us < self._begun_us:
                occupied.add((place.worker_id, place.rank))
        observed = tuple(self._observed(pool, queued, pending, occupied) for pool in self._pools.values())
        self._reset()
        return observed

    def _observed(
        self, pool: PoolScaling, queued: Counter[str], pending: Counter[str], occupied: set[tuple[str, int]]
    ) -> PoolObserved:
        """Return the observation of one pool.

        `pending` counts prompt tokens to compute, by worker. `occupied` has the ranks with a request since before this
        interval.
        """
        tally = self._tallies[pool.pool]
        members = [one for one in self._fleet.workers() if one.spec.pool == pool.pool]
        ready = [one for one in members if one.phase is WorkerPhase.READY]
        workers = (self._worker(one, pending[one.spec.worker_id], occupied) for one in ready[:READY_MAX])
        return PoolObserved(
            group=pool.group,
            pool=pool.pool,
            ready=min(len(ready), READY_MAX),
            draining=min(sum(one.phase is WorkerPhase.DRAINING for one in members), READY_MAX),
            requests=tally.requests,
            isl=tally.prompt_tokens / tally.requests if tally.requests else None,
            osl=tally.output_tokens / tally.ended if tally.ended else None,
            ttft_ms=tally.latency.ttft.ms,
            itl_ms=tally.latency.itl.ms,
            kv_hit_rate=tally.cached_tokens / tally.routed_tokens if tally.routed_tokens else None,
            queued=queued[pool.pool],
            workers=tuple(one for one in workers if one is not None),
        )

    def _worker(self, worker: FleetWorker, pending: int, occupied: set[tuple[str, int]]) -> WorkerObserved | None:
        """Return the load of a worker, None if a rank with requests has not reported its load in this interval."""
        spec = worker.spec
        running = waiting = kv_blocks = 0
        for rank in spec.ranks:
            key = spec.worker_id, rank
            report = self._reports.get(key, _Report(0, 0, 0, -1))
            is_busy = key in occupied or report.running or report.waiting
            if is_busy and report.at_us < self._begun_us:
                return None
            running += report.running
            waiting += report.waiting
            kv_blocks += report.kv_blocks
        latency = self._latencies.get(spec.worker_id, Latency())
        return WorkerObserved(
            worker_id=spec.worker_id,
            running=running,
            waiting=waiting,
            prefill_tokens=pending,
            kv_tokens=min(kv_blocks * spec.block_size, TOKENS_MAX),
            kv_tokens_max=min(spec.kv_blocks_total * spec.dp_size * spec.block_size, TOKENS_MAX),
            ttft_ms=latency.ttft.ms,
            itl_ms=latency.itl.ms,
        )

    def _advance(self, now_us: int) -> None:
        self._now_us = max(self._now_us, now_us)

    def _reset(self) -> None:
        self._begun_us = self._now_us
        self._tallies = {name: PoolTally() for name in self._pools}
        self._latencies = {}

    def _expire(self) -> None:
        expired = [name for name, request in self._requests.items() if request.expires_us <= self._now_us]
        for name in expired:
            self.forgotten += not self._requests.pop(name).ended

    def _request(self, request_id: str) -> TrackedRequest:
        request = self._requests.get(request_id)
        if request is None:
            if len(self._requests) >= ACTIVE_REQUESTS_MAX:
                for name in list(islice(self._requests, DROPPED)):
                    del self._requests[name]
                self.forgotten += DROPPED
            request = self._requests[request_id] = TrackedRequest(self._now_us + ORPHAN_US)
        return request

    def _restore_request(self, state: RequestState, remaining_us: int) -> None:
        request = self._request(state.request_id)
        request.expires_us = self._now_us + remaining_us + ORPHAN_US
        request.prompt_tokens = state.prompt_tokens
        request.embeds = state.task != "generate"
        request.is_routed = True
        request.pools["generate"] = state.pool
        request.counted.add("generate")
        request.attempt = state.attempt
        phase = Phase(state.phase)
        if phase is Phase.QUEUED:
            request.queued_in = state.pool
        worker = self._fleet.get(state.worker_id)
        if worker is None:
            return
        place = Place(worker.spec.pool, state.worker_id, state.rank)
        if phase in ON_WORKER:
            request.place, request.placed_us = place, self._now_us
        if state.stage == "prefill":
            request.pools["prefill"] = worker.spec.pool
            request.counted.add("prefill")
        if phase in {Phase.PREFILL, Phase.REMOTE_PREFILL}:
            request.prompted, request.computing = place, True

    def _submit(self, event: RequestSubmitted) -> None:
        request = self._request(event.request_id)
        if request.prompt_tokens is not None:
            return  # submitted again
        request.prompt_tokens = event.prompt_tokens
        request.output_max = event.sampling.max_tokens
        request.embeds = event.task != "generate"
        request.submitted_us = self._now_us
        if not request.ended:
            request.expires_us = self._now_us + event.timeout_us + ORPHAN_US
        self._update(event.request_id, request)

    def _apply_fleet(self, event: AnyFleetEvent, offset: int) -> None:
        try:
            worker = self._fleet.apply(event, offset)
        except IllegalTransition:
            return  # stale, as for the owner
        if worker is not None:
            self._count_ready()
            if isinstance(event, WorkerLost):
                for rank in worker.spec.ranks:
                    self._reports.pop((event.worker_id, rank), None)

    def _count_ready(self) -> None:
        self._ready = Counter(one.spec.pool for one in self._fleet.workers() if one.phase is WorkerPhase.READY)

    def _report(self, worker_id: str, rank: int, report: LoadReported | Reported) -> None:
        worker = self._fleet.get(worker_id)
        if worker is None or rank not in worker.spec.ranks:
            return
        self._reports[worker_id, rank] = _Report(
            min(report.running, worker.spec.max_num_seqs),
            min(report.waiting, ACTIVE_REQUESTS_MAX),
            min(report.kv_blocks_used, worker.spec.kv_blocks_total),
            self._now_us,
        )

    def _apply_decision(self, event: Decision) -> None:
        match event:
            case RequestHeld():
                request = self._request(event.request_id)
                request.queued_in = event.pool
                self._expect(request, event.pool)
            case RequestRouted():
                request = self._request(event.request_id)
                self._route(request, event)
            case RequestRejected() if event.reason != "duplicate_id":  # that id belongs to another request
                request = self._request(event.request_id)
                if event.reason in LACK_OF_WORKERS and (pool := self._first(*GENERATING)) is not None:
                    self._expect(request, pool)
                self._end(request)
                request.closed = True
            case RequestRepeated() | RequestAborted():
                request = self._request(event.request_id)
                self._end(request)
                request.closed = True
            case _:
                return
        self._update(event.request_id, request)

    def _route(self, request: TrackedRequest, event: RequestRouted) -> None:
        request.queued_in = ""
        place = Place(event.pool, event.worker_id, event.rank)
        request.place, request.placed_us = place, self._now_us
        match event.stage:
            case "encode":
                request.assign("encode", event.pool)
                request.assign("generate", self._first(*GENERATING))
                return
            case "prefill":
                request.assign("prefill", event.pool)
                request.assign("generate", self._first(*GENERATING))
                request.computing = event.attempt > request.prefilled
            case _:
                request.assign("generate", event.pool)
                request.attempt = event.attempt
                if event.attempt > 1:
                    request.grown = None  # the time of the last token of the earlier attempt is unknown
                request.computing = event.stage == "aggregated" and event.attempt > request.begun
        if event.stage != "decode":
            request.prompted = place
            worker = self._fleet.get(event.worker_id)
            terms, size = event.terms, 0 if worker is None else worker.spec.block_size
            request.cached_tokens = (terms.device_overlap + terms.host_overlap + terms.disk_overlap) * size

    def _apply_progress(self, event: RequestProgress) -> None:
        request = self._request(event.request_id)
        match event:
            case _ if isinstance(event, StageEnd):
                if isinstance(event, PrefillFinished | PrefillFailed):
                    request.prefilled = max(request.prefilled, event.attempt)
                if request.place is not None and request.place.worker_id == event.worker_id:
                    request.place, request.computing = None, False
            case _ if event.attempt < request.attempt:
                return  # a worker that was declared lost
            case FirstTokenEmitted():
                request.computing = False
                request.begun = event.attempt
                if request.first_us is None:
                    request.first_us = self._now_us
                    request.grown = (self._now_us, 1) if event.attempt == 1 else None
            case OutputGrown():
                self._grow(request, event.worker_id, event.output_tokens)
            case RequestFinished():
                self._grow(request, event.worker_id, event.output_tokens)
                request.output_tokens = min(event.output_tokens, request.output_max)
        if isinstance(event, RequestFinished | RequestFailed):
            self._end(request)
        self._update(event.request_id, request)

    def _grow(self, request: TrackedRequest, worker_id: str, output_tokens: int) -> None:
        """Measure the latency of the output tokens since the last event about the output."""
        output_tokens = min(output_tokens, request.output_max)
        if request.grown is None:
            request.grown = self._now_us, output_tokens
            return
        at_us, before = request.grown
        if output_tokens > before:
            for latency in self._latencies_of(worker_id):
                latency.itl.add(self._now_us - at_us, output_tokens - before)
            request.grown = self._now_us, output_tokens

    def _end(self, request: TrackedRequest) -> None:
        request.ended, request.computing = True, False
        request.queued_in, request.place = "", None
        request.expires_us = self._now_us + ORPHAN_US

    def _update(self, request_id: str, request: TrackedRequest) -> None:
        """Count what is known about a request now and was not counted before. Remove the request if that is all."""
        prompt_tokens, prompted = request.prompt_tokens, request.prompted
        if prompt_tokens is None:
            return
        for stage, pool in request.pools.items():
            if stage not in request.counted and (tally := self._tallies.get(pool)) is not None:
                tally.requests += 1
                tally.prompt_tokens += prompt_tokens
            request.counted.add(stage)
        if prompted is not None and not request.is_routed:
            request.is_routed = True
            if (tally := self._tallies.get(prompted.pool)) is not None:
                tally.routed_tokens += prompt_tokens
                tally.cached_tokens += min(request.cached_tokens, prompt_tokens)
        if prompted is not None and request.first_us is not None and request.submitted_us is not None:
            for latency in self._latencies_of(prompted.worker_id):
                latency.ttft.add(max(0, request.first_us - request.submitted_us))
            request.submitted_us = None
        if request.ended and (request.counted or request.closed):
            self._count_output(request)
            del self._requests[request_id]

    def _count_output(self, request: TrackedRequest) -> None:
        output_tokens = request.output_tokens
        if output_tokens is None or not (output_tokens or request.embeds):
            return  # it failed, or an attempt began after the whole response had been emitted
        for pool in set(request.pools.values()):
            if (tally := self._tallies.get(pool)) is not None:
                tally.ended += 1
                tally.output_tokens += output_tokens

    def _latencies_of(self, worker_id: str) -> list[Latency]:
        """Return the latencies to which a duration of a worker is added: of the worker and of its pool."""
        worker = self._fleet.get(worker_id)
        tally = None if worker is None else self._tallies.get(worker.spec.pool)
        return [] if tally is None else [tally.latency, self._latencies.setdefault(worker_id, Latency())]

    def _expect(self, request: TrackedRequest, pool: str) -> None:
        """Record the pools that a queued or rejected request needs."""
        for one in self._pools_of(pool):
            known = self._pools.get(one)
            request.assign("prefill" if known is not None and known.role == "prefill" else "generate", one)

    def _pools_of(self, pool: str) -> list[str]:
        """Return the pool that generates a response, and the prefill pool if this is a decode pool."""
        known = self._pools.get(pool)
        prefill = self._first("prefill") if known is not None and known.role == "decode" else None
        return [pool] if prefill is None else [pool, prefill]

    def _first(self, *roles: Role) -> str | None:
        """Return the first pool by name of these roles, of those with a ready worker if there are any."""
        names = sorted(pool.pool for pool in self._pools.values() if pool.role in roles)
        return next((name for name in names if self._ready[name]), next(iter(names), None))
