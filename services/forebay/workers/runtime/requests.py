"""The work items of one epoch of a worker: begun, gone on with, ended, given up.

Theory of operation. An item is obeyed once, by (request, stage, attempt); one that comes again was re-sent by a new
owner. A later attempt at an answer goes on where the valid tokens of the earlier ones end; KV that was computed for it
elsewhere is then of no use. Who computes prompts for others remembers its last answers: they are on the log for whoever
owns next, and are said again to one that asks again, as long as the KV is kept.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from forebay.core.state.reply_slot import ResponseState
from forebay.events.fleet import WorkerSpec
from forebay.events.tokens import ResponseError
from forebay.events.work import ReleaseKv, WorkCancelled, WorkItem
from forebay.transport.base import Draft, Log
from forebay.workers.engine import EngineBatch, PromptPrefilled
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.runtime.media_feed import MediaFeed
from forebay.workers.runtime.outbox import Active, Outbox
from forebay.workers.runtime.resume import Later, Resumer, SlotReading, Spawn, continued

logger = logging.getLogger(__name__)

SEEN_MAX = 65_536  # items remembered: minutes at full speed, and a new owner re-sends only what is unanswered
KEPT_MAX = 1_024  # answers that can be said again, with descriptors of some kilobytes: seconds at full speed
SILENT = frozenset(("encode", "prefill"))  # stages that say nothing to the client


@dataclass(slots=True)
class WorkerCounters:
    """What a worker did not run, and why; what it went on with."""

    dead_letters: int = 0
    other_epoch: int = 0
    other_group: int = 0  # addressed to a worker of another group
    other_worker: int = 0  # addressed to another worker of the group
    repeated: int = 0
    superseded: int = 0  # a later attempt, elsewhere, began before this worker's
    unknown_rank: int = 0  # a cache that was to be announced, of a rank that is not here
    fleet_undecodable: int = 0
    continued: int = 0
    reannounced: int = 0
    handed_back: int = 0
    reading: SlotReading = field(default_factory=SlotReading)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What was said of a prompt whose KV is kept, until `until_s` on the monotonic clock."""

    active: Active
    said: PromptPrefilled
    until_s: float


class Orders:
    """What a worker of `spec` in `group` obeys in one epoch; `feed` is its engine.

    `settled` is told of what ends without the engine.
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
        self._resumer = Resumer(log, group, outbox, counters.reading, spawn, self._go_on)
        self._seen: OrderedDict[tuple[str, int, int, str, int], None] = OrderedDict()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._prompts: OrderedDict[str, int] = OrderedDict()  # the last attempt at each that was begun here

    @property
    def busy(self) -> bool:
        """Whether anything is under way, or kept for another worker."""
        return bool(self.active) or self._feed.kept() > 0

    def close(self) -> None:
        """Drop everything, also what is kept for others."""
        self._resumer.close()
        self.active.clear()
        self._feed.reset()

    def start(self, item: WorkItem) -> None:
        """Obey an item, unless that was done before or is past."""
        active = self.active.get(item.request_id)
        outdated = active is not None and active.attempt > item.attempt
        # An id may be used again, long after: then its answer begins elsewhere.
        key = item.request_id, item.reply_slot, item.reply_from, item.stage, item.attempt
        if outdated or key in self._seen:
            self._counters.repeated += 1
            if active is not None and active.attempt == item.attempt:
                # Re-sent by a new owner: from here on the answer is given on its order.
                active.owner_epoch = max(active.owner_epoch, item.owner_epoch)
            elif active is None and item.stage == "prefill":
                self._say_again(item)
            return
        self._seen[key] = None
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        if active is not None:
            del self.active[item.request_id]
            self._feed.cancel(item.request_id)
        if item.stage == "prefill":
            self._release(item.request_id)  # an earlier attempt's: its reader did not get it
            self._prompts[item.request_id] = item.attempt
            self._prompts.move_to_end(item.request_id)
            if len(self._prompts) > SEEN_MAX:
                self._prompts.popitem(last=False)
        active = self.active[item.request_id] = self._outbox.active(item)
        if item.attempt > 1 and item.stage not in SILENT:
            self._resumer.add(Later(item, active))
        else:
            self._submit(item, active)

    def cancel(self, order: WorkCancelled) -> None:
        """Give up a request, or what is kept for it."""
        active = self.active.get(order.request_id)
        if active is None:
            self._release(order.request_id)
        elif active.attempt <= order.attempt:
            del self.active[order.request_id]
            self._feed.cancel(order.request_id)

    def release(self, order: ReleaseKv) -> None:
        """Give back what is kept of an attempt at a prompt; a later one that was begun here is not meant."""
        if self._prompts.get(order.request_id, order.attempt) <= order.attempt:
            self._release(order.request_id)

    def batch(self, batch: EngineBatch) -> list[Draft]:
        """What a batch of the engine means on the log."""
        now_s = time.monotonic()
        for said in batch.prefilled:
            active = self.active.get(said.request_id)
            if active is None:
                self._feed.release(said.request_id)  # it was given up meanwhile
            elif active.attempt == said.attempt:
                self._kept[said.request_id] = _Kept(active, said, now_s + said.prefilled.lease_us / 1e6)
                if len(self._kept) > KEPT_MAX:
                    self._kept.popitem(last=False)
        for failed in batch.failed:
            active = self.active.get(failed.request_id)
            if active is not None and active.attempt == failed.attempt and not active.began and active.fetched:
                self._feed.drop(active.fetched)  # it may never have been asked for
        return self._outbox.batch(batch, self.active)

    def not_submitted(self, item: WorkItem, error: ResponseError | TransferError) -> None:
        """The engine never gets an item: for good, or because its embeddings cannot be fetched."""
        active = self.active.get(item.request_id)
        if active is None or active.attempt != item.attempt:
            return
        if isinstance(error, ResponseError):
            self._drop(item)
            self._settle(active, self._outbox.failure(active, error))
        else:
            self._settle(active, self._outbox.not_fetched(active, str(error)))

    def _say_again(self, item: WorkItem) -> None:
        kept = self._kept.get(item.request_id)
        left_us = 0 if kept is None else int((kept.until_s - time.monotonic()) * 1e6)
        if kept is None or kept.active.attempt != item.attempt or left_us <= 0:
            return  # what it said is on the log
        kept.active.owner_epoch = max(kept.active.owner_epoch, item.owner_epoch)
        prefilled = msgspec.structs.replace(kept.said.prefilled, lease_us=left_us)
        self._log.append_soon([self._outbox.prefilled(kept.active, prefilled, kept.said.cached_tokens)])

    def _release(self, request_id: str) -> None:
        self._kept.pop(request_id, None)
        self._feed.release(request_id)

    def _drop(self, item: WorkItem) -> None:
        """KV that another worker keeps for an item is not wanted."""
        if item.prefilled is not None:
            self._feed.drop(item.prefilled)

    def _go_on(self, later: Later, reply: ResponseState) -> None:
        """What earlier attempts said is known: say the rest, if there is any and it is still wanted."""
        item, active = later.item, later.active
        if self.active.get(item.request_id) is not active:
            return
        active.said = reply.next_index
        over = self._over(item, active, reply)
        if over is not None or active.said:
            self._drop(item)
        if over is not None:
            self._settle(active, over)
        elif active.said:
            self._counters.continued += 1
            active.stage, active.fetched, active.unfetched = "aggregated", None, item.prefilled is not None
            local = msgspec.structs.replace(item, stage="aggregated", prefilled=None)
            self._submit(continued(local, reply.tokens, self._spec.block_size), active)
        else:
            self._submit(item, active)

    def _over(self, item: WorkItem, active: Active, reply: ResponseState) -> list[Draft] | None:
        """How a later attempt ends where there is nothing to go on with; None if it goes on."""
        outbox = self._outbox
        if reply.ended is not None:
            return outbox.ended_before(active, reply.ended)
        if reply.is_stale(active.attempt, active.owner_epoch):
            self._counters.superseded += 1
            return []
        if reply.gap:
            message = f"the answer has a gap after {active.said} tokens"
            return outbox.failure(active, ResponseError(status=502, code="tokens_missing", message=message))
        if active.said >= item.sampling.max_tokens:
            return outbox.complete(active)
        if active.said and item.sampling.structured is not None:
            # An engine holds what it generates to the structure from the first token on, not from the middle.
            message = f"its worker was lost after {active.said} tokens, and an answer with a structure cannot go on"
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
        """It is over without the engine."""
        del self.active[active.request_id]
        if drafts:
            self._log.append_soon(drafts)
        self._settled()


def no_such_rank(spec: WorkerSpec, rank: int) -> str:
    """What to say to who asks a worker for a rank that it does not have."""
    return f"rank {rank} does not exist: worker {spec.worker_id} has {spec.ranks[0]} to {spec.ranks[-1]}"
