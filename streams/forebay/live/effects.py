"""What a journalled decision makes happen: work and commands for workers, and answers that no worker will give."""

from collections.abc import Iterator
from typing import NamedTuple, assert_never

import msgspec
from msgspec.structs import replace

from forebay.core.commands import Pending
from forebay.core.fleet import Fleet
from forebay.core.lifecycle import Request
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
from forebay.events.tokens import AnswerError, CommandTold, ResponseEnded, RouteTold
from forebay.events.topics import TOKENS, work_topic
from forebay.events.work import ReannounceCache, ReleaseKv, WorkCancelled, WorkerCommand, WorkItem
from forebay.transport.base import Draft

REJECTED: dict[RejectReason, tuple[int, str]] = {
    "no_workers": (503, "no_workers"),
    "wrong_model": (404, "model_not_found"),
    "duplicate_id": (409, "duplicate_request_id"),
    "overloaded": (503, "overloaded"),
    "busy": (503, "busy"),
    "queue_full": (529, "queue_full"),
    "unknown_worker": (400, "unknown_worker"),
    "contradictory_routing": (400, "contradictory_routing"),
    "no_eligible_worker": (503, "no_eligible_worker"),
    "policy_failed": (500, "policy_failed"),
}
ABORTED: dict[AbortReason, tuple[int, str]] = {
    "cancelled": (499, "cancelled"),
    "deadline": (504, "deadline_exceeded"),
    "queue_deadline": (504, "queue_deadline_exceeded"),
    "attempts_exhausted": (503, "workers_lost"),
    "encode_failed": (502, "encode_failed"),
    "prefill_failed": (502, "prefill_failed"),
    "prefill_refused": (400, "prefill_refused"),
    "pinned_worker_lost": (503, "pinned_worker_lost"),
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


def work_item(decided: RequestRouted, submitted: RequestSubmitted, request: Request, *, report_output: bool) -> Draft:
    """The work of a routed request, on the partition of its worker's slot; `request` says where its parts lie."""
    order = decided.worker_epoch, decided.owner_epoch, decided.stage, decided.attempt
    who = _Assignee(decided.pool, decided.slot, decided.rank, *order)
    return _work(submitted, who, request, report_output=report_output)


def work_again(
    request: Request, pool: str, slot: int, owner_epoch: int, submitted: RequestSubmitted, *, report_output: bool
) -> Draft:
    """The work of a request that an earlier owner routed; a worker that has it already ignores it."""
    who = _Assignee(pool, slot, request.rank, request.worker_epoch, owner_epoch, request.stage, request.stage_attempt)
    return _work(submitted, who, request, report_output=report_output)


def reannounce(pool: str, slot: int, owner_epoch: int, worker_epoch: int, rank: int, above_seq: int) -> Draft:
    """Have a worker say anew what one of its ranks has cached; saying it twice is harmless."""
    topic = work_topic(pool)
    asked = ReannounceCache(owner_epoch=owner_epoch, worker_epoch=worker_epoch, rank=rank, above_seq=above_seq)
    return Draft(topic.name, slot, encode(topic, asked))


def worker_commands(pending: Pending, fleet: Fleet, owner_epoch: int, now_us: int) -> Iterator[Draft]:
    """A command to every worker that has it pending; one that has it already answers once, and again if it did."""
    for outcome in pending.outcomes.values():
        worker = fleet.get(outcome.worker_id)
        if outcome.status != "pending" or worker is None:
            continue
        topic = work_topic(outcome.pool)
        sent = WorkerCommand(
            command_id=pending.command_id,
            command=pending.command,
            owner_epoch=owner_epoch,
            worker_epoch=outcome.worker_epoch,
            timeout_us=max(0, pending.due_us - now_us),
            nonce=pending.nonce,
        )
        yield Draft(topic.name, worker.slot, encode(topic, sent))


def answers(
    decided: RequestHeld
    | RequestRejected
    | RequestAborted
    | KvReleased
    | RouteAnswered
    | CacheResyncRequested
    | CommandSent
    | CommandEnded,
) -> list[Draft]:
    """What a decision that gives no work makes happen, for its client and for a worker that is concerned."""
    match decided:
        case RequestHeld():
            return []
        case CacheResyncRequested():
            where = decided.pool, decided.slot, decided.owner_epoch, decided.worker_epoch, decided.rank
            return [reannounce(*where, decided.found_seq)]
        case RouteAnswered():
            return [_route_told(decided)]
        case CommandSent():
            return [] if decided.reason is None else [_command_told(decided)]
        case CommandEnded():
            return [_command_told(decided)]
        case RequestRejected():
            status, code = REJECTED[decided.reason]
            return [_error_answer(decided, 0, status, code)]
        case RequestAborted():
            drafts = []
            if decided.worker_id:
                drafts.append(_cancelled(decided, decided.pool, decided.slot, decided.worker_epoch))
            if (holder := decided.holder) is not None:
                drafts.append(_cancelled(decided, holder.pool, holder.slot, holder.worker_epoch))
            status, code = ABORTED[decided.reason]
            drafts.append(_error_answer(decided, decided.attempt, decided.status or status, decided.code or code))
            return drafts
        case KvReleased():
            return [_released(decided, decided.holder)]
        case _:
            assert_never(decided)


class _Assignee(NamedTuple):
    """Who has a request, for what."""

    pool: str
    slot: int
    rank: int
    worker_epoch: int
    owner_epoch: int
    stage: Stage
    attempt: int


def _work(submitted: RequestSubmitted, who: _Assignee, request: Request, *, report_output: bool) -> Draft:
    # Who encodes sees no prompt; who decodes has all but the last position computed, so its media are only for later:
    # it computes them by itself if it must.
    encodes = who.stage == "encode"
    encoded = request.encoded if who.stage in ("aggregated", "prefill") else None
    media = submitted.media
    if encoded is not None:
        media = tuple([replace(one, content=b"") for one in media])
    item = WorkItem(
        request_id=submitted.request_id,
        attempt=who.attempt,
        owner_epoch=who.owner_epoch,
        worker_epoch=who.worker_epoch,
        rank=who.rank,
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
        stage=who.stage,
        media=media,
        encoded=encoded,
        prefilled=request.prefilled if who.stage == "decode" else None,
    )
    topic = work_topic(who.pool)
    return Draft(topic.name, who.slot, encode(topic, item))


def _cancelled(decided: RequestAborted, pool: str, slot: int, worker_epoch: int) -> Draft:
    """No worker goes on with what was given up, or keeps anything for it."""
    topic = work_topic(pool)
    cancelled = WorkCancelled(
        request_id=decided.request_id,
        attempt=decided.attempt,
        owner_epoch=decided.owner_epoch,
        worker_epoch=worker_epoch,
    )
    return Draft(topic.name, slot, encode(topic, cancelled))


def _released(decided: KvReleased, holder: CommandTarget) -> Draft:
    topic = work_topic(holder.pool)
    released = ReleaseKv(
        request_id=decided.request_id,
        attempt=decided.attempt,
        owner_epoch=decided.owner_epoch,
        worker_epoch=holder.worker_epoch,
    )
    return Draft(topic.name, holder.slot, encode(topic, released))


def _route_told(decided: RouteAnswered) -> Draft:
    error = None
    if decided.reason is not None:
        status, code = REJECTED[decided.reason]
        error = AnswerError(status=status, code=code, message=decided.message)
    told = RouteTold(
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
    )
    return Draft(TOKENS.name, decided.reply_slot, encode(TOKENS, told))


def _command_told(decided: CommandSent | CommandEnded) -> Draft:
    told = CommandTold(command_id=decided.command_id, owner_epoch=decided.owner_epoch)
    if isinstance(decided, CommandEnded):
        told = msgspec.structs.replace(told, outcomes=decided.outcomes)
    elif decided.reason is not None:
        status, code = UNSENDABLE[decided.reason]
        error = AnswerError(status=status, code=code, message=decided.message)
        told = msgspec.structs.replace(told, error=error)
    return Draft(TOKENS.name, decided.reply_slot, encode(TOKENS, told))


def _error_answer(decided: RequestRejected | RequestAborted, attempt: int, status: int, code: str) -> Draft:
    ended = ResponseEnded(
        request_id=decided.request_id,
        attempt=attempt,
        owner_epoch=decided.owner_epoch,
        finish_reason="cancelled" if code == "cancelled" else "error",
        error=AnswerError(status=status, code=code, message=decided.message),
    )
    return Draft(TOKENS.name, decided.reply_slot, encode(TOKENS, ended))
