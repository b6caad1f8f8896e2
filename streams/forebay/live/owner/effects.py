"""Encode the effects of journalled decisions: work and commands for workers, and responses from the owner itself."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, assert_never

import msgspec
from msgspec.structs import replace

from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.commands import PendingCommand
from forebay.core.state.fleet import Fleet
from forebay.events.codec import encode
from forebay.events.decisions import (
    AbortReason,
    AdapterPlaced,
    CacheResyncRequested,
    CommandEnded,
    CommandRefusal,
    CommandSent,
    CommandTarget,
    CostTerms,
    KvReleased,
    RejectReason,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import (
    CommandResponse,
    DestinationSelected,
    RequestLocated,
    ResponseEnded,
    ResponseError,
    RouteResponse,
)
from forebay.events.topics import TOKENS, work_topic
from forebay.events.trace_ids import attempt_context
from forebay.events.work import AnyWorkEvent, ReannounceCache, ReleaseKv, WorkCancelled, WorkerCommand, WorkItem
from forebay.transport.base import Draft

REJECTED: dict[RejectReason, tuple[int, str]] = {
    "no_workers": (503, "no_workers"),
    "wrong_model": (404, "model_not_found"),
    "duplicate_id": (409, "duplicate_request_id"),
    "overloaded": (503, "overloaded"),
    "busy": (503, "busy"),
    "queue_full": (429, "queue_full"),
    "pool_full": (429, "pool_full"),
    "unknown_worker": (400, "unknown_worker"),
    "contradictory_routing": (400, "contradictory_routing"),
    "no_eligible_worker": (503, "no_eligible_worker"),
    "policy_failed": (500, "policy_failed"),
}
ABORTED: dict[AbortReason, tuple[int, str]] = {
    "cancelled": (499, "cancelled"),
    "deadline": (504, "deadline_exceeded"),
    "queue_deadline": (504, "queue_deadline_exceeded"),
    "queue_timeout": (503, "queue_timeout"),
    "attempts_exhausted": (503, "workers_lost"),
    "encode_failed": (502, "encode_failed"),
    "prefill_failed": (502, "prefill_failed"),
    "prefill_refused": (400, "prefill_refused"),
    "worker_refused": (502, "engine_error"),
    "pinned_worker_lost": (503, "pinned_worker_lost"),
    "ingress_lost": (503, "ingress_lost"),
    "adapter_failed": (503, "adapter_not_loaded"),
}
# Message of a rejection if the task is the only condition of the request. It names no task if that is `generate`.
NO_TASK = re.compile(r"(no ready worker of the pool \S+) (can \w+)?")
COMMAND_REFUSED: dict[CommandRefusal, tuple[int, str]] = {
    "unknown_model": (404, "model_not_found"),
    "unknown_pool": (404, "unknown_pool"),
    "unknown_worker": (404, "unknown_worker"),
    "no_workers": (503, "no_workers"),
    "worker_not_ready": (503, "worker_not_ready"),
    "too_many_commands": (503, "too_many_commands"),
    "duplicate_id": (409, "duplicate_command_id"),
    "adapter_exists": (409, "adapter_exists"),
    "too_many_adapters": (409, "too_many_adapters"),
}


class WorkerAddress(NamedTuple):
    """Address of a worker incarnation. The work slot is its partition of the work topic."""

    group: str
    pool: str
    work_slot: int
    worker_id: str
    worker_epoch: int

    @property
    def names(self) -> dict[str, Any]:
        return {"group": self.group, "worker_id": self.worker_id, "worker_epoch": self.worker_epoch}

    def draft(self, event: AnyWorkEvent) -> Draft:
        topic = work_topic(self.pool)
        return Draft(topic.name, self.work_slot, encode(topic, event))


def encode_work(
    to: WorkerAddress,
    request: ActiveRequest,
    owner_epoch: int,
    submitted: RequestSubmitted,
    *,
    report_output: bool,
    store_blocks: int = 0,
) -> Draft:
    """Return the work item of a routed request, which a worker that already has it ignores.

    `store_blocks` is the result of `expected_blocks` for the decision, 0 if the decision is not at hand.
    """
    # An encode worker gets no prompt. A decode worker gets the media, in case it has to compute the prompt itself.
    stage = request.stage
    encodes = stage == "encode"
    encoded = request.encoded if stage in ("aggregated", "prefill") else None
    media = submitted.media
    if encoded is not None:
        media = tuple([replace(item, content=b"") for item in media])
    item = WorkItem(
        request_id=submitted.request_id,
        attempt=request.stage_attempt,
        owner_epoch=owner_epoch,
        rank=request.rank,
        token_ids=b"" if encodes else submitted.token_ids,
        sequence_hashes=b"" if encodes else submitted.sequence_hashes,
        reply_slot=submitted.reply_slot,
        sampling=submitted.sampling,
        reply_from=submitted.reply_from,
        lora_name=submitted.lora_name,
        cache_namespace=submitted.cache_namespace,
        priority=submitted.routing.priority,
        report_output=report_output,
        task=submitted.task,
        stage=stage,
        media=media,
        encoded=encoded,
        prefilled=request.prefilled if stage == "decode" else None,
        store_blocks=store_blocks,
        kv_pin_s=0 if encodes else submitted.kv_pin_s,
        reply_key=submitted.reply_key,
        endpoint=submitted.routing.endpoint,
        payload=submitted.payload,
        traceparent=attempt_context(submitted, request.submitted.offset, stage, request.stage_attempt),
        **to.names,
    )
    return to.draft(item)


def encode_destination(
    group: str,
    request: ActiveRequest,
    owner_epoch: int,
    fleet: Fleet,
    *,
    report_output: bool,
    decision: RequestRouted | None = None,
) -> Draft:
    """Return where a gateway sends a routed external request. A reader that has the attempt ignores it.

    `decision` is None if it is not at hand.
    """
    submitted, worker = request.submitted, fleet.get(request.worker_id)
    assert worker is not None, "a lost worker has no requests"
    endpoint, block_size = worker.spec.endpoint, worker.spec.block_size
    other = None if decision is None or decision.runner_up is None else fleet.get(decision.runner_up.worker_id)
    selected = DestinationSelected(
        request_id=submitted.request_id,
        attempt=request.attempt,
        owner_epoch=owner_epoch,
        worker_id=request.worker_id,
        worker_epoch=request.worker_epoch,
        rank=request.rank,
        endpoint=endpoint,
        fallback="" if other is None or other is worker else other.spec.endpoint,
        cached_tokens=0 if decision is None else decision.terms.device_overlap * block_size,
        report_every=block_size if report_output else 0,
        group=group,
        reply_key=submitted.reply_key,
    )
    return Draft(TOKENS.name, submitted.reply_slot, encode(TOKENS, selected))


def expected_blocks(terms: CostTerms) -> int:
    """Return how many leading blocks a rank has itself or in its shared store; 0 if it has none in its shared store."""
    overlap = terms.device_overlap + terms.host_overlap + terms.disk_overlap + terms.store_overlap
    return overlap if terms.store_overlap else 0


def encode_reannounce(to: WorkerAddress, owner_epoch: int, rank: int, above_seq: int) -> Draft:
    """Return an order to re-announce a rank's cache with sequence numbers above `above_seq`. Repeats are harmless."""
    return to.draft(ReannounceCache(owner_epoch=owner_epoch, rank=rank, above_seq=above_seq, **to.names))


def encode_commands(
    group: str, pending: PendingCommand, fleet: Fleet, owner_epoch: int, now_us: int
) -> Iterator[Draft]:
    """Yield a command for each worker whose outcome is pending. Workers run a repeated command only once."""
    for outcome in pending.outcomes.values():
        worker = fleet.get(outcome.worker_id)
        if outcome.status != "pending" or worker is None:
            continue
        to = WorkerAddress(group, outcome.pool, worker.slot, outcome.worker_id, outcome.worker_epoch)
        sent = WorkerCommand(
            command_id=pending.command_id,
            command=pending.command,
            owner_epoch=owner_epoch,
            timeout_us=max(0, pending.due_us - now_us),
            nonce=pending.nonce,
            **to.names,
        )
        yield to.draft(sent)


def encode_effects(
    group: str,
    decided: RequestHeld
    | RequestRejected
    | RequestRepeated
    | RequestAborted
    | KvReleased
    | RouteAnswered
    | CacheResyncRequested
    | CommandSent
    | CommandEnded
    | AdapterPlaced,
    partition: int = 0,
) -> list[Draft]:
    """Return the effects of any decision but `RequestRouted`. `partition` is the control partition of the group."""
    match decided:
        case RequestHeld() | AdapterPlaced():
            return []
        case CacheResyncRequested():
            to = address_of(group, decided)
            return [encode_reannounce(to, decided.owner_epoch, decided.rank, decided.found_seq)]
        case RouteAnswered():
            return [_encode_route_response(group, decided)]
        case CommandSent():
            return [] if decided.reason is None else [_encode_command_response(group, decided)]
        case CommandEnded():
            return [_encode_command_response(group, decided)]
        case RequestRejected():
            return [_encode_error(group, decided, 0, _rejection(decided.reason, decided.message))]
        case RequestRepeated():
            located = RequestLocated(
                request_id=decided.request_id,
                partition=partition,
                offset=decided.offset,
                owner_epoch=decided.owner_epoch,
                group=group,
                reply_key=decided.reply_key,
            )
            return [Draft(TOKENS.name, decided.reply_slot, encode(TOKENS, located))]
        case RequestAborted():
            drafts = []
            if decided.worker_id:
                to = address_of(group, decided)
                drafts.append(_encode_end(WorkCancelled, to, decided))
            if decided.holder is not None:
                drafts.append(_encode_end(WorkCancelled, address_of(group, decided.holder), decided))
            status, code = ABORTED[decided.reason]
            error = ResponseError(
                status=decided.status or status,
                code=decided.code or code,
                message=decided.message,
                retry_after_s=decided.retry_after_s,
            )
            drafts.append(_encode_error(group, decided, decided.attempt, error))
            return drafts
        case KvReleased():
            return [_encode_end(ReleaseKv, address_of(group, decided.holder), decided)]
        case _:
            assert_never(decided)


def address_of(
    group: str, target: CommandTarget | CacheResyncRequested | RequestAborted | RequestRouted
) -> WorkerAddress:
    return WorkerAddress(group, target.pool, target.slot, target.worker_id, target.worker_epoch)


def _encode_end(
    kind: type[WorkCancelled | ReleaseKv], to: WorkerAddress, decided: RequestAborted | KvReleased
) -> Draft:
    ended = kind(request_id=decided.request_id, attempt=decided.attempt, owner_epoch=decided.owner_epoch, **to.names)
    return to.draft(ended)


def _encode_route_response(group: str, decided: RouteAnswered) -> Draft:
    error = None if decided.reason is None else _rejection(decided.reason, decided.message)
    answered = msgspec.convert(decided, RouteResponse, from_attributes=True)
    response = msgspec.structs.replace(answered, error=error, group=group)
    return Draft(TOKENS.name, decided.reply_slot, encode(TOKENS, response))


def _encode_command_response(group: str, decided: CommandSent | CommandEnded) -> Draft:
    response = CommandResponse(
        command_id=decided.command_id, owner_epoch=decided.owner_epoch, group=group, reply_key=decided.reply_key
    )
    if isinstance(decided, CommandEnded):
        response = msgspec.structs.replace(response, outcomes=decided.outcomes, placed=decided.placed)
    elif decided.reason is not None:
        status, code = COMMAND_REFUSED[decided.reason]
        error = ResponseError(status=status, code=code, message=decided.message)
        response = msgspec.structs.replace(response, error=error)
    return Draft(TOKENS.name, decided.reply_slot, encode(TOKENS, response))


def _rejection(reason: RejectReason, message: str) -> ResponseError:
    """Return the error of a rejected request. A task that no ready worker can do is the client's error."""
    status, code = REJECTED[reason]
    if reason == "no_eligible_worker" and (found := NO_TASK.fullmatch(message)):
        status, code, message = 400, "unsupported_task", f"{found[1]} {found[2] or 'can generate'}; use another model"
    return ResponseError(status=status, code=code, message=message)


def _encode_error(group: str, decided: RequestRejected | RequestAborted, attempt: int, error: ResponseError) -> Draft:
    ended = ResponseEnded(
        request_id=decided.request_id,
        attempt=attempt,
        owner_epoch=decided.owner_epoch,
        finish_reason="cancelled" if error.code == "cancelled" else "error",
        error=error,
        group=group,
        reply_key=decided.reply_key,
    )
    return Draft(TOKENS.name, decided.reply_slot, encode(TOKENS, ended))
