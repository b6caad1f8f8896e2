"""Extraction of engine runs from a recording: for each rank its sizes, initial cache, requests and their times."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.step import AnyDecision, InputEvent
from forebay.core.world import World
from forebay.engine_model.model import EngineConfig
from forebay.events.base import unpack_u64
from forebay.events.decisions import RequestAborted, RequestRouted
from forebay.events.fleet import WorkerLost, WorkerSpec
from forebay.events.progress import FirstTokenEmitted, RequestFailed, RequestFinished
from forebay.events.requests import RequestSubmitted
from forebay.events.snapshots import IndexBlocks
from forebay.ingress.errors import Unusable
from forebay.replay.verify.verify import OnProgress
from forebay.replay.walk import Walk, walk_all
from forebay.simulate.profiles.observed import EngineRun, ObservedRequest
from forebay.transport.base import Log

PROGRESS_EVERY = 256
UNFINISHED = "did not finish within the recording"
NOT_GENERATED = "no output was generated"
AGAIN = "continued on another worker after its worker was lost"
STOPPED = "cancelled or failed"

Rank = tuple[str, int, int]  # worker, its epoch, rank


@dataclass(slots=True)
class _EventTime:
    """Time of an event on the worker's clock, and of its arrival on the owner's clock; 0 if there was no event."""

    worker_us: int = 0
    owner_us: int = 0


@dataclass(slots=True)
class _RoutedRequest:
    observed: ObservedRequest
    rank: Rank
    first: _EventTime = field(default_factory=_EventTime)
    last: _EventTime = field(default_factory=_EventTime)


@dataclass(slots=True)
class EngineRuns:
    """Recorded requests and their times on all engines of a pool.

    Attributes:
        runs: one run per rank and worker epoch.
        lost: number of workers lost during the recording.
        clocks_differ: whether the workers' clocks contradict the owner's clock. If so, the times of tokens are of the
            owner's clock, otherwise of the workers' clocks.
    """

    engine: str
    runs: list[EngineRun]
    lost: int
    clocks_differ: bool


async def engine_runs(
    log: Log, partition: int, pool: str, on_progress: OnProgress, custom: CustomPolicies = ONLY_BUILT_IN
) -> EngineRuns:
    """Read the engine runs of a pool.

    Args:
        pool: name of the pool; empty for the only one.
        on_progress: called from time to time with the position in the recording.
        custom: custom policies that may run to derive the decisions again.

    Raises:
        LogError: the recording cannot be read.
        Unusable: a derived decision differs from the journal, or the engines of the pool cannot be compared.
    """
    walk = await walk_all(log, partition, custom)
    reader = _Reader(walk)
    done = 0
    async for step in walk:
        if step.divergence is not None:
            raise Unusable(
                f"history diverges at journal offset {step.offset}: {step.divergence.reason}; "
                "run `forebay replay verify` for details"
            )
        done += 1
        if done % PROGRESS_EVERY == 0:
            on_progress(step.offset + 1, walk.end, done)
    return reader.finish(pool)


class _Reader:
    """Observer of a walk that collects the requests of each engine."""

    def __init__(self, walk: Walk) -> None:
        """Attach to a walk before its first step."""
        self._world: World = walk.world
        self._by_attempt: dict[tuple[str, int], _RoutedRequest] = {}  # by request id and attempt
        self._all: list[_RoutedRequest] = []
        self._tokens: dict[str, int] = {}
        self._specs: dict[Rank, WorkerSpec] = {}
        self._warm: dict[Rank, list[int]] = {}
        self._lost = 0
        for worker in self._world.fleet.workers():
            for rank in worker.spec.ranks:
                self._warm[worker.spec.worker_id, worker.worker_epoch, rank] = []
        for chunk in self._world.snapshot():
            if isinstance(chunk, IndexBlocks) and chunk.tier == "device":
                key = (chunk.worker_id, chunk.worker_epoch, chunk.rank)
                self._warm.setdefault(key, []).extend(unpack_u64(chunk.sequence_hashes))
        walk.followed.on_applied = self._on_applied

    def finish(self, pool: str) -> EngineRuns:
        """Return the runs of the engines of a pool.

        Raises:
            Unusable: no request went to the pool, or its workers have different sizes.
        """
        specs = {rank: spec for rank, spec in self._specs.items() if not pool or spec.pool == pool}
        kinds = sorted({(spec.pool, spec.engine, _sizes(spec)) for spec in specs.values()})
        if not kinds:
            known = sorted({spec.pool for spec in self._specs.values()})
            there = f"; pools are: {', '.join(known)}" if known else ""
            raise Unusable(f"no request was routed to a worker{f' of pool {pool!r}' if pool else ''}{there}")
        if len(kinds) > 1:
            found = "; ".join(f"{name}: {engine} with {_in_words(sizes)}" for name, engine, sizes in kinds)
            raise Unusable(f"workers differ in engine or cache or batch size; choose a pool with --pool ({found})")
        routed_requests = [one for one in self._all if one.rank in specs]
        clocks_differ = any(map(_contradicts, routed_requests))
        runs = {
            rank: EngineRun(f"{rank[0]}/{rank[2]}", _config(specs[rank]), self._warm.get(rank, ())) for rank in specs
        }
        for one in routed_requests:
            runs[one.rank].requests.append(_settled(one, clocks_differ=clocks_differ))
        return EngineRuns(kinds[0][1], list(runs.values()), self._lost, clocks_differ)

    def _on_applied(self, topic: str, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision]) -> None:
        match event:
            case RequestSubmitted():
                self._tokens[event.request_id] = event.sampling.max_tokens
            case FirstTokenEmitted() | RequestFinished() | RequestFailed():
                self._progress(event, now_us)
            case WorkerLost():
                self._lost += 1
            case _:
                pass
        for decision in decided:
            if isinstance(decision, RequestRouted) and decision.stage != "encode":
                self._routed(decision, now_us)
            elif isinstance(decision, RequestAborted):
                self._stop((decision.request_id, decision.attempt), now_us)

    def _routed(self, routed: RequestRouted, now_us: int) -> None:
        request = self._world.requests.get(routed.request_id)
        worker = self._world.fleet.get(routed.worker_id)
        if request is None or worker is None:
            return  # the request or the worker ended with the same event
        rank = (routed.worker_id, routed.worker_epoch, routed.rank)
        self._specs[rank] = worker.spec
        room = worker.spec.kv_blocks_total * worker.spec.block_size - request.submitted.prompt_tokens
        observed = ObservedRequest(
            routed_us=now_us,
            prompt_tokens=request.submitted.prompt_tokens,
            sequence_hashes=request.submitted.packed,
            output_tokens=max(1, min(self._tokens.get(routed.request_id, 1), room)),
            left_out=UNFINISHED,
        )
        if request.submitted.task != "generate":
            observed.left_out = NOT_GENERATED
        elif routed.attempt > 1:
            observed.left_out = AGAIN
        one = self._by_attempt[routed.request_id, routed.attempt] = _RoutedRequest(observed, rank)
        self._all.append(one)

    def _progress(self, event: FirstTokenEmitted | RequestFinished | RequestFailed, now_us: int) -> None:
        one = self._by_attempt.get((event.request_id, event.attempt))
        if one is None or one.rank[:2] != (event.worker_id, event.worker_epoch):
            return
        if isinstance(event, FirstTokenEmitted):
            one.observed.cached_tokens = event.cached_tokens
            one.first = _EventTime(event.at_us, now_us)
        elif isinstance(event, RequestFailed) or event.finish_reason == "cancelled" or not event.output_tokens:
            self._stop((event.request_id, event.attempt), now_us)
        else:
            one.observed.output_tokens = event.output_tokens
            one.last = _EventTime(event.at_us, now_us)
            if one.observed.left_out == UNFINISHED and one.first.owner_us:
                one.observed.left_out = ""

    def _stop(self, key: tuple[str, int], now_us: int) -> None:
        one = self._by_attempt.get(key)
        if one is not None and not one.last.owner_us:
            one.observed.stopped_us = now_us
            if one.observed.left_out == UNFINISHED:
                one.observed.left_out = STOPPED


def _contradicts(one: _RoutedRequest) -> bool:
    """Return whether the worker's clock contradicts the owner's: an event before its cause, or after its arrival."""
    return any(
        event_time.owner_us and not one.observed.routed_us <= event_time.worker_us <= event_time.owner_us
        for event_time in (one.first, one.last)
    )


def _settled(one: _RoutedRequest, *, clocks_differ: bool) -> ObservedRequest:
    observed = one.observed
    times = [event_time.owner_us if clocks_differ else event_time.worker_us for event_time in (one.first, one.last)]
    observed.first_us, observed.last_us = times
    return observed


def _sizes(spec: WorkerSpec) -> tuple[int, int, int, int]:
    return spec.block_size, spec.kv_blocks_total, spec.max_num_seqs, spec.max_num_batched_tokens


def _in_words(sizes: Iterable[int]) -> str:
    block_size, blocks, sequences, tokens = sizes
    return f"{blocks} blocks of {block_size} tokens, {sequences} sequences, {tokens} tokens per step"


def _config(spec: WorkerSpec) -> EngineConfig:
    block_size, blocks, sequences, tokens = _sizes(spec)
    try:
        return EngineConfig(
            vocabulary=None,
            block_size=block_size,
            kv_blocks_total=blocks,
            max_num_seqs=sequences,
            max_num_batched_tokens=tokens,
        )
    except ValueError as error:
        raise Unusable(f"worker {spec.worker_id} cannot be modelled: {error}") from None
