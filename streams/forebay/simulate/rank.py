"""One simulated rank: its engine model and the events that it emits."""

from typing import Any, TypeVar

import msgspec

from forebay.core.routing.policies import BUILT_IN
from forebay.engine_model.model import (
    CacheChange,
    Computed,
    EngineLoad,
    EngineModel,
    EngineStep,
    Finished,
    FirstTokenStep,
    Stored,
)
from forebay.events.base import pack_u64
from forebay.events.control import RouterConfig
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import BlocksRemoved, BlocksStored
from forebay.events.metrics import LoadReported
from forebay.events.progress import (
    FirstTokenEmitted,
    PrefillFailed,
    PrefillFinished,
    ProgressEvent,
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.events.transfer import Prefilled
from forebay.simulate.delays import NO_HOPS, Hops

P = TypeVar("P", bound=ProgressEvent)

LOAD_INTERVAL_US = 100_000  # the reporting interval of live workers


class EngineRank:
    """One worker rank: its engine model, which computes whole steps ahead of the clock, and the events that it emits.

    Attributes:
        number: index among all ranks of the simulation.
        spec: spec of the worker.
        rank: data-parallel rank within the worker.
        worker_epoch: epoch of the worker.
        engine: the engine model.
        hops: latencies of the records from and to the rank.
        step: current step; None while idle.
        began_us: start of the current step.
        ends_us: end of the current step.
        dead: whether the rank has crashed.
        load: load of the engine at the end of the last step.
        kept: prefill attempt by request id, for each prompt whose KV the rank retains.
        reported_us: virtual time of the last load report.
        report_held: whether a load report is scheduled for the end of the reporting interval.
    """

    def __init__(
        self,
        number: int,
        spec: WorkerSpec,
        rank: int,
        worker_epoch: int,
        engine: EngineModel,
        *,
        kv_seq: int = 0,
        hops: Hops = NO_HOPS,
    ) -> None:
        """Create an idle rank.

        Args:
            number: index among all ranks of the simulation.
            spec: spec of the worker.
            rank: data-parallel rank within the worker.
            worker_epoch: epoch of the worker.
            engine: the engine model.
            kv_seq: sequence number of the last KV event of the rank.
            hops: latencies of the records from and to the rank.
        """
        self.number = number
        self.spec = spec
        self.rank = rank
        self.worker_epoch = worker_epoch
        self.engine = engine
        self.hops = hops
        self.step: EngineStep | None = None
        self.began_us = self.ends_us = 0
        self.dead = False
        self.load = engine.load()
        self.retained: dict[str, int] = {}
        self.reported_us = -LOAD_INTERVAL_US
        self.report_held = False
        self._kv_seq = kv_seq

    def retains(self, request_id: str, prefill_attempt: int) -> bool:
        """Return whether the rank still retains the KV that this prefill attempt computed."""
        return not self.dead and self.retained.get(request_id) == prefill_attempt

    def release(self, request_id: str, prefill_attempt: int) -> bool:
        """Release the retained KV of a prefill attempt. Return whether this frees cache space for waiting requests."""
        if not self.retains(request_id, prefill_attempt):
            return False
        del self.retained[request_id]
        return self.engine.release(request_id)

    def drop(self, request_id: str) -> None:
        """Cancel a request on the engine, and release the KV that the rank retains for it."""
        self.retained.pop(request_id, None)
        self.engine.cancel(request_id)

    def die(self, now_us: int) -> dict[str, int]:
        """Kill the rank in the middle of its step. Return the output tokens emitted so far, by request id."""
        self.dead = True
        step, self.step = self.step, None
        undone = 0
        if step is not None:
            lasts_us = self.ends_us - self.began_us
            undone = step.iterations - step.iterations * (now_us - self.began_us) // lasts_us
        emitted = self.engine.generated(undone)
        if step is not None:
            emitted.update((end.request_id, end.output_tokens - undone) for end in step.finished)
        self.load = EngineLoad(0, 0, 0, self.load.kv_blocks_total)
        return emitted

    def cache_change(self, change: CacheChange) -> BlocksStored | BlocksRemoved:
        """Return the KV event for a change of the cache."""
        self._kv_seq += 1
        fields: dict[str, Any] = {
            "worker_id": self.spec.worker_id,
            "worker_epoch": self.worker_epoch,
            "seq": self._kv_seq,
            "rank": self.rank,
            "sequence_hashes": pack_u64(change.hashes),
        }
        return (
            BlocksStored(parent_hash=change.parent, **fields) if isinstance(change, Stored) else BlocksRemoved(**fields)
        )

    def first_token_emitted(self, first: FirstTokenStep, owner_epoch: int) -> FirstTokenEmitted:
        """Return the event for the first token of a response."""
        return self._progress(
            FirstTokenEmitted,
            first.request_id,
            first.attempt,
            owner_epoch,
            cached_tokens=first.cached_tokens,
            transferred_bytes=first.transferred_bytes,
            transfer_us=first.transfer_us,
        )

    def computed(self, one: Computed, prefilled: Prefilled, owner_epoch: int) -> PrefillFinished:
        """Return the event for the end of a prefill for another worker."""
        kept = msgspec.structs.replace(prefilled, cached_tokens=one.cached_tokens)
        return self._progress(PrefillFinished, one.request_id, one.attempt, owner_epoch, prefilled=kept)

    def transfer_failed(self, request_id: str, attempt: int, error: str, owner_epoch: int) -> TransferFailed:
        """Return the event for a failed transfer of prefilled KV."""
        return self._progress(TransferFailed, request_id, attempt, owner_epoch, error=error)

    def finished(self, end: Finished, owner_epoch: int) -> RequestFinished:
        """Return the event for the end of a request."""
        return self._progress(
            RequestFinished,
            end.request_id,
            end.attempt,
            owner_epoch,
            finish_reason=end.reason,
            output_tokens=end.output_tokens,
            cached_tokens=end.cached_tokens,
        )

    def already_finished(self, routed: RequestRouted) -> RequestFinished:
        """Return the end event of an attempt that started after the whole response had been emitted."""
        attempt = routed.request_id, routed.attempt, routed.owner_epoch
        return self._progress(RequestFinished, *attempt, finish_reason="length")

    def rejected(self, routed: RequestRouted, error: str, status: int) -> RequestFailed | PrefillFailed:
        """Return the event for a request that the engine rejected."""
        attempt = routed.request_id, routed.attempt, routed.owner_epoch
        if routed.stage == "prefill":
            return self._progress(PrefillFailed, *attempt, error=error, status=status)
        return self._progress(RequestFailed, *attempt, error=error)

    def report(self) -> LoadReported:
        """Return a load report for the router."""
        load = self.load
        return LoadReported(
            worker_id=self.spec.worker_id,
            worker_epoch=self.worker_epoch,
            running=load.running,
            waiting=load.waiting,
            kv_blocks_used=load.kv_blocks_used,
            kv_blocks_total=load.kv_blocks_total,
            rank=self.rank,
        )

    def _progress(self, kind: type[P], request_id: str, attempt: int, owner_epoch: int, **fields: Any) -> P:
        return kind(
            request_id=request_id,
            attempt=attempt,
            worker_id=self.spec.worker_id,
            worker_epoch=self.worker_epoch,
            owner_epoch=owner_epoch,
            **fields,
        )


def needs_reports(router: RouterConfig) -> bool:
    """Return whether this routing configuration uses the load that workers report."""
    return router.mode not in BUILT_IN or router.busy.active_decode_blocks_threshold is not None
