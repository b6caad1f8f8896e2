"""One rank of a worker in a simulation: its engine model, and how it speaks on the log."""

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
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.events.transfer import Prefilled
from forebay.simulate.delays import NO_HOPS, Hops

LOAD_INTERVAL_US = 100_000  # as workers report


class EngineRank:
    """An engine, which is ahead of the time, and what it says when the time has come.

    Attributes:
        number: its place among all ranks of the simulation.
        hops: how long what it is told and what it says is on its way.
        step: what the engine does now, from `began_us` to `ends_us`; None while it does nothing.
        dead: it died without a word.
        load: as it was when the last step ended.
        kept: prompts that it keeps for others, by request: at which attempt to compute them.
        reported_us: when it last reported that; `report_held` until the interval since then is over.
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
        """`kv_seq` is the number of its last KV event."""
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
        self.kept: dict[str, int] = {}
        self.reported_us = -LOAD_INTERVAL_US
        self.report_held = False
        self._kv_seq = kv_seq

    def keeps(self, request_id: str, prefill_attempt: int) -> bool:
        """Whether it still has what it computed at this attempt."""
        return not self.dead and self.kept.get(request_id) == prefill_attempt

    def release(self, request_id: str, prefill_attempt: int) -> bool:
        """Nobody will fetch that. False if it is not kept any more."""
        if not self.keeps(request_id, prefill_attempt):
            return False
        del self.kept[request_id]
        return self.engine.release(request_id)

    def drop(self, request_id: str) -> None:
        """Nobody wants what it computes for a request, has computed, or fetches."""
        self.kept.pop(request_id, None)
        self.engine.cancel(request_id)

    def die(self, now_us: int) -> dict[str, int]:
        """It stops in the middle of what it does: the output tokens that requests had of it, by id."""
        self.dead = True
        step, self.step = self.step, None
        undone = 0
        if step is not None:
            lasts_us = self.ends_us - self.began_us
            undone = step.iterations - step.iterations * (now_us - self.began_us) // lasts_us
        said = self.engine.generated(undone)
        if step is not None:
            said.update((end.request_id, end.output_tokens - undone) for end in step.finished)
        self.load = EngineLoad(0, 0, 0, self.load.kv_blocks_total)
        return said

    def cache_change(self, change: CacheChange) -> BlocksStored | BlocksRemoved:
        """Blocks entered or left the cache."""
        self._kv_seq += 1
        hashes = pack_u64(change.hashes)
        if isinstance(change, Stored):
            return BlocksStored(
                worker_id=self.spec.worker_id,
                worker_epoch=self.worker_epoch,
                seq=self._kv_seq,
                rank=self.rank,
                sequence_hashes=hashes,
                parent_hash=change.parent,
            )
        return BlocksRemoved(
            worker_id=self.spec.worker_id,
            worker_epoch=self.worker_epoch,
            seq=self._kv_seq,
            rank=self.rank,
            sequence_hashes=hashes,
        )

    def began(self, first: FirstTokenStep, owner_epoch: int) -> FirstTokenEmitted:
        """The first token of an answer is there."""
        return FirstTokenEmitted(
            request_id=first.request_id,
            attempt=first.attempt,
            worker_id=self.spec.worker_id,
            worker_epoch=self.worker_epoch,
            owner_epoch=owner_epoch,
            cached_tokens=first.cached_tokens,
            transferred_bytes=first.transferred_bytes,
            transfer_us=first.transfer_us,
        )

    def computed(self, one: Computed, prefilled: Prefilled, owner_epoch: int) -> PrefillFinished:
        """A prompt is computed, for another worker."""
        return PrefillFinished(
            request_id=one.request_id,
            attempt=one.attempt,
            worker_id=self.spec.worker_id,
            worker_epoch=self.worker_epoch,
            owner_epoch=owner_epoch,
            prefilled=msgspec.structs.replace(prefilled, cached_tokens=one.cached_tokens),
        )

    def not_fetched(self, request_id: str, attempt: int, error: str, owner_epoch: int) -> TransferFailed:
        """What another worker computed is not to be had."""
        return TransferFailed(
            request_id=request_id,
            attempt=attempt,
            worker_id=self.spec.worker_id,
            worker_epoch=self.worker_epoch,
            owner_epoch=owner_epoch,
            error=error,
        )

    def finished(self, end: Finished, owner_epoch: int) -> RequestFinished:
        """A request has its last token."""
        return RequestFinished(
            request_id=end.request_id,
            attempt=end.attempt,
            worker_id=self.spec.worker_id,
            worker_epoch=self.worker_epoch,
            owner_epoch=owner_epoch,
            finish_reason=end.reason,
            output_tokens=end.output_tokens,
            cached_tokens=end.cached_tokens,
        )

    def said_before(self, routed: RequestRouted) -> RequestFinished:
        """The whole answer was there before this attempt began."""
        return RequestFinished(
            request_id=routed.request_id,
            attempt=routed.attempt,
            worker_id=self.spec.worker_id,
            worker_epoch=self.worker_epoch,
            owner_epoch=routed.owner_epoch,
            finish_reason="length",
        )

    def refused(self, routed: RequestRouted, error: str, status: int) -> RequestFailed | PrefillFailed:
        """The engine does not take a request."""
        if routed.stage == "prefill":
            return PrefillFailed(
                request_id=routed.request_id,
                attempt=routed.attempt,
                worker_id=self.spec.worker_id,
                worker_epoch=self.worker_epoch,
                owner_epoch=routed.owner_epoch,
                error=error,
                status=status,
            )
        return RequestFailed(
            request_id=routed.request_id,
            attempt=routed.attempt,
            worker_id=self.spec.worker_id,
            worker_epoch=self.worker_epoch,
            owner_epoch=routed.owner_epoch,
            error=error,
        )

    def report(self) -> LoadReported:
        """Its load, for the router."""
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


def needs_reports(router: RouterConfig) -> bool:
    """Whether a router looks at what workers report of their load."""
    return router.mode not in BUILT_IN or router.busy.active_decode_blocks_threshold is not None
