"""What an engine's batch means on the log: the records to append, in their order. No I/O here.

Cache changes come first, then tokens and ends, then progress: who reads that a request is over finds its
blocks and its answer before that.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from forebay.engine_model.model import Emitted, EngineLoad, Finished, FirstTokenStep
from forebay.events.base import U32_BYTES, Event
from forebay.events.codec import encode
from forebay.events.control import Command
from forebay.events.decisions import Stage
from forebay.events.fleet import WorkerSpec
from forebay.events.metrics import LoadReported
from forebay.events.progress import (
    CommandDone,
    CommandRefused,
    EncodeFailed,
    EncodeFinished,
    FinishReason,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    ProgressEvent,
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.events.tokens import (
    AttemptStarted,
    Embedded,
    PrefilledBy,
    ResponseEnded,
    ResponseError,
    TokenChunk,
    TokensEmitted,
    Usage,
)
from forebay.events.topics import METRICS, PROGRESS, TOKENS, Topic
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.transport.base import Draft
from forebay.workers.engine import EngineBatch, Failed, MediaEncoded, NotFetched, PromptPrefilled
from forebay.workers.runtime.cache_events import CacheEvents

REQUEST_ERROR, STATUS_MAX = 400, 599
SERVER_ERROR = 500  # from here on an HTTP status says that nothing is wrong with the request
ERROR_CHARS_MAX = 500  # of what the owner is told, and may tell the client
CODE_CHARS_MAX = 256
LOAD_INTERVAL_S = 0.1  # ten reports a second and rank are enough for routing


@dataclass(slots=True)
class Active:
    """A request under way: which attempt, on whose order, answered where.

    `said` counts the tokens of earlier attempts that this one goes on from; the engine has them as its prompt's end.
    `blocks` is how many KV blocks of prompt and output the owner knows of, 0 when it does not want to know.
    `fetched` is whose KV this one goes on from, unless that is not wanted any more (`unfetched`); `began` is whether
    its first token was said.
    """

    request_id: str
    attempt: int
    owner_epoch: int
    reply_slot: int
    rank: int = 0
    stage: Stage = "aggregated"
    said: int = 0
    prompt_tokens: int = 0
    blocks: int = 0
    fetched: Prefilled | None = None
    unfetched: bool = False
    began: bool = False


class Outbox:
    """Makes the records of one epoch of one worker. `partition` is that of the worker's `group`."""

    def __init__(self, spec: WorkerSpec, worker_epoch: int, group: str, partition: int) -> None:
        self._group = group
        self._worker_id = spec.worker_id
        self._worker_epoch = worker_epoch
        self._partition = partition
        self._block_size = spec.block_size
        self.cache = CacheEvents(spec, worker_epoch, partition)
        self._load_at_s = dict.fromkeys(spec.ranks, 0.0)
        self._held: dict[int, EngineLoad] = {}

    def active(self, item: WorkItem) -> Active:
        """A request that begins."""
        prompt_tokens = len(item.token_ids) // U32_BYTES
        blocks = self._blocks(prompt_tokens) if item.report_output else 0
        return Active(
            item.request_id,
            item.attempt,
            item.owner_epoch,
            item.reply_slot,
            item.rank,
            item.stage,
            prompt_tokens=prompt_tokens,
            blocks=blocks,
            fetched=item.prefilled,
        )

    def attempt_started(self, active: Active) -> Draft:
        """A later attempt begins: what earlier ones say after this is void."""
        event = AttemptStarted(
            request_id=active.request_id,
            attempt=active.attempt,
            owner_epoch=active.owner_epoch,
            worker_id=self._worker_id,
            group=self._group,
        )
        return _draft(TOKENS, active.reply_slot, event)

    def failure(self, active: Active, error: ResponseError) -> list[Draft]:
        """The end of a request that did not go well: to the client, then to the owner.

        Why its prompt is not computed here is for the owner alone; likewise that it could not be encoded here, with
        nothing wrong with the request.
        """
        if active.stage == "prefill":
            status = error.status if REQUEST_ERROR <= error.status <= STATUS_MAX else SERVER_ERROR
            message, code = error.message[:ERROR_CHARS_MAX], error.code[:CODE_CHARS_MAX]
            return [self._for_owner(PrefillFailed, active, error=message, status=status, code=code)]
        if active.stage == "encode" and error.status >= SERVER_ERROR:
            return [self._for_owner(EncodeFailed, active, error=error.message[:ERROR_CHARS_MAX])]
        ended = ResponseEnded(
            request_id=active.request_id,
            attempt=active.attempt,
            owner_epoch=active.owner_epoch,
            finish_reason="error",
            error=error,
            group=self._group,
        )
        return [_draft(TOKENS, active.reply_slot, ended), self._failed(active, error.message)]

    def not_fetched(self, active: Active, error: str) -> list[Draft]:
        """Embeddings or KV could not be had: it ends here, and the owner has them made anew."""
        return [self._for_owner(TransferFailed, active, error=error[:ERROR_CHARS_MAX])]

    def prefilled(self, active: Active, prefilled: Prefilled, cached_tokens: int) -> Draft:
        """A prompt is computed, and its KV kept."""
        kept = msgspec.structs.replace(prefilled, cached_tokens=cached_tokens, rank=active.rank)
        return self._for_owner(PrefillFinished, active, prefilled=kept)

    def complete(self, active: Active) -> list[Draft]:
        """The end of a request whose earlier attempts said all it may say."""
        usage = Usage(prompt_tokens=active.prompt_tokens, output_tokens=active.said)
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
        drafts = self.cache.changes(batch.rank, batch.cache_changes)
        drafts += self._tokens(batch, active, at_us)
        drafts += self._vectors(batch, active)
        progress: list[Draft] = []
        for first in batch.first_tokens:
            one = active.get(first.request_id)
            if one is not None and one.attempt == first.attempt:
                one.began = True
                progress.append(self._began(one, first, at_us))
        for end in batch.finished:
            one = active.get(end.request_id)
            if one is None or one.attempt != end.attempt:
                continue
            del active[end.request_id]
            usage = _usage(one, end)
            drafts.append(self._ended(one, end.reason, usage))
            progress.append(self._finished(one, end.reason, usage, at_us))
        drafts += progress
        drafts += self._parts(batch, active)
        drafts += self._grown(batch.emitted, active, at_us)
        return drafts + self._load(batch.rank, batch.load, at_us)

    def _parts(self, batch: EngineBatch, active: dict[str, Active]) -> list[Draft]:
        """Of requests whose part here is done, or ended badly."""
        drafts = [
            self._for_owner(EncodeFinished, one, encoded=encoded.encoded)
            for encoded in batch.encoded
            if (one := _taken(active, encoded)) is not None
        ]
        drafts += [
            self.prefilled(one, prompt.prefilled, prompt.cached_tokens)
            for prompt in batch.prefilled
            if (one := _taken(active, prompt)) is not None
        ]
        for lost in batch.not_fetched:
            if (one := _taken(active, lost)) is not None:
                drafts += self.not_fetched(one, lost.error)
        for failed in batch.failed:
            if (one := _taken(active, failed)) is not None:
                drafts += self.failure(one, failed.error)
        return drafts

    def command_answer(
        self, command_id: str, command: Command, owner_epoch: int, loras: tuple[str, ...], error: str | None
    ) -> Draft:
        """What came of a command: the adapters that are loaded now, or why it was not done."""
        fields: dict[str, Any] = {
            "command_id": command_id,
            "action": command.action,
            "worker_id": self._worker_id,
            "worker_epoch": self._worker_epoch,
            "owner_epoch": owner_epoch,
            "at_us": _now_us(),
        }
        answer = CommandDone(**fields, loras=loras) if error is None else CommandRefused(**fields, error=error)
        return _draft(PROGRESS, self._partition, answer)

    def _for_owner(self, kind: type[ProgressEvent], active: Active, **fields: Any) -> Draft:
        event = kind(
            request_id=active.request_id,
            attempt=active.attempt,
            worker_id=self._worker_id,
            worker_epoch=self._worker_epoch,
            owner_epoch=active.owner_epoch,
            at_us=_now_us(),
            **fields,
        )
        return _draft(PROGRESS, self._partition, event)

    def _ended(self, active: Active, reason: FinishReason, usage: Usage) -> Draft:
        event = ResponseEnded(
            request_id=active.request_id,
            attempt=active.attempt,
            owner_epoch=active.owner_epoch,
            finish_reason=reason,
            usage=usage,
            group=self._group,
        )
        return _draft(TOKENS, active.reply_slot, event)

    def _began(self, active: Active, first: FirstTokenStep, at_us: int) -> Draft:
        event = FirstTokenEmitted(
            request_id=active.request_id,
            attempt=active.attempt,
            worker_id=self._worker_id,
            worker_epoch=self._worker_epoch,
            owner_epoch=active.owner_epoch,
            at_us=at_us,
            cached_tokens=first.cached_tokens,
            transferred_bytes=first.transferred_bytes,
            transfer_us=first.transfer_us,
            unfetched=active.unfetched,
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

    def _grown(self, emitted: Sequence[Emitted], active: dict[str, Active], at_us: int) -> list[Draft]:
        """Of requests that go on: their output reached another KV block. What is over has no use for it."""
        drafts: list[Draft] = []
        for said in emitted:
            one = active.get(said.request_id)
            if one is None or not one.blocks or one.attempt != said.attempt:
                continue
            output_tokens = one.said + said.first_index + len(said.token_ids) // U32_BYTES
            blocks = self._blocks(one.prompt_tokens + output_tokens)
            if blocks > one.blocks:
                one.blocks = blocks
                event = OutputGrown(
                    request_id=one.request_id,
                    attempt=one.attempt,
                    worker_id=self._worker_id,
                    worker_epoch=self._worker_epoch,
                    owner_epoch=one.owner_epoch,
                    at_us=at_us,
                    output_tokens=output_tokens,
                )
                drafts.append(_draft(PROGRESS, self._partition, event))
        return drafts

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

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
                logprobs=said.logprobs,
                prefilled=None if one.fetched is None or said.first_index else _prefilled_by(one.fetched, said, batch),
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
                    group=self._group,
                ),
            )
            for (reply_slot, owner_epoch), of_slot in chunks.items()
        ]

    def _vectors(self, batch: EngineBatch, active: dict[str, Active]) -> list[Draft]:
        drafts: list[Draft] = []
        for vector in batch.vectors:
            one = active.get(vector.request_id)
            if one is None or one.attempt != vector.attempt:
                continue
            event = Embedded(
                request_id=one.request_id,
                attempt=one.attempt,
                owner_epoch=one.owner_epoch,
                worker_id=self._worker_id,
                vector=vector.packed,
                rank=batch.rank,
                group=self._group,
            )
            drafts.append(_draft(TOKENS, one.reply_slot, event))
        return drafts

    @property
    def holds_load(self) -> bool:
        """Whether a load is held back that `held_load` gives."""
        return bool(self._held)

    def held_load(self) -> list[Draft]:
        """The loads that came too soon after the ones before."""
        held, self._held = self._held, {}
        at_us = _now_us()
        return [draft for rank, load in held.items() for draft in self._report(rank, load, at_us)]

    def _load(self, rank: int, load: EngineLoad, at_us: int) -> list[Draft]:
        if time.monotonic() - self._load_at_s[rank] < LOAD_INTERVAL_S:
            self._held[rank] = load
            return []
        self._held.pop(rank, None)
        return self._report(rank, load, at_us)

    def _report(self, rank: int, load: EngineLoad, at_us: int) -> list[Draft]:
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
    """Of the whole answer, whoever said it: to the engine, what was said before is prompt.

    What was fetched from a prefill worker was cached as far as that had it in its cache.
    """
    prompt_tokens = end.prompt_tokens - active.said
    cached_tokens = end.cached_tokens if active.fetched is None else active.fetched.cached_tokens
    return Usage(
        prompt_tokens=prompt_tokens,
        output_tokens=active.said + end.output_tokens,
        cached_tokens=min(cached_tokens, prompt_tokens),
    )


def _prefilled_by(kept: Prefilled, said: Emitted, batch: EngineBatch) -> PrefilledBy:
    """Whose KV the first tokens of an answer follow."""
    for first in batch.first_tokens:
        if (first.request_id, first.attempt) == (said.request_id, said.attempt):
            return PrefilledBy(
                worker_id=kept.worker_id,
                rank=kept.rank,
                transferred_bytes=first.transferred_bytes,
                transfer_us=first.transfer_us,
            )
    return PrefilledBy(worker_id=kept.worker_id, rank=kept.rank)


def _taken(active: dict[str, Active], said: MediaEncoded | PromptPrefilled | NotFetched | Failed) -> Active | None:
    """Whose end is said, taken out of `active`; None if it is not there in that attempt."""
    one = active.get(said.request_id)
    return active.pop(said.request_id) if one is not None and one.attempt == said.attempt else None


def _draft(topic: Topic, partition: int, event: Event) -> Draft:
    return Draft(topic.name, partition, encode(topic, event))


def _now_us() -> int:
    return time.time_ns() // 1000
