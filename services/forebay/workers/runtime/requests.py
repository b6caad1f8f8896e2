"""Work items of one epoch of a worker: start, continuation, end and cancellation.

Theory of operation. Each item runs once, identified by (request, stage, attempt). A repeated item was sent again by a
new owner. A later attempt continues after the valid output tokens of the earlier attempts; KV that another worker
computed for it is then of no use. A prefill worker remembers its last results while it keeps their KV, because a new
owner may request a result again that the log already contains.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from forebay import runtime
from forebay.core.state.reply_slot import ResponseState
from forebay.events.fleet import WorkerSpec
from forebay.events.tokens import ResponseError
from forebay.events.work import ReleaseKv, WorkCancelled, WorkItem
from forebay.transport.base import Draft, Log
from forebay.workers.engine import EngineBatch, PromptPrefilled
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.runtime.media_feed import MediaFeed
from forebay.workers.runtime.outbox import Active, Outbox
from forebay.workers.runtime.resume import LaterAttempt, Resumer, SlotReading, Spawn, continued

logger = logging.getLogger(__name__)

SEEN_MAX = 65_536  # minutes at full speed; a new owner sends only unanswered items again
KEPT_MAX = 1_024  # results with descriptors of a few kilobytes: seconds at full speed
SILENT = frozenset(("encode", "prefill"))  # stages without output to the client


@dataclass(slots=True)
class WorkerCounters:
    """Numbers of items that a worker skipped, by reason, and of requests that it continued."""

    dead_letters: int = 0
    other_epoch: int = 0
    other_group: int = 0  # addressed to a worker of another group
    other_worker: int = 0  # addressed to another worker of the group
    repeated: int = 0
    superseded: int = 0  # a later attempt on another worker began first
    unknown_rank: int = 0  # re-announcement requested for a rank that does not exist here
    fleet_undecodable: int = 0
    continued: int = 0
    reannounced: int = 0
    handed_back: int = 0
    reading: SlotReading = field(default_factory=SlotReading)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Result of a prefill whose KV is kept until `until_s` on the monotonic clock."""

    active: Active
    result: PromptPrefilled
    until_s: float


class WorkItems:
    """Work items of one epoch: the worker of `spec` in `group` runs them on the engine behind `feed`.

    `settled` is called after each request that ends without the engine.
    """

    def __init__(
        self,
        log: Log,
        group: str,
        spec: WorkerSpec,
        outbox: Outbox,
        feed: MediaFeed,
        counters: WorkerCounters,
        spawn: Spawn,
        settled: Callable[[], None],
    ) -> None:
        self.active: dict[str, Active] = {}
        self._log = log
        self._spec = spec
        self._outbox = outbox
        self._feed = feed
        self._counters = counters
        self._settled = settled
        self._resumer = Resumer(log, group, outbox, counters.reading, spawn, self._continue)
        self._seen: OrderedDict[tuple[str, int, int, str, int], None] = OrderedDict()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._prompts: OrderedDict[str, int] = OrderedDict()  # request id to its latest attempt that started here

    @property
    def busy(self) -> bool:
        """Whether any request is in flight, or any KV is kept for another worker."""
        return bool(self.active) or self._feed.kept() > 0

    def close(self) -> None:
        """Drop all requests and all KV kept for other workers."""
        self._resumer.close()
        self.active.clear()
        self._feed.reset()

    def start(self, item: WorkItem) -> None:
        """Run an item, unless it already ran or a later attempt is in flight."""
        active = self.active.get(item.request_id)
        is_stale = active is not None and active.attempt > item.attempt
        # A request id may be reused much later. Its response then begins at another offset.
        key = item.request_id, item.reply_slot, item.reply_from, item.stage, item.attempt
        if is_stale or key in self._seen:
            self._counters.repeated += 1
            if active is not None and active.attempt == item.attempt:
                # A new owner sent the item again; its epoch now identifies the output.
                active.owner_epoch = max(active.owner_epoch, item.owner_epoch)
            elif active is None and item.stage == "prefill":
                self._resend_result(item)
            return
        self._seen[key] = None
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        if active is not None:
            del self.active[item.request_id]
            self._feed.cancel(item.request_id)
        if item.stage == "prefill":
            self._release(item.request_id)  # KV of an earlier attempt: its reader did not get it
            self._prompts[item.request_id] = item.attempt
            self._prompts.move_to_end(item.request_id)
            if len(self._prompts) > SEEN_MAX:
                self._prompts.popitem(last=False)
        active = self.active[item.request_id] = self._outbox.active(item)
        if item.attempt > 1 and item.stage not in SILENT:
            self._resumer.add(LaterAttempt(item, active))
        else:
            self._submit(item, active)

    def cancel(self, event: WorkCancelled) -> None:
        """Cancel a request, or free the KV kept for it."""
        active = self.active.get(event.request_id)
        if active is None:
            self._release(event.request_id)
        elif active.attempt <= event.attempt:
            del self.active[event.request_id]
            self._feed.cancel(event.request_id)

    def release(self, event: ReleaseKv) -> None:
        """Free the KV kept for one prefill attempt, unless a later attempt of the request started here."""
        if self._prompts.get(event.request_id, event.attempt) <= event.attempt:
            self._release(event.request_id)

    def batch(self, batch: EngineBatch) -> list[Draft]:
        """Return the log records for an engine batch."""
        now_s = runtime.monotonic_s()
        for result in batch.prefilled:
            active = self.active.get(result.request_id)
            if active is None:
                self._feed.release(result.request_id)  # cancelled in the meantime
            elif active.attempt == result.attempt:
                self._kept[result.request_id] = _Kept(active, result, now_s + result.prefilled.lease_us / 1e6)
                if len(self._kept) > KEPT_MAX:
                    self._kept.popitem(last=False)
        for failed in batch.failed:
            active = self.active.get(failed.request_id)
            if active is not None and active.attempt == failed.attempt and not active.began and active.fetched:
                self._feed.drop(active.fetched)  # the engine may have failed before it fetched the KV
        return self._outbox.batch(batch, self.active)

    def not_submitted(self, item: WorkItem, error: ResponseError | TransferError) -> None:
        """End an item that never reaches the engine, with an error or because its embeddings cannot be fetched."""
        active = self.active.get(item.request_id)
        if active is None or active.attempt != item.attempt:
            return
        if isinstance(error, ResponseError):
            self._drop(item)
            self._settle(active, self._outbox.failure(active, error))
        else:
            self._settle(active, self._outbox.not_fetched(active, str(error)))

    def _resend_result(self, item: WorkItem) -> None:
        kept = self._kept.get(item.request_id)
        left_us = 0 if kept is None else int((kept.until_s - runtime.monotonic_s()) * 1e6)
        if kept is None or kept.active.attempt != item.attempt or left_us <= 0:
            return  # the result is on the log
        kept.active.owner_epoch = max(kept.active.owner_epoch, item.owner_epoch)
        prefilled = msgspec.structs.replace(kept.result.prefilled, lease_us=left_us)
        self._log.append_soon([self._outbox.prefilled(kept.active, prefilled, kept.result.cached_tokens)])

    def _release(self, request_id: str) -> None:
        self._kept.pop(request_id, None)
        self._feed.release(request_id)

    def _drop(self, item: WorkItem) -> None:
        """Notify the worker that keeps KV for this item that it is not needed."""
        if item.prefilled is not None:
            self._feed.drop(item.prefilled)

    def _continue(self, later: LaterAttempt, reply: ResponseState) -> None:
        """Continue a later attempt after the output of the earlier ones, if it is still wanted."""
        item, active = later.item, later.active
        if self.active.get(item.request_id) is not active:
            return
        active.earlier_tokens = reply.next_index
        records = self._final_records(item, active, reply)
        if records is not None or active.earlier_tokens:
            self._drop(item)
        if records is not None:
            self._settle(active, records)
        elif active.earlier_tokens:
            self._counters.continued += 1
            active.stage, active.fetched, active.unfetched = "aggregated", None, item.prefilled is not None
            local = msgspec.structs.replace(item, stage="aggregated", prefilled=None)
            self._submit(continued(local, reply.tokens, self._spec.block_size), active)
        else:
            self._submit(item, active)

    def _final_records(self, item: WorkItem, active: Active, reply: ResponseState) -> list[Draft] | None:
        """Return the final records of a later attempt that has nothing left to generate; None if it continues."""
        outbox = self._outbox
        if reply.ended is not None:
            return outbox.ended_before(active, reply.ended)
        if reply.is_stale(active.attempt, active.owner_epoch):
            self._counters.superseded += 1
            return []
        if reply.gap:
            message = f"the response has a gap after {active.earlier_tokens} output tokens"
            return outbox.failure(active, ResponseError(status=502, code="tokens_missing", message=message))
        if active.earlier_tokens >= item.sampling.max_tokens:
            return outbox.complete(active)
        if active.earlier_tokens and item.sampling.structured is not None:
            # An engine enforces a structure from the first token on; it cannot start in the middle.
            message = (
                f"its worker was lost after {active.earlier_tokens} output tokens: a structured response cannot go on"
            )
            return outbox.failure(active, ResponseError(status=503, code="structure_interrupted", message=message))
        return None

    def _submit(self, item: WorkItem, active: Active) -> None:
        if item.rank in self._spec.ranks:
            self._feed.submit(item)
            return
        self._drop(item)
        error = ResponseError(status=500, code="no_such_rank", message=no_such_rank(self._spec, item.rank))
        self._settle(active, self._outbox.failure(active, error))

    def _settle(self, active: Active, drafts: list[Draft]) -> None:
        """End a request without the engine."""
        del self.active[active.request_id]
        if drafts:
            self._log.append_soon(drafts)
        self._settled()


def no_such_rank(spec: WorkerSpec, rank: int) -> str:
    """Return the error message for a request with an unknown rank."""
    return f"rank {rank} does not exist: worker {spec.worker_id} has ranks {spec.ranks[0]} to {spec.ranks[-1]}"
