"""A discrete-event run of the live core and the live engine model, in virtual time.

Theory of operation. The owner's world and one engine model for each worker share one clock, which jumps from one
event to the next: a request arrives, or an engine's step ends. What happens at one time happens in a fixed order:
steps that end, in the order in which they began (a report of load has its place among them); requests that arrive,
in the trace's order; then idle engines begin their next step. Every event goes through `forebay.core.step` as an
owner applies it, so a decision here is the decision that an owner would make of the same log. Nothing takes time but
engine steps.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256
from heapq import heappop, heappush

from xxhash import xxh3_64_intdigest

from forebay.core.engine_model import (
    CacheChange,
    EngineModel,
    EngineRequest,
    Finished,
    FirstToken,
    RequestRefused,
    Step,
    Stored,
)
from forebay.core.policies import BUILT_IN
from forebay.core.step import CONSUMED_RUNS_MAX, Decided, InputEvent, advance, claim, open_run, step
from forebay.core.world import World
from forebay.events.base import U32_BYTES, U64_MASK, pack_u64
from forebay.events.codec import encode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.decisions import JournalRecord, RequestAborted, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerJoined, WorkerSpec
from forebay.events.kv import BlocksRemoved, BlocksStored
from forebay.events.metrics import LoadReported
from forebay.events.progress import FirstTokenEmitted, RequestFailed, RequestFinished
from forebay.events.requests import TIMEOUT_US_MAX, RequestSubmitted, Sampling
from forebay.events.topics import CONTROL, DECISIONS, FLEET, KV_EVENTS, METRICS, PROGRESS, REQUESTS, Topic
from forebay.simulate.mooncake import Row
from forebay.simulate.outcome import Outcome, Served
from forebay.simulate.settings import Settings

MODEL = "simulated"
POOL = "default"
OWNER_EPOCH = 0
US_PER_MS = 1_000
FOREVER_US = 1 << 62  # no request comes any more: an engine may run until it has something to say

LOAD_INTERVAL_US = 100_000  # as workers report

OnArrived = Callable[[int], object]


class Simulation:
    """One policy on one workload. Make one for each run."""

    def __init__(self, settings: Settings, router: RouterConfig) -> None:
        self._settings = settings
        self._world = World()
        self._outcome = Outcome()
        self._digest = sha256()
        self._workers: dict[str, _Worker] = {}
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._ready: dict[int, _Worker] = {}
        self._asked: dict[str, RequestSubmitted] = {}  # not routed yet
        self._records: deque[tuple[Topic, InputEvent]] = deque()  # written and not applied yet
        self._now_us = 0
        # Nothing else looks at reports, and there are more of them than of all other events.
        self._reports = router.mode not in BUILT_IN or router.busy.active_decode_blocks_threshold is not None
        self._start(router)

    def run(self, rows: Iterable[Row], on_arrived: OnArrived) -> Outcome:
        """Play the rows, which must be in the order of their timestamps; `on_arrived` gets how many did arrive."""
        coming = iter(rows)
        row = next(coming, None)
        while row is not None or self._due:
            arrival_us = FOREVER_US if row is None else self._arrival_us(row)
            self._now_us = min(arrival_us, self._due[0][0]) if self._due else arrival_us
            while self._due and self._due[0][0] == self._now_us:
                heappop(self._due)[2]()
            while row is not None and arrival_us == self._now_us:
                self._arrive(row)
                on_arrived(len(self._outcome.requests))
                row = next(coming, None)
                arrival_us = FOREVER_US if row is None else self._arrival_us(row)
            # Who waits in the router may be sent to an engine whenever another is done with something.
            waiting = self._world.queues.waiting(POOL)
            self._begin_steps(0 if waiting else arrival_us - self._now_us)
        assert not len(self._world.requests), "every request came to an end"
        self._seal(advance(self._world))
        self._outcome.digest = self._digest.hexdigest()
        return self._outcome

    def _start(self, router: RouterConfig) -> None:
        settings = self._settings
        claim(self._world, OWNER_EPOCH)
        pool = PoolConfigured(pool=POOL, model=MODEL, block_size=settings.block_size, router=router)
        self._apply(CONTROL, pool)
        config = settings.engine()
        for number in range(settings.workers):
            spec = WorkerSpec(
                worker_id=f"mock-{number}",
                model=MODEL,
                block_size=settings.block_size,
                kv_blocks_total=settings.blocks,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                pool=POOL,
            )
            worker_epoch = self._world.view.get(FLEET.name, 0)
            self._workers[spec.worker_id] = _Worker(number, spec.worker_id, worker_epoch, EngineModel(config))
            joined = WorkerJoined(owner_epoch=OWNER_EPOCH, spec=spec, lease=spec.worker_id, slot=number, from_offset=0)
            self._apply(FLEET, joined)

    def _arrival_us(self, row: Row) -> int:
        return round(row.timestamp * US_PER_MS / self._settings.speed)

    def _schedule(self, after_us: int, action: Callable[[], None]) -> None:
        heappush(self._due, (self._now_us + after_us, self._scheduled, action))
        self._scheduled += 1

    def _apply(self, topic: Topic, event: InputEvent) -> None:
        """One record of `topic`, and then those that it leads to at once."""
        self._records.append((topic, event))
        while self._records:
            self._apply_one(*self._records.popleft())

    def _apply_one(self, topic: Topic, event: InputEvent) -> None:
        """A record as an owner applies it; then what was decided happens."""
        world = self._world
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

    def _arrive(self, row: Row) -> None:
        requests = self._outcome.requests
        request_id = str(len(requests))
        requests.append(Served(self._now_us, row.input_length, row.output_length))
        hashes = pack_u64(row.sequence_hashes(self._settings.block_size))
        submitted = RequestSubmitted(
            request_id=request_id,
            model=MODEL,
            token_ids=bytes(row.input_length * U32_BYTES),
            sequence_hashes=hashes,
            reply_slot=0,
            timeout_us=TIMEOUT_US_MAX,
            tie_seed=xxh3_64_intdigest(request_id.encode(), self._settings.seed & U64_MASK),
            sampling=Sampling(max_tokens=row.output_length, ignore_eos=True),
        )
        self._asked[request_id] = submitted
        self._apply(REQUESTS, submitted)

    def _act(self, decision: Decided) -> None:
        """Let a decision happen: its work begins at once."""
        match decision:
            case RequestRouted():
                self._submit(decision)
            case RequestRejected():
                del self._asked[decision.request_id]
                self._served(decision.request_id).failure = decision.message
            case RequestAborted():
                self._asked.pop(decision.request_id, None)
                if decision.worker_id:
                    self._workers[decision.worker_id].engine.cancel(decision.request_id)
                self._served(decision.request_id).failure = decision.message
            case _:
                pass  # it changes nothing outside the router

    def _submit(self, routed: RequestRouted) -> None:
        asked = self._asked.pop(routed.request_id)
        worker = self._workers[routed.worker_id]
        request = EngineRequest(
            request_id=routed.request_id,
            attempt=routed.attempt,
            token_ids=asked.token_ids,
            sequence_hashes=asked.sequence_hashes,
            token_seed=xxh3_64_intdigest(routed.request_id.encode()),
            max_tokens=asked.sampling.max_tokens,
        )
        served = self._served(routed.request_id)
        served.worker = worker.number
        try:
            worker.engine.submit(request)
        except RequestRefused as refusal:
            served.failure = str(refusal)
            self._records.append((PROGRESS, worker.refused(routed, served.failure)))
            return
        self._ready[worker.number] = worker

    def _begin_steps(self, until_us: int) -> None:
        """Idle engines that have work begin; nothing that could change it comes for `until_us`."""
        for _, worker in sorted(self._ready.items()):
            if worker.step is not None:
                continue
            worker.step = worker.engine.step(until_us)
            if worker.step is not None:
                self._schedule(worker.step.duration_us, partial(self._end_step, worker))
        self._ready.clear()

    def _end_step(self, worker: "_Worker") -> None:
        """What a step did is known when it ends: to the router in the order in which a worker says it."""
        done, worker.step = worker.step, None
        assert done is not None
        self._ready[worker.number] = worker
        for change in done.cache_changes:
            self._apply(KV_EVENTS, worker.cache_change(change))
        for first in done.first_tokens:
            served = self._served(first.request_id)
            served.first_us, served.cached_tokens = self._now_us, first.cached_tokens
            self._apply(PROGRESS, worker.began(first))
        for end in done.finished:
            self._served(end.request_id).last_us = self._now_us
            self._apply(PROGRESS, worker.finished(end))
        worker.load = done.load
        if self._reports and not worker.report_held:
            wait_us = worker.reported_us + LOAD_INTERVAL_US - self._now_us
            if wait_us > 0:
                worker.report_held = True
                self._schedule(wait_us, partial(self._report, worker))
            else:
                self._report(worker)

    def _report(self, worker: "_Worker") -> None:
        worker.report_held = False
        worker.reported_us = self._now_us
        self._apply(METRICS, worker.report())

    def _served(self, request_id: str) -> Served:
        return self._outcome.requests[int(request_id)]


class _Worker:
    """An engine, and how it speaks."""

    def __init__(self, number: int, worker_id: str, worker_epoch: int, engine: EngineModel) -> None:
        self.number = number
        self.worker_id = worker_id
        self.worker_epoch = worker_epoch
        self.engine = engine
        self.step: Step | None = None
        self.load = engine.load()  # when its last step ended: the model is ahead of the time
        self.reported_us = -LOAD_INTERVAL_US
        self.report_held = False  # until the interval since the last one is over
        self._kv_seq = 0

    def cache_change(self, change: CacheChange) -> BlocksStored | BlocksRemoved:
        self._kv_seq += 1
        hashes = pack_u64(change.hashes)
        if isinstance(change, Stored):
            return BlocksStored(
                worker_id=self.worker_id,
                worker_epoch=self.worker_epoch,
                seq=self._kv_seq,
                sequence_hashes=hashes,
                parent_hash=change.parent,
            )
        return BlocksRemoved(
            worker_id=self.worker_id, worker_epoch=self.worker_epoch, seq=self._kv_seq, sequence_hashes=hashes
        )

    def began(self, first: FirstToken) -> FirstTokenEmitted:
        return FirstTokenEmitted(
            request_id=first.request_id,
            attempt=first.attempt,
            worker_id=self.worker_id,
            worker_epoch=self.worker_epoch,
            owner_epoch=OWNER_EPOCH,
            cached_tokens=first.cached_tokens,
        )

    def finished(self, end: Finished) -> RequestFinished:
        return RequestFinished(
            request_id=end.request_id,
            attempt=end.attempt,
            worker_id=self.worker_id,
            worker_epoch=self.worker_epoch,
            owner_epoch=OWNER_EPOCH,
            finish_reason=end.reason,
            output_tokens=end.output_tokens,
            cached_tokens=end.cached_tokens,
        )

    def refused(self, routed: RequestRouted, error: str) -> RequestFailed:
        return RequestFailed(
            request_id=routed.request_id,
            attempt=routed.attempt,
            worker_id=self.worker_id,
            worker_epoch=self.worker_epoch,
            owner_epoch=OWNER_EPOCH,
            error=error,
        )

    def report(self) -> LoadReported:
        load = self.load
        return LoadReported(
            worker_id=self.worker_id,
            worker_epoch=self.worker_epoch,
            running=load.running,
            waiting=load.waiting,
            kv_blocks_used=load.kv_blocks_used,
            kv_blocks_total=load.kv_blocks_total,
        )
