"""What a journalled decision makes happen: work for workers, and answers that no worker will give."""

from typing import assert_never

from forebay.core.lifecycle import Request
from forebay.events.codec import encode
from forebay.events.decisions import AbortReason, RejectReason, RequestAborted, RequestRejected, RequestRouted
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import AnswerError, ResponseEnded
from forebay.events.topics import TOKENS, work_topic
from forebay.events.work import WorkCancelled, WorkItem
from forebay.transport.base import Draft

REJECTED: dict[RejectReason, tuple[int, str]] = {
    "no_workers": (503, "no_workers"),
    "wrong_model": (404, "model_not_found"),
    "duplicate_id": (409, "duplicate_request_id"),
    "overloaded": (503, "overloaded"),
}
ABORTED: dict[AbortReason, tuple[int, str]] = {
    "cancelled": (499, "cancelled"),
    "deadline": (504, "deadline_exceeded"),
    "attempts_exhausted": (503, "workers_lost"),
}


def work_item(decided: RequestRouted, submitted: RequestSubmitted) -> Draft:
    """The work of a routed request, on the partition of its worker's slot."""
    return _work(
        submitted,
        pool=decided.pool,
        slot=decided.slot,
        attempt=decided.attempt,
        owner_epoch=decided.owner_epoch,
        worker_epoch=decided.worker_epoch,
        rank=decided.rank,
    )


def work_again(request: Request, slot: int, owner_epoch: int, submitted: RequestSubmitted) -> Draft:
    """The work of a request that an earlier owner routed; a worker that has it already ignores it."""
    return _work(
        submitted,
        pool=request.pool,
        slot=slot,
        attempt=request.attempt,
        owner_epoch=owner_epoch,
        worker_epoch=request.worker_epoch,
        rank=request.rank,
    )


def answers(decided: RequestRejected | RequestAborted) -> list[Draft]:
    """The end of a request that is refused or given up: for its client, and for the worker that has it."""
    match decided:
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
    )
    topic = work_topic(pool)
    return Draft(topic.name, slot, encode(topic, item))


def _error_answer(decided: RequestRejected | RequestAborted, attempt: int, status: int, code: str) -> Draft:
    ended = ResponseEnded(
        request_id=decided.request_id,
        attempt=attempt,
        owner_epoch=decided.owner_epoch,
        finish_reason="cancelled" if code == "cancelled" else "error",
        error=AnswerError(status=status, code=code, message=decided.message),
    )
    return Draft(TOKENS.name, decided.reply_slot, encode(TOKENS, ended))
