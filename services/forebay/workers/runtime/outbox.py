"""Encode the output of an engine as log records. Performs no I/O.

Of the records of one engine batch, `append_output` appends tokens and ends of responses first, and all others, such as
changes of the cache and progress events, once these are durable.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from forebay import runtime
from forebay.engine_model.model import Emitted, EngineLoad, Finished, FirstTokenStep
from forebay.events.base import U32_BYTES, Event
from forebay.events.codec import encode
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.metrics import LoadReported
from forebay.events.progress import (
    AttemptRejected,
    CommandDone,
    CommandRefused,
    EncodeFailed,
    EncodeFinished,
    FinishReason,
    FirstTokenEmitted,
    OnboardedTokens,
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
from forebay.transport.base import Draft, Log
from forebay.workers.engine import EngineBatch
from forebay.workers.runtime.cache_events import CacheEvents, CostReports, StoreEvents
from forebay.workers.runtime.request_table import RequestTable, WorkRequest, WorkState, WorkTransition

REQUEST_ERROR, STATUS_MAX = 400, 599
SERVER_ERROR = 500  # errors with this HTTP status or above are not the fault of the request
ERROR_CHARS_MAX = 500  # limits of error texts sent to the owner, which may forward them to the client
CODE_CHARS_MAX = 256
LOAD_INTERVAL_S = 0.1  # per rank; ten reports a second are enough for routing


class Outbox:
    """Encodes the records that a worker appends during one worker epoch.

    An event whose type has a later version than `owner_events`, which the worker sets when the owner changes, is
    written only if `may_write` allows it. `partition` is that of the control topics of the group.
    """

    def __init__(self, spec: WorkerSpec, worker_epoch: int, group: str, partition: int, owner_events: int = 1) -> None:
        self.owner_events = owner_events
        self._group = group
        self._worker_id = spec.worker_id
        self._worker_epoch = worker_epoch
        self._partition = partition
        self._block_size = spec.block_size
        self.cache = CacheEvents(spec, worker_epoch, partition)
        self.store = StoreEvents(spec, partition)
        self._costs = CostReports(spec, worker_epoch, partition)
        self._load_at_s = dict.fromkeys(spec.ranks, 0.0)
        self._held: dict[int, EngineLoad] = {}

    def request(self, item: WorkItem) -> WorkRequest:
        prompt_tokens = len(item.token_ids) // U32_BYTES
        return WorkRequest(
            item.request_id,
            item.attempt,
            item.owner_epoch,
            item.reply_slot,
            item.rank,
            item.stage,
            prompt_tokens=prompt_tokens,
            blocks=self._blocks(prompt_tokens) if item.report_output else 0,
            fetched=item.prefilled,
            reply_key=item.reply_key,
        )

    def attempt_started(self, request: WorkRequest) -> Draft:
        """Return the record that begins a later attempt. After it, readers ignore output of earlier attempts."""
        event = AttemptStarted(
            request_id=request.request_id,
            attempt=request.attempt,
            owner_epoch=request.owner_epoch,
            worker_id=self._worker_id,
            group=self._group,
            reply_key=request.reply_key,
        )
        return _draft(TOKENS, request.reply_slot, event)

    def failure(self, request: WorkRequest, error: ResponseError, *, is_rejection: bool = False) -> list[Draft]:
        """Return the records of a failed request: the end of the response for the client, then the event for the owner.

        If the attempt was rejected, if the prefill stage fails, or if the encode stage fails with a server error, only
        the owner gets a record, because it can send the request to another worker.
        """
        message, status, code = error.message[:ERROR_CHARS_MAX], error.status, error.code[:CODE_CHARS_MAX]
        if is_rejection:
            fields = {"error": message, "status": status, "code": code, "retry_after_s": error.retry_after_s}
            return [self._progress(AttemptRejected, request, **fields)]
        if request.stage == "prefill":
            status = status if REQUEST_ERROR <= status <= STATUS_MAX else SERVER_ERROR
            return [self._progress(PrefillFailed, request, error=message, status=status, code=code)]
        if request.stage == "encode" and status >= SERVER_ERROR:
            return [self._progress(EncodeFailed, request, error=message)]
        return [self._ended(request, "error", error=error), self._progress(RequestFailed, request, error=error.message)]

    def not_fetched(self, request: WorkRequest, error: str) -> list[Draft]:
        """Return the record that a fetch of embeddings or KV failed, so that the owner lets them be computed again."""
        return [self._progress(TransferFailed, request, error=error[:ERROR_CHARS_MAX])]

    def prefilled(
        self,
        request: WorkRequest,
        prefilled: Prefilled,
        cached_tokens: int,
        onboarded: tuple[OnboardedTokens, ...] = (),
    ) -> Draft:
        """Return the record that the prompt of a request was computed, and that the worker keeps its KV for another."""
        kept = msgspec.structs.replace(prefilled, cached_tokens=cached_tokens, rank=request.rank)
        return self._progress(PrefillFinished, request, prefilled=kept, onboarded=onboarded)

    def complete(self, request: WorkRequest) -> list[Draft]:
        """Return the records that end a request whose earlier attempts have already generated `max_tokens` tokens."""
        usage = Usage(prompt_tokens=request.prompt_tokens, output_tokens=request.earlier_tokens)
        return [self._ended(request, "length", usage=usage), self._finished(request, "length", usage)]

    def ended_before(self, request: WorkRequest, ended: ResponseEnded) -> list[Draft]:
        """Return the progress record for a response that an earlier attempt has completed, unknown to the owner."""
        if ended.usage is None or ended.finish_reason == "error":
            message = "an earlier attempt failed" if ended.error is None else ended.error.message
            return [self._progress(RequestFailed, request, error=message)]
        return [self._finished(request, ended.finish_reason, ended.usage)]

    def batch(self, batch: EngineBatch, requests: RequestTable) -> list[Draft]:
        """Return the records for one engine batch, none for stale attempts, and apply its transitions to `requests`."""
        at_us = runtime.wall_us()
        drafts = self.cache.changes(batch.rank, batch.cache_changes)
        if batch.store_changes:
            drafts += self.store.changes(batch.store_changes)
        if batch.tier_costs is not None:
            drafts += self._costs.report(batch.rank, batch.tier_costs, at_us)
        drafts += self._tokens(batch, requests, at_us)
        drafts += self._vectors(batch, requests)
        progress = [
            self._began(one, first)
            for first in batch.first_tokens
            if (one := requests.move(first.request_id, WorkTransition.FIRST_TOKEN, first.attempt)) is not None
        ]
        for end in batch.finished:
            if (one := requests.move(end.request_id, WorkTransition.END, end.attempt)) is not None:
                usage = _usage(one, end)
                drafts.append(self._ended(one, end.reason, usage=usage, filtered=end.filtered))
                progress.append(self._finished(one, end.reason, usage))
        drafts += progress
        drafts += self._stage_ends(batch, requests)
        drafts += self._grown(batch.emitted, requests)
        return drafts + self._load(batch.rank, batch.load, at_us)

    def _stage_ends(self, batch: EngineBatch, requests: RequestTable) -> list[Draft]:
        drafts = [
            self._progress(EncodeFinished, one, encoded=encoded.encoded, cached=encoded.cached)
            for encoded in batch.encoded
            if (one := requests.move(encoded.request_id, WorkTransition.END, encoded.attempt)) is not None
        ]
        drafts += [
            self.prefilled(one, prompt.prefilled, prompt.cached_tokens, prompt.onboarded)
            for prompt in batch.prefilled
            if (one := requests.move(prompt.request_id, WorkTransition.KEEP, prompt.attempt)) is not None
        ]
        for lost in batch.not_fetched:
            if (one := requests.move(lost.request_id, WorkTransition.END, lost.attempt)) is not None:
                drafts += self.not_fetched(one, lost.error)
        for failed in batch.failed:
            known = requests.find(failed.request_id, failed.attempt)
            is_rejection = failed.is_rejection and known is not None and known.state is WorkState.RUNNING
            if (one := requests.move(failed.request_id, WorkTransition.END, failed.attempt)) is not None:
                drafts += self.failure(one, failed.error, is_rejection=is_rejection)
        return drafts

    def command_result(
        self,
        command_id: str,
        command: Command,
        owner_epoch: int,
        loras: tuple[str, ...],
        error: str | None,
        lora_digest: str = "",
    ) -> Draft:
        """Return the record with the result of a command. `loras` are loaded after it; `error` is None on success."""
        fields: dict[str, Any] = {
            "command_id": command_id,
            "action": command.action,
            "worker_id": self._worker_id,
            "worker_epoch": self._worker_epoch,
            "owner_epoch": owner_epoch,
            "at_us": runtime.wall_us(),
        }
        if error is not None:
            return _draft(PROGRESS, self._partition, CommandRefused(**fields, error=error))
        return _draft(PROGRESS, self._partition, CommandDone(**fields, loras=loras, lora_digest=lora_digest))

    def _progress(self, kind: type[ProgressEvent], request: WorkRequest, **fields: Any) -> Draft:
        event = kind(
            request_id=request.request_id,
            attempt=request.attempt,
            worker_id=self._worker_id,
            worker_epoch=self._worker_epoch,
            owner_epoch=request.owner_epoch,
            at_us=runtime.wall_us(),
            **fields,
        )
        return _draft(PROGRESS, self._partition, event)

    def _ended(self, request: WorkRequest, reason: FinishReason | Literal["error"], **fields: Any) -> Draft:
        event = ResponseEnded(
            request_id=request.request_id,
            attempt=request.attempt,
            owner_epoch=request.owner_epoch,
            finish_reason=reason,
            group=self._group,
            reply_key=request.reply_key,
            **fields,
        )
        return _draft(TOKENS, request.reply_slot, event)

    def _began(self, request: WorkRequest, first: FirstTokenStep) -> Draft:
        return self._progress(
            FirstTokenEmitted,
            request,
            cached_tokens=first.cached_tokens,
            transferred_bytes=first.transferred_bytes,
            transfer_us=first.transfer_us,
            unfetched=request.unfetched,
            onboarded=first.onboarded,
        )

    def _finished(self, request: WorkRequest, reason: FinishReason, usage: Usage) -> Draft:
        return self._progress(
            RequestFinished,
            request,
            finish_reason=reason,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
        )

    def _grown(self, emitted: Sequence[Emitted], requests: RequestTable) -> list[Draft]:
        """Return records for requests in flight whose output has reached another KV block."""
        drafts: list[Draft] = []
        for output in emitted:
            one = requests.find(output.request_id, output.attempt)
            if one is None or not one.blocks:
                continue
            output_tokens = one.earlier_tokens + output.first_index + len(output.token_ids) // U32_BYTES
            blocks = self._blocks(one.prompt_tokens + output_tokens)
            if blocks > one.blocks:
                one.blocks = blocks
                drafts.append(self._progress(OutputGrown, one, output_tokens=output_tokens))
        return drafts

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _tokens(self, batch: EngineBatch, requests: RequestTable, at_us: int) -> list[Draft]:
        """Return one record per reply slot, and per owner epoch during a takeover."""
        chunks: dict[tuple[int, int], list[TokenChunk]] = {}
        for output in batch.emitted:
            if (one := requests.find(output.request_id, output.attempt)) is None:
                continue
            chunk = TokenChunk(
                request_id=output.request_id,
                attempt=output.attempt,
                first_index=one.earlier_tokens + output.first_index,
                token_ids=output.token_ids,
                logprobs=output.logprobs,
                text_only=output.text_only,
                objects=output.objects,
                reply_key=one.reply_key,
                prefilled=None
                if one.fetched is None or output.first_index
                else _prefilled_by(one.fetched, output, batch),
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

    def _vectors(self, batch: EngineBatch, requests: RequestTable) -> list[Draft]:
        drafts: list[Draft] = []
        for vector in batch.vectors:
            if (one := requests.find(vector.request_id, vector.attempt)) is None:
                continue
            event = Embedded(
                request_id=one.request_id,
                attempt=one.attempt,
                owner_epoch=one.owner_epoch,
                worker_id=self._worker_id,
                vector=vector.packed,
                rank=batch.rank,
                group=self._group,
                reply_key=one.reply_key,
            )
            drafts.append(_draft(TOKENS, one.reply_slot, event))
        return drafts

    @property
    def holds_load(self) -> bool:
        """Whether a load report was delayed by the rate limit and has not been returned by `held_load`."""
        return bool(self._held)

    def held_load(self) -> list[Draft]:
        """Return the delayed load reports: the latest load of each rank whose report the rate limit delayed."""
        held, self._held = self._held, {}
        at_us = runtime.wall_us()
        return [draft for rank, load in held.items() for draft in self._report(rank, load, at_us)]

    def _load(self, rank: int, load: EngineLoad, at_us: int) -> list[Draft]:
        if runtime.monotonic_s() - self._load_at_s[rank] < LOAD_INTERVAL_S:
            self._held[rank] = load
            return []
        self._held.pop(rank, None)
        return self._report(rank, load, at_us)

    def _report(self, rank: int, load: EngineLoad, at_us: int) -> list[Draft]:
        self._load_at_s[rank] = runtime.monotonic_s()
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


def _usage(request: WorkRequest, end: Finished) -> Usage:
    """Return the token counts of the whole response. Output of earlier attempts counts as output.

    The engine counts that output as part of its prompt. If the KV of the prompt was fetched, `cached_tokens` is the
    value of the prefill worker.
    """
    prompt_tokens = end.prompt_tokens - request.earlier_tokens
    cached_tokens = end.cached_tokens if request.fetched is None else request.fetched.cached_tokens
    return Usage(
        prompt_tokens=prompt_tokens,
        output_tokens=request.earlier_tokens + end.output_tokens,
        cached_tokens=min(cached_tokens, prompt_tokens),
    )


def _prefilled_by(kept: Prefilled, output: Emitted, batch: EngineBatch) -> PrefilledBy:
    """Return the prefill worker whose KV precedes the first output tokens."""
    for first in batch.first_tokens:
        if (first.request_id, first.attempt) == (output.request_id, output.attempt):
            return PrefilledBy(
                worker_id=kept.worker_id,
                rank=kept.rank,
                transferred_bytes=first.transferred_bytes,
                transfer_us=first.transfer_us,
            )
    return PrefilledBy(worker_id=kept.worker_id, rank=kept.rank)


def _draft(topic: Topic, partition: int, event: Event) -> Draft:
    return Draft(topic.name, partition, encode(topic, event))


def append_output(log: Log, drafts: Sequence[Draft]) -> None:
    """Append records without waiting. Those on other topics follow those on `tokens` once these are durable.

    On Kafka each partition acknowledges its records independently. If a worker died after the owner had read the end of
    a request on `progress`, but before its last tokens were durable, nobody would continue the response, and its client
    would wait until the deadline. Changes of the cache and load reports could be appended at once. They follow, too, so
    that they share a request with `progress`. Raises LogError if the log has failed.
    """
    tokens = [draft for draft in drafts if draft.topic == TOKENS.name]
    others = [draft for draft in drafts if draft.topic != TOKENS.name]
    log.append_soon(tokens, then=others)
