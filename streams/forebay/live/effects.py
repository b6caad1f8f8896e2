"""What a journalled decision makes happen: work for workers, and answers that no worker will give."""

from typing import assert_never

from forebay.core.lifecycle import Request
from forebay.events.codec import encode
from forebay.events.decisions import (
    AbortReason,
    CacheResyncRequested,
    RejectReason,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import AnswerError, ResponseEnded, RouteTold
from forebay.events.topics import TOKENS, work_topic
from forebay.events.work import ReannounceCache, WorkCancelled, WorkItem
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
}


def work_item(decided: RequestRouted, submitted: RequestSubmitted, *, report_output: bool) -> Draft:
    """The work of a routed request, on the partition of its worker's slot."""
    return _work(
        submitted,
        pool=decided.pool,
        slot=decided.slot,
        attempt=decided.attempt,
        owner_epoch=decided.owner_epoch,
        worker_epoch=decided.worker_epoch,
        rank=decided.rank,
        report_output=report_output,
    )


def work_again(
    request: Request, slot: int, owner_epoch: int, submitted: RequestSubmitted, *, report_output: bool
) -> Draft:
    """The work of a request that an earlier owner routed; a worker that has it already ignores it."""
    return _work(
        submitted,
        pool=request.pool,
        slot=slot,
        attempt=request.attempt,
        owner_epoch=owner_epoch,
        worker_epoch=request.worker_epoch,
        rank=request.rank,
        report_output=report_output,
    )


def reannounce(pool: str, slot: int, owner_epoch: int, worker_epoch: int, rank: int, above_seq: int) -> Draft:
    """Have a worker say anew what one of its ranks has cached; saying it twice is harmless."""
    topic = work_topic(pool)
    asked = ReannounceCache(owner_epoch=owner_epoch, worker_epoch=worker_epoch, rank=rank, above_seq=above_seq)
    return Draft(topic.name, slot, encode(topic, asked))


def answers(
    decided: RequestHeld | RequestRejected | RequestAborted | RouteAnswered | CacheResyncRequested,
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
        case RequestRejected():
            status, code = REJECTED[decided.reason]
            return [_error_answer(decided, 0, status, code)]
        case RequestAborted():
            drafts = []
            if decided.worker_id:
                topic = work_topic(decided.pool)
                cancelled = WorkCancelled(
                    request_id=decided.request_id,
                    attempt=decided.attempt,
                    owner_epoch=decided.owner_epoch,
                    worker_epoch=decided.worker_epoch,
                )
                drafts.append(Draft(topic.name, decided.slot, encode(topic, cancelled)))
            status, code = ABORTED[decided.reason]
            drafts.append(_error_answer(decided, decided.attempt, status, code))
            return drafts
        case _:
            assert_never(decided)


def _work(
    submitted: RequestSubmitted,
    *,
    pool: str,
    slot: int,
    attempt: int,
    owner_epoch: int,
    worker_epoch: int,
    rank: int,
    report_output: bool,
) -> Draft:
    item = WorkItem(
        request_id=submitted.request_id,
        attempt=attempt,
        owner_epoch=owner_epoch,
        worker_epoch=worker_epoch,
        rank=rank,
        token_ids=submitted.token_ids,
        sequence_hashes=submitted.sequence_hashes,
        reply_slot=submitted.reply_slot,
        sampling=submitted.sampling,
        reply_from=submitted.reply_from,
        lora_name=submitted.lora_name,
        cache_namespace=submitted.cache_namespace,
        priority=submitted.routing.priority,
        report_output=report_output,
    )
    topic = work_topic(pool)
    return Draft(topic.name, slot, encode(topic, item))


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
        error=error,
    )
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
