"""One simulated rank: its engine model and the events that it emits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from forebay.core.routing.policies import BUILT_IN
from forebay.engine_model.model import (
    CacheChange,
    Computed,
    EngineLoad,
    EngineModel,
    EngineRequest,
    EngineStep,
    Finished,
    FirstTokenStep,
    QueueFull,
    RequestRefused,
    Stored,
)
from forebay.events.base import array_u64, pack_u64
from forebay.events.control import RouterConfig
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import AnyKvEvent, BlocksRemoved, BlocksStored, StoreBlocksAdded, StoreBlocksRemoved
from forebay.events.metrics import LoadReported, TierCostsMeasured
from forebay.events.progress import (
    FirstTokenEmitted,
    OnboardedTokens,
    PrefillFailed,
    PrefillFinished,
    ProgressEvent,
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.events.transfer import Prefilled
from forebay.simulate.delays import NO_HOPS, Hops
from forebay.simulate.tiers.rank_tiers import BlockChange, SimulatedTiers

P = TypeVar("P", bound=ProgressEvent)

BAD_REQUEST, UNAVAILABLE = 400, 503
LOAD_INTERVAL_US = 100_000  # the reporting interval of live workers


@dataclass(eq=False)
class EngineRank:
    """One worker rank: its engine model, which computes whole steps ahead of the clock, and its events."""

    number: int  # index among all ranks of the simulation
    spec: WorkerSpec
    rank: int  # data-parallel rank within the worker
    worker_epoch: int
    engine: EngineModel
    tiers: SimulatedTiers | None = None  # tiers from which the engine loads blocks
    hops: Hops = NO_HOPS
    kv_seq: int = 0  # sequence number of the last KV event
    step: EngineStep | None = None  # None while idle
    began_us: int = 0  # of the current step
    ends_us: int = 0
    dead: bool = False
    retained: dict[str, int] = field(default_factory=dict)  # prefill attempt by request id, if its KV is retained
    reported_us: int = -LOAD_INTERVAL_US  # virtual time of the last load report
    report_held: bool = False  # whether a load report is scheduled for the end of the reporting interval

    def __post_init__(self) -> None:
        self.load = self.engine.load()  # at the end of the last step

    def submit(self, request: EngineRequest) -> None:
        """Submit a request to the engine. Raises RequestRefused if the engine cannot serve it."""
        self.engine.submit(request)
        if self.tiers is not None:
            self.tiers.submitted(request.request_id, array_u64(request.sequence_hashes))

    def begin_step(self, until_us: int) -> EngineStep | None:
        """Run the next step of the engine (`EngineModel.step`), and begin the loads that the engine requests."""
        self.step = self.engine.step(until_us)
        if self.tiers is not None:
            self.tiers.begin_loads()
        return self.step

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
        if self.tiers is not None:
            self.tiers.cancelled(request_id)

    def die(self, now_us: int) -> dict[str, int]:
        """Kill the rank in the middle of its step. Return the output tokens emitted so far, by request id."""
        self.dead = True
        if self.tiers is not None:
            self.tiers.close()
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

    def prompt_computed(self, one: FirstTokenStep | Computed, *, is_fetched: bool) -> tuple[OnboardedTokens, ...]:
        """Offer a computed prompt to the tiers. Return the tokens that were loaded from them."""
        if self.tiers is None:
            return ()
        return self.tiers.computed(one.request_id, one.cached_tokens, is_fetched=is_fetched)

    def step_events(self, changes: list[CacheChange]) -> list[AnyKvEvent]:
        events: list[AnyKvEvent] = []
        for change in changes if self.spec.kv_events else ():
            fields = self._cache_fields(change.hashes)
            if isinstance(change, Stored):
                events.append(BlocksStored(parent_hash=change.parent, **fields))
            else:
                events.append(BlocksRemoved(**fields))
        if self.tiers is not None:
            self.tiers.stepped()
            events += self.tier_events()
        return events

    def tier_events(self) -> list[AnyKvEvent]:
        """Return the events of all changes of the tiers since the last call."""
        changes = self.tiers.changes() if self.tiers is not None else []
        return [event for change in changes for event in self._tier_events(change)] if self.spec.kv_events else []

    def measured_costs(self) -> list[TierCostsMeasured]:
        costs = None if self.tiers is None else self.tiers.due_costs()
        if costs is None:
            return []
        name = self.spec.worker_id
        return [TierCostsMeasured(worker_id=name, worker_epoch=self.worker_epoch, costs=costs, rank=self.rank)]

    def _tier_events(self, change: BlockChange) -> list[AnyKvEvent]:
        events: list[AnyKvEvent] = []
        if change.tier == "store":
            store: dict[str, Any] = {"store": self.spec.kv_store, "worker_id": self.spec.worker_id}
            if change.stored:
                events.append(StoreBlocksAdded(sequence_hashes=pack_u64(change.stored), **store))
            if change.removed:
                removed = pack_u64(change.removed)
                events.append(StoreBlocksRemoved(sequence_hashes=removed, stale=change.stale, **store))
            return events
        if change.stored:
            events.append(BlocksStored(tier=change.tier, **self._cache_fields(change.stored)))
        if change.removed:
            events.append(BlocksRemoved(tier=change.tier, **self._cache_fields(change.removed)))
        return events

    def _cache_fields(self, hashes: Sequence[int]) -> dict[str, Any]:
        self.kv_seq += 1
        return {
            "worker_id": self.spec.worker_id,
            "worker_epoch": self.worker_epoch,
            "seq": self.kv_seq,
            "rank": self.rank,
            "sequence_hashes": pack_u64(hashes),
        }

    def first_token_emitted(self, first: FirstTokenStep, owner_epoch: int) -> FirstTokenEmitted:
        return self._progress(
            FirstTokenEmitted,
            first.request_id,
            first.attempt,
            owner_epoch,
            cached_tokens=first.cached_tokens,
            transferred_bytes=first.transferred_bytes,
            transfer_us=first.transfer_us,
            onboarded=first.onboarded,
        )

    def computed(
        self, one: Computed, prefilled: Prefilled, onboarded: tuple[OnboardedTokens, ...], owner_epoch: int
    ) -> PrefillFinished:
        """Return the event for the end of a prefill for another worker."""
        kept = msgspec.structs.replace(prefilled, cached_tokens=one.cached_tokens)
        attempt = one.request_id, one.attempt, owner_epoch
        return self._progress(PrefillFinished, *attempt, prefilled=kept, onboarded=onboarded)

    def transfer_failed(self, request_id: str, attempt: int, error: str, owner_epoch: int) -> TransferFailed:
        """Return the event for a failed transfer of prefilled KV."""
        return self._progress(TransferFailed, request_id, attempt, owner_epoch, error=error)

    def finished(self, end: Finished, owner_epoch: int) -> RequestFinished:
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

    def rejected(self, routed: RequestRouted, refusal: RequestRefused) -> RequestFailed | PrefillFailed:
        attempt = routed.request_id, routed.attempt, routed.owner_epoch
        if routed.stage == "prefill":
            status = UNAVAILABLE if isinstance(refusal, QueueFull) else BAD_REQUEST
            return self._progress(PrefillFailed, *attempt, error=str(refusal), status=status)
        return self._progress(RequestFailed, *attempt, error=str(refusal))

    def send_report(self, now_us: int) -> LoadReported:
        """Return the load report that is sent to the router at `now_us`."""
        self.report_held, self.reported_us = False, now_us
        return self.report()

    def report(self) -> LoadReported:
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
