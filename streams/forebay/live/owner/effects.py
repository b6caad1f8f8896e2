"""What a journalled decision makes happen: work and commands for workers, and answers that no worker will give."""

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
    CacheResyncRequested,
    CommandEnded,
    CommandRefusal,
    CommandSent,
    CommandTarget,
    KvReleased,
    RejectReason,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
    Stage,
)
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import CommandResponse, ResponseEnded, ResponseError, RouteResponse
from forebay.events.topics import TOKENS, work_topic
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
    "pinned_worker_lost": (503, "pinned_worker_lost"),
    "ingress_lost": (503, "ingress_lost"),
}
UNSENDABLE: dict[CommandRefusal, tuple[int, str]] = {
    "unknown_model": (404, "model_not_found"),
    "unknown_pool": (404, "unknown_pool"),
    "unknown_worker": (404, "unknown_worker"),
    "no_workers": (503, "no_workers"),
    "worker_not_ready": (503, "worker_not_ready"),
    "too_many_commands": (503, "too_many_commands"),
    "duplicate_id": (409, "duplicate_command_id"),
}


class Address(NamedTuple):
    """The worker that an effect is for: its group, the place of its slot, its id and its epoch."""

    group: str
    pool: str
    slot: int
    worker_id: str
    worker_epoch: int

    @property
    def names(self) -> dict[str, Any]:
        """The fields by which a worker recognises what is addressed to it."""
        return {"group": self.group, "worker_id": self.worker_id, "worker_epoch": self.worker_epoch}

    def draft(self, event: AnyWorkEvent) -> Draft:
        """Return the record for the slot of the worker."""
        topic = work_topic(self.pool)
        return Draft(topic.name, self.slot, encode(topic, event))


def work_item(
    group: str, decided: RequestRouted, submitted: RequestSubmitted, request: ActiveRequest, *, report_output: bool
) -> Draft:
    """The work of a routed request, on the partition of its worker's slot; `request` says where its parts lie."""
    to = Address(group, decided.pool, decided.slot, decided.worker_id, decided.worker_epoch)
    order = _Order(decided.rank, decided.owner_epoch, decided.stage, decided.attempt)
    return _work(to, submitted, order, request, report_output=report_output)


def work_again(
    to: Address, request: ActiveRequest, owner_epoch: int, submitted: RequestSubmitted, *, report_output: bool
) -> Draft:
    """The work of a request that an earlier owner routed; a worker that has it already ignores it."""
    order = _Order(request.rank, owner_epoch, request.stage, request.stage_attempt)
    return _work(to, submitted, order, request, report_output=report_output)


def reannounce(to: Address, owner_epoch: int, rank: int, above_seq: int) -> Draft:
    """Have a worker say anew what one of its ranks has cached; saying it twice is harmless."""
    return to.draft(ReannounceCache(owner_epoch=owner_epoch, rank=rank, above_seq=above_seq, **to.names))


def worker_commands(
    group: str, pending: PendingCommand, fleet: Fleet, owner_epoch: int, now_us: int
) -> Iterator[Draft]:
    """A command to every worker that has it pending; one that has it already answers once, and again if it did."""
    for outcome in pending.outcomes.values():
        worker = fleet.get(outcome.worker_id)
        if outcome.status != "pending" or worker is None:
            continue
        to = Address(group, outcome.pool, worker.slot, outcome.worker_id, outcome.worker_epoch)
        sent = WorkerCommand(
            command_id=pending.command_id,
            command=pending.command,
            owner_epoch=owner_epoch,
            timeout_us=max(0, pending.due_us - now_us),
            nonce=pending.nonce,
            **to.names,
        )
        yield to.draft(sent)


def answers(
    group: str,
    decided: RequestHeld
    | RequestRejected
    | RequestAborted
    | KvReleased
    | RouteAnswered
    | CacheResyncRequested
    | CommandSent
    | CommandEnded,
) -> list[Draft]:
    """What a decision of a group that gives no work makes happen, for its client and for a worker that is concerned."""
    match decided:
        case RequestHeld():
            return []
        case CacheResyncRequested():
            to = Address(group, decided.pool, decided.slot, decided.worker_id, decided.worker_epoch)
            return [reannounce(to, decided.owner_epoch, decided.rank, decided.found_seq)]
        case RouteAnswered():
            return [_route_told(group, decided)]
        case CommandSent():
            return [] if decided.reason is None else [_command_told(group, decided)]
        case CommandEnded():
            return [_command_told(group, decided)]
        case RequestRejected():
            status, code = REJECTED[decided.reason]
            return [_error_answer(group, decided, 0, status, code)]
        case RequestAborted():
            drafts = []
            if decided.worker_id:
                to = Address(group, decided.pool, decided.slot, decided.worker_id, decided.worker_epoch)
                drafts.append(_cancelled(to, decided))
            if decided.holder is not None:
                drafts.append(_cancelled(_at(group, decided.holder), decided))
            status, code = ABORTED[decided.reason]
            drafts.append(
                _error_answer(group, decided, decided.attempt, decided.status or status, decided.code or code)
            )
            return drafts
        case KvReleased():
            return [_released(_at(group, decided.holder), decided)]
        case _:
            assert_never(decided)


class _Order(NamedTuple):
    """What a worker is to do with a request, on the order of which owner."""

    rank: int
    owner_epoch: int
    stage: Stage
    attempt: int


def _at(group: str, target: CommandTarget) -> Address:
    return Address(group, target.pool, target.slot, target.worker_id, target.worker_epoch)


def _work(
    to: Address, submitted: RequestSubmitted, order: _Order, request: ActiveRequest, *, report_output: bool
) -> Draft:
    # Who encodes sees no prompt; who decodes has all but the last position computed, so its media are only for later:
    # it computes them by itself if it must.
    encodes = order.stage == "encode"
    encoded = request.encoded if order.stage in ("aggregated", "prefill") else None
    media = submitted.media
    if encoded is not None:
        media = tuple([replace(one, content=b"") for one in media])
    item = WorkItem(
        request_id=submitted.request_id,
        attempt=order.attempt,
        owner_epoch=order.owner_epoch,
        rank=order.rank,
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
        stage=order.stage,
        media=media,
        encoded=encoded,
        prefilled=request.prefilled if order.stage == "decode" else None,
        **to.names,
    )
    return to.draft(item)


def _cancelled(to: Address, decided: RequestAborted) -> Draft:
    """No worker goes on with what was given up, or keeps anything for it."""
    cancelled = WorkCancelled(
        request_id=decided.request_id, attempt=decided.attempt, owner_epoch=decided.owner_epoch, **to.names
    )
    return to.draft(cancelled)


def _released(to: Address, decided: KvReleased) -> Draft:
    released = ReleaseKv(
        request_id=decided.request_id, attempt=decided.attempt, owner_epoch=decided.owner_epoch, **to.names
    )
    return to.draft(released)


def _route_told(group: str, decided: RouteAnswered) -> Draft:
    error = None
    if decided.reason is not None:
        status, code = REJECTED[decided.reason]
        error = ResponseError(status=status, code=code, message=decided.message)
    told = RouteResponse(
        request_id=decided.request_id,
        owner_epoch=decided.owner_epoch,
        pool=decided.pool,
        mode=decided.mode,
        choice=decided.choice,
        candidates=decided.candidates,
        would_wait=decided.would_wait,
        stage=decided.stage,
        prefill=decided.prefill,
        error=error,
        group=group,
    )
    return Draft(TOKENS.name, decided.reply_slot, encode(TOKENS, told))


def _command_told(group: str, decided: CommandSent | CommandEnded) -> Draft:
    told = CommandResponse(command_id=decided.command_id, owner_epoch=decided.owner_epoch, group=group)
    if isinstance(decided, CommandEnded):
        told = msgspec.structs.replace(told, outcomes=decided.outcomes)
    elif decided.reason is not None:
        status, code = UNSENDABLE[decided.reason]
        error = ResponseError(status=status, code=code, message=decided.message)
        told = msgspec.structs.replace(told, error=error)
    return Draft(TOKENS.name, decided.reply_slot, encode(TOKENS, told))


def _error_answer(group: str, decided: RequestRejected | RequestAborted, attempt: int, status: int, code: str) -> Draft:
    ended = ResponseEnded(
        request_id=decided.request_id,
        attempt=attempt,
        owner_epoch=decided.owner_epoch,
        finish_reason="cancelled" if code == "cancelled" else "error",
        error=ResponseError(status=status, code=code, message=decided.message),
        group=group,
    )
    return Draft(TOKENS.name, decided.reply_slot, encode(TOKENS, ended))
