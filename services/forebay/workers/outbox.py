"""What an engine's batch means on the log: the records to append, in their order. No I/O here.

Cache changes come first, then tokens and ends, then progress: who reads that a request is over finds its
blocks and its answer before that.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.core.engine_model import CacheChange, Finished, Load, Removed, Stored
from forebay.events.base import Event, pack_u64
from forebay.events.codec import encode
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import BlocksRemoved, BlocksStored
from forebay.events.metrics import LoadReported
from forebay.events.progress import FinishReason, FirstTokenEmitted, RequestFailed, RequestFinished
from forebay.events.snapshots import CHUNK_HASHES_MAX
from forebay.events.tokens import AnswerError, AttemptStarted, ResponseEnded, TokenChunk, TokensEmitted, Usage
from forebay.events.topics import KV_EVENTS, METRICS, PROGRESS, TOKENS, Topic
from forebay.transport.base import Draft
from forebay.workers.engine import EngineBatch

LOAD_INTERVAL_S = 0.1  # ten reports a second and rank are enough for routing


@dataclass(slots=True)
class Active:
    """A request under way: which attempt, on whose order, answered where.

    `said` counts the tokens of earlier attempts that this one goes on from; the engine has them as its prompt's end.
    """

    request_id: str
    attempt: int
    owner_epoch: int
    reply_slot: int
    said: int = 0


class Outbox:
    """Makes the records of one epoch of one worker. `partition` is that of the worker's group."""

    def __init__(self, spec: WorkerSpec, worker_epoch: int, partition: int) -> None:
        self._worker_id = spec.worker_id
        self._worker_epoch = worker_epoch
        self._partition = partition
        self._kv_seq = [0] * spec.dp_size
        self._load_at_s = [0.0] * spec.dp_size
        self._held: dict[int, Load] = {}

    def announcement(self, rank: int, hashes: Sequence[int]) -> list[Draft]:
        """What a rank's cache holds as its epoch begins."""
        return [
            self._cache_change(rank, Stored(None, tuple(hashes[start : start + CHUNK_HASHES_MAX])))
            for start in range(0, len(hashes), CHUNK_HASHES_MAX)
        ]

    def attempt_started(self, active: Active) -> Draft:
        """A later attempt begins: what earlier ones say after this is void."""
        event = AttemptStarted(
            request_id=active.request_id,
            attempt=active.attempt,
            owner_epoch=active.owner_epoch,
            worker_id=self._worker_id,
        )
        return _draft(TOKENS, active.reply_slot, event)

    def failure(self, active: Active, error: AnswerError) -> list[Draft]:
        """The end of a request that did not go well: to the client, then to the owner."""
        ended = ResponseEnded(
            request_id=active.request_id,
            attempt=active.attempt,
            owner_epoch=active.owner_epoch,
            finish_reason="error",
            error=error,
        )
        return [_draft(TOKENS, active.reply_slot, ended), self._failed(active, error.message)]

    def complete(self, active: Active, prompt_tokens: int) -> list[Draft]:
        """The end of a request whose earlier attempts said all it may say."""
        usage = Usage(prompt_tokens=prompt_tokens, output_tokens=active.said)
        return [self._ended(active, "length", usage), self._finished(active, "length", usage, _now_us())]

    def ended_before(self, active: Active, ended: ResponseEnded) -> list[Draft]:
        """What the owner did not hear: an earlier attempt gave the client the whole answer."""
        if ended.usage is None or ended.finish_reason == "error":
            message = "an earlier attempt ended" if ended.error is None else ended.error.message
            return [self._failed(active, message)]
        return [self._finished(active, ended.finish_reason, ended.usage, _now_us())]

    def batch(self, batch: EngineBatch, active: dict[str, Active]) -> list[Draft]:
        """All records of a batch. Requests that ended leave `active`; those not in it are left out."""
        at_us = _now_us()
        drafts = [self._cache_change(batch.rank, change) for change in batch.cache_changes]
        drafts += self._tokens(batch, active, at_us)
        progress: list[Draft] = []
        for first in batch.first_tokens:
            one = active.get(first.request_id)
            if one is not None and one.attempt == first.attempt:
                progress.append(self._began(one, first.cached_tokens, at_us))
        for end in batch.finished:
            one = active.get(end.request_id)
            if one is None or one.attempt != end.attempt:
                continue
            del active[end.request_id]
            usage = _usage(one, end)
            drafts.append(self._ended(one, end.reason, usage))
            progress.append(self._finished(one, end.reason, usage, at_us))
        drafts += progress
        for failed in batch.failed:
            one = active.get(failed.request_id)
            if one is not None and one.attempt == failed.attempt:
                del active[failed.request_id]
                drafts += self.failure(one, failed.error)
        return drafts + self._load(batch.rank, batch.load, at_us)

    def _ended(self, active: Active, reason: FinishReason, usage: Usage) -> Draft:
        event = ResponseEnded(
            request_id=active.request_id,
            attempt=active.attempt,
            owner_epoch=active.owner_epoch,
            finish_reason=reason,
            usage=usage,
        )
        return _draft(TOKENS, active.reply_slot, event)

    def _began(self, active: Active, cached_tokens: int, at_us: int) -> Draft:
        event = FirstTokenEmitted(
            request_id=active.request_id,
            attempt=active.attempt,
            worker_id=self._worker_id,
            worker_epoch=self._worker_epoch,
            owner_epoch=active.owner_epoch,
            at_us=at_us,
            cached_tokens=cached_tokens,
        )
        return _draft(PROGRESS, self._partition, event)

    def _finished(self, active: Active, reason: FinishReason, usage: Usage, at_us: int) -> Draft:
        event = RequestFinished(
            request_id=active.request_id,
            attempt=active.attempt,
            worker_id=self._worker_id,
            worker_epoch=self._worker_epoch,
            owner_epoch=active.owner_epoch,
            at_us=at_us,
            finish_reason=reason,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
        )
        return _draft(PROGRESS, self._partition, event)

    def _failed(self, active: Active, message: str) -> Draft:
        event = RequestFailed(
            request_id=active.request_id,
            attempt=active.attempt,
            worker_id=self._worker_id,
            worker_epoch=self._worker_epoch,
            owner_epoch=active.owner_epoch,
            at_us=_now_us(),
            error=message,
        )
        return _draft(PROGRESS, self._partition, event)

    def _cache_change(self, rank: int, change: CacheChange) -> Draft:
        self._kv_seq[rank] += 1
        seq = self._kv_seq[rank]
        event: Event
        match change:
            case Stored():
                event = BlocksStored(
                    worker_id=self._worker_id,
                    worker_epoch=self._worker_epoch,
                    seq=seq,
                    rank=rank,
                    sequence_hashes=pack_u64(change.hashes),
                    parent_hash=change.parent,
                )
            case Removed():
                event = BlocksRemoved(
                    worker_id=self._worker_id,
                    worker_epoch=self._worker_epoch,
                    seq=seq,
                    rank=rank,
                    sequence_hashes=pack_u64(change.hashes),
                )
        return _draft(KV_EVENTS, self._partition, event)

    def _tokens(self, batch: EngineBatch, active: dict[str, Active], at_us: int) -> list[Draft]:
        """One record for each reply slot, and owner while a new one takes over."""
        chunks: dict[tuple[int, int], list[TokenChunk]] = {}
        for said in batch.emitted:
            one = active.get(said.request_id)
            if one is None or one.attempt != said.attempt:
                continue
            chunk = TokenChunk(
                request_id=said.request_id,
                attempt=said.attempt,
                first_index=one.said + said.first_index,
                token_ids=said.token_ids,
            )
            chunks.setdefault((one.reply_slot, one.owner_epoch), []).append(chunk)
        return [
            _draft(
                TOKENS,
                reply_slot,
                TokensEmitted(
                    worker_id=self._worker_id,
                    worker_epoch=self._worker_epoch,
                    owner_epoch=owner_epoch,
                    chunks=tuple(of_slot),
                    rank=batch.rank,
                    at_us=at_us,
                ),
            )
            for (reply_slot, owner_epoch), of_slot in chunks.items()
        ]

    @property
    def holds_load(self) -> bool:
        """Whether a load is held back that `held_load` gives."""
        return bool(self._held)

    def held_load(self) -> list[Draft]:
        """The loads that came too soon after the ones before."""
        held, self._held = self._held, {}
        at_us = _now_us()
        return [draft for rank, load in held.items() for draft in self._report(rank, load, at_us)]

    def _load(self, rank: int, load: Load, at_us: int) -> list[Draft]:
        if time.monotonic() - self._load_at_s[rank] < LOAD_INTERVAL_S:
            self._held[rank] = load
            return []
        self._held.pop(rank, None)
        return self._report(rank, load, at_us)

    def _report(self, rank: int, load: Load, at_us: int) -> list[Draft]:
        self._load_at_s[rank] = time.monotonic()
        event = LoadReported(
            worker_id=self._worker_id,
            worker_epoch=self._worker_epoch,
            running=load.running,
            waiting=load.waiting,
            kv_blocks_used=load.kv_blocks_used,
            kv_blocks_total=load.kv_blocks_total,
            rank=rank,
            at_us=at_us,
        )
        return [_draft(METRICS, self._partition, event)]


def _usage(active: Active, end: Finished) -> Usage:
    """Of the whole answer, whoever said it: to the engine, what was said before is prompt."""
    prompt_tokens = end.prompt_tokens - active.said
    return Usage(
        prompt_tokens=prompt_tokens,
        output_tokens=active.said + end.output_tokens,
        cached_tokens=min(end.cached_tokens, prompt_tokens),
    )


def _draft(topic: Topic, partition: int, event: Event) -> Draft:
    return Draft(topic.name, partition, encode(topic, event))


def _now_us() -> int:
    return time.time_ns() // 1000
