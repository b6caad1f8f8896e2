"""Run the work items of one worker epoch: start, continue, end and cancel them.

Theory of operation. Each item, identified by request, stage and attempt, runs once. `RequestTable` detects repeated
items, which a new owner has sent again. A later attempt continues after the valid output tokens of the earlier
attempts, so it cannot use KV that another worker computed for the prompt alone. A prefill worker remembers its last
results while it keeps their KV, because a new owner may request a result again that the log already contains.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from forebay import runtime
from forebay.core.state.reply_slot import ResponseState
from forebay.events.fleet import WorkerSpec
from forebay.events.tokens import ResponseError
from forebay.events.work import ReleaseKv, WorkCancelled, WorkItem
from forebay.transport.base import Draft, Log
from forebay.workers.engine import AttemptFailed, EngineBatch
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.runtime.media_feed import MediaFeed
from forebay.workers.runtime.outbox import Outbox, append_output
from forebay.workers.runtime.request_table import RequestTable, WorkRequest, WorkState, WorkTransition
from forebay.workers.runtime.resume import LaterAttempt, ReplySlotReading, Resumer, Spawn, continued

SILENT = frozenset(("encode", "prefill"))  # stages without output to the client


@dataclass(slots=True)
class WorkerCounters:
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
    reading: ReplySlotReading = field(default_factory=ReplySlotReading)


class WorkItems:
    """Runs the work items that a worker receives during one worker epoch.

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
        self._table = RequestTable()
        self._log = log
        self._spec = spec
        self._outbox = outbox
        self._feed = feed
        self._counters = counters
        self._settled = settled
        self._resumer = Resumer(log, group, outbox, counters.reading, spawn, self._continue)

    @property
    def active(self) -> Collection[str]:
        return self._table.in_flight

    @property
    def busy(self) -> bool:
        """Whether a request is in flight, or the engine keeps KV for another worker."""
        return bool(self._table.in_flight) or self._feed.kept() > 0

    def close(self) -> None:
        """Drop all requests, and all KV that the engine keeps for other workers."""
        self._resumer.close()
        self._table.in_flight.clear()
        self._feed.reset()

    def start(self, item: WorkItem) -> None:
        """Run an item. Do not run it if it has run before, or if a later attempt at the request is in flight."""
        previous = self._table.in_flight.get(item.request_id)
        request = self._outbox.request(item)
        resumes = item.attempt > 1 and item.stage not in SILENT
        key = item.reply_slot, item.reply_from, item.stage, item.attempt
        if not self._table.start(request, key, resumes=resumes):
            self._counters.repeated += 1
            self._repeat(item)
            return
        if previous is not None:
            self._feed.cancel(item.request_id)
        if item.stage == "prefill":
            self._feed.release(item.request_id)  # KV of an earlier attempt: its reader did not get it
        if resumes:
            self._resumer.add(LaterAttempt(item, request))
        else:
            self._submit(item, request)

    def cancel(self, event: WorkCancelled) -> None:
        """Cancel a request that is in flight, otherwise free the KV that the engine keeps for it."""
        in_flight = event.request_id in self._table.in_flight
        cancelled = self._table.move(event.request_id, WorkTransition.CANCEL, event.attempt)
        if not in_flight:
            self._feed.release(event.request_id)
        elif cancelled is not None:
            self._feed.cancel(event.request_id)

    def release(self, event: ReleaseKv) -> None:
        """Free the KV of a prefill attempt, unless a later one at the request has started on this worker."""
        request = self._table.get(event.request_id)
        self._table.move(event.request_id, WorkTransition.RELEASE, event.attempt)
        if request is None or request.prefill_attempt <= event.attempt:
            self._feed.release(event.request_id)

    def batch(self, batch: EngineBatch) -> list[Draft]:
        for result in batch.prefilled:
            if result.request_id not in self._table.in_flight:
                self._feed.release(result.request_id)  # cancelled in the meantime
        for failed in batch.failed:
            request = self._table.find(failed.request_id, failed.attempt)
            if request is not None and request.state is WorkState.RUNNING and request.fetched:
                self._feed.drop(request.fetched)  # the engine may have failed before it fetched the KV
        drafts = self._outbox.batch(batch, self._table)
        now_s = runtime.monotonic_s()
        for result in batch.prefilled:
            request = self._table.get(result.request_id)
            if request is not None and request.state is WorkState.KEPT and request.attempt == result.attempt:
                request.result, request.kept_until_s = result, now_s + result.prefilled.lease_us / 1e6
        return drafts

    def not_submitted(self, item: WorkItem, error: AttemptFailed | TransferError) -> None:
        """End an item that does not reach the engine, by an error for the client or a failed fetch of embeddings."""
        request = self._table.find(item.request_id, item.attempt)
        if request is None:
            return
        if isinstance(error, AttemptFailed):
            self._drop(item)
            self._settle(request, self._outbox.failure(request, error.error))
        else:
            self._settle(request, self._outbox.not_fetched(request, str(error)))

    def _repeat(self, item: WorkItem) -> None:
        """Handle an item that a new owner sent again. Its epoch now identifies the output."""
        request = self._table.get(item.request_id)
        if request is None or request.attempt != item.attempt or request.state is WorkState.ENDED:
            return
        request.owner_epoch = max(request.owner_epoch, item.owner_epoch)
        left_us = int((request.kept_until_s - runtime.monotonic_s()) * 1e6)
        if request.result is not None and item.stage == "prefill" and left_us > 0:
            prefilled = msgspec.structs.replace(request.result.prefilled, lease_us=left_us)
            append_output(self._log, [self._outbox.prefilled(request, prefilled, request.result.cached_tokens)])

    def _drop(self, item: WorkItem) -> None:
        """Notify the prefill worker that it need not keep the KV for this item any longer."""
        if item.prefilled is not None:
            self._feed.drop(item.prefilled)

    def _continue(self, later: LaterAttempt, reply: ResponseState) -> None:
        """Pass a later attempt to the engine, to continue after the output of earlier ones, unless it was cancelled."""
        item, request = later.item, later.request
        if self._table.in_flight.get(item.request_id) is not request:
            return
        request.earlier_tokens = reply.next_index
        records = self._final_records(item, request, reply)
        if records is not None or request.earlier_tokens:
            self._drop(item)
        if records is not None:
            self._settle(request, records)
        elif request.earlier_tokens:
            self._counters.continued += 1
            request.stage, request.fetched, request.unfetched = "aggregated", None, item.prefilled is not None
            local = msgspec.structs.replace(item, stage="aggregated", prefilled=None)
            self._submit(continued(local, reply.tokens, self._spec.block_size), request)
        else:
            self._submit(item, request)

    def _final_records(self, item: WorkItem, request: WorkRequest, reply: ResponseState) -> list[Draft] | None:
        """Return the final records of a later attempt that has nothing left to generate; None if it continues."""
        outbox = self._outbox
        if reply.ended is not None:
            return outbox.ended_before(request, reply.ended)
        if reply.is_stale(request.attempt, request.owner_epoch):
            self._counters.superseded += 1
            return []
        if reply.gap:
            message = f"output tokens after the first {request.earlier_tokens} were lost; send the request again"
            return outbox.failure(request, ResponseError(status=502, code="tokens_missing", message=message))
        if request.earlier_tokens and item.task == "call":
            message = f"its worker was lost after {request.earlier_tokens} objects; a call cannot go on, so repeat it"
            return outbox.failure(request, ResponseError(status=502, code="response_interrupted", message=message))
        if request.earlier_tokens and reply.text_only:  # its number of tokens does not tell whether it is complete
            message = (
                f"its worker was lost after {request.earlier_tokens} output tokens: a response of a server that returns"
                " text only cannot go on; send the request again"
            )
            return outbox.failure(request, ResponseError(status=502, code="response_interrupted", message=message))
        if request.earlier_tokens >= item.sampling.max_tokens:
            return outbox.complete(request)
        if request.earlier_tokens and item.sampling.structured is not None:
            # An engine enforces a structure from the first token on; it cannot start in the middle.
            message = (
                f"its worker was lost after {request.earlier_tokens} output tokens: a structured response cannot go on"
            )
            return outbox.failure(request, ResponseError(status=503, code="structure_interrupted", message=message))
        return None

    def _submit(self, item: WorkItem, request: WorkRequest) -> None:
        if item.rank in self._spec.ranks:
            self._table.move(item.request_id, WorkTransition.SUBMIT, item.attempt)
            self._feed.submit(item)
            return
        self._drop(item)
        error = ResponseError(status=500, code="no_such_rank", message=no_such_rank(self._spec, item.rank))
        self._settle(request, self._outbox.failure(request, error))

    def _settle(self, request: WorkRequest, drafts: list[Draft]) -> None:
        self._table.move(request.request_id, WorkTransition.END, request.attempt)
        if drafts:
            append_output(self._log, drafts)
        self._settled()


def no_such_rank(spec: WorkerSpec, rank: int) -> str:
    return f"rank {rank} does not exist: worker {spec.worker_id} has ranks {spec.ranks[0]} to {spec.ranks[-1]}"
