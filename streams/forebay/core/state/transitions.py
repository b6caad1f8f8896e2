"""Transition table of an active request, and of the KV that a prefill worker keeps for it.

Each row names the phases in which a transition is possible, the next phase, a condition, and what happens to embeddings
and kept KV. `ActiveRequests` raises `IllegalTransition` for a transition that the table does not allow, and changes
nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from forebay.core.phases import ON_WORKER, Phase
from forebay.core.state.active_request import ActiveRequest
from forebay.events.decisions import KvReleaseReason, Stage
from forebay.events.progress import (
    AttemptMoved,
    AttemptRejected,
    EncodeFailed,
    EncodeFinished,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    RequestProgress,
    TransferFailed,
)


class RequestTransition(StrEnum):
    """Transition of an active request from one phase to the next."""

    HELD = "held"
    ROUTED = "routed"
    TO_BE_ENCODED = "to_be_encoded"
    ENCODED = "encoded"
    NOT_ENCODED = "not_encoded"
    TO_BE_PREFILLED = "to_be_prefilled"
    PREFILLED = "prefilled"
    NOT_PREFILLED = "not_prefilled"
    TO_BE_DECODED = "to_be_decoded"
    NOT_TRANSFERRED = "not_transferred"
    REJECTED = "rejected"
    MOVED = "moved"
    KV_EXPIRED = "kv_expired"
    FIRST_TOKEN = "first_token"  # noqa: S105 - a token of text
    OUTPUT_GROWN = "output_grown"
    WORKER_LOST = "worker_lost"
    FINISHED = "finished"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class TransitionRule:
    """Row of the transition table.

    Attributes:
        target: next phase; None if the request ends.
        guard: condition that the request must also meet; None if there is none.
        drops_embeddings: whether the embeddings can no longer be fetched.
        releases_kv: reason to free the KV that a prefill worker keeps; None if the worker continues to keep it.
    """

    sources: frozenset[Phase]
    target: Phase | None
    guard: Callable[[ActiveRequest], bool] | None = None
    drops_embeddings: bool = False
    releases_kv: KvReleaseReason | None = None


def _phases(*phases: Phase) -> frozenset[Phase]:
    return frozenset(phases)


def _has_something_to_fetch(request: ActiveRequest) -> bool:
    return request.encoded is not None or request.prefilled is not None


_READY = _phases(Phase.SUBMITTED, Phase.QUEUED, Phase.WAITING)
# A worker that was declared lost may still have responded.
_MAY_RESPOND = _phases(Phase.PREFILL, Phase.TRANSFER, Phase.DECODE, Phase.WAITING)

TRANSITIONS: dict[RequestTransition, TransitionRule] = {
    RequestTransition.HELD: TransitionRule(_phases(Phase.SUBMITTED), Phase.QUEUED),
    RequestTransition.ROUTED: TransitionRule(_READY, Phase.PREFILL),
    RequestTransition.TO_BE_ENCODED: TransitionRule(_READY, Phase.ENCODE),
    RequestTransition.ENCODED: TransitionRule(_phases(Phase.ENCODE), Phase.WAITING),
    RequestTransition.NOT_ENCODED: TransitionRule(_phases(Phase.ENCODE), Phase.WAITING),
    RequestTransition.TO_BE_PREFILLED: TransitionRule(_READY, Phase.REMOTE_PREFILL),
    # The embeddings were consumed by the prefill.
    RequestTransition.PREFILLED: TransitionRule(_phases(Phase.REMOTE_PREFILL), Phase.WAITING, drops_embeddings=True),
    RequestTransition.NOT_PREFILLED: TransitionRule(
        _phases(Phase.REMOTE_PREFILL), Phase.WAITING, drops_embeddings=True
    ),
    RequestTransition.TO_BE_DECODED: TransitionRule(_phases(Phase.WAITING), Phase.TRANSFER),
    RequestTransition.NOT_TRANSFERRED: TransitionRule(
        _phases(Phase.REMOTE_PREFILL, Phase.TRANSFER, Phase.PREFILL),
        Phase.WAITING,
        guard=_has_something_to_fetch,
        drops_embeddings=True,
        releases_kv="not_fetched",
    ),
    # A server that rejects a request may have fetched the KV before.
    RequestTransition.REJECTED: TransitionRule(
        _phases(Phase.REMOTE_PREFILL, Phase.TRANSFER, Phase.PREFILL),
        Phase.WAITING,
        drops_embeddings=True,
        releases_kv="not_fetched",
    ),
    RequestTransition.MOVED: TransitionRule(
        _phases(Phase.PREFILL), Phase.WAITING, guard=lambda request: request.submitted.is_external
    ),
    RequestTransition.KV_EXPIRED: TransitionRule(_phases(Phase.WAITING), Phase.WAITING, releases_kv="lease_over"),
    RequestTransition.FIRST_TOKEN: TransitionRule(_phases(Phase.TRANSFER, Phase.PREFILL), Phase.DECODE),
    RequestTransition.OUTPUT_GROWN: TransitionRule(_phases(Phase.DECODE), Phase.DECODE),
    # Embeddings and KV can be fetched only once, so they are lost, too.
    RequestTransition.WORKER_LOST: TransitionRule(
        ON_WORKER, Phase.WAITING, drops_embeddings=True, releases_kv="worker_lost"
    ),
    RequestTransition.FINISHED: TransitionRule(
        _MAY_RESPOND,
        None,
        guard=lambda request: request.stage in ("aggregated", "decode"),
        releases_kv="request_ended",
    ),
    RequestTransition.FAILED: TransitionRule(
        _MAY_RESPOND | _phases(Phase.ENCODE),
        None,
        guard=lambda request: request.stage != "prefill",
        releases_kv="request_ended",
    ),
    RequestTransition.ENDED: TransitionRule(frozenset(Phase), None, releases_kv="request_ended"),
}

DISPATCHED: dict[Stage, RequestTransition] = {
    "aggregated": RequestTransition.ROUTED,
    "encode": RequestTransition.TO_BE_ENCODED,
    "prefill": RequestTransition.TO_BE_PREFILLED,
    "decode": RequestTransition.TO_BE_DECODED,
}
REPORTED: dict[type[RequestProgress], RequestTransition] = {
    FirstTokenEmitted: RequestTransition.FIRST_TOKEN,
    OutputGrown: RequestTransition.OUTPUT_GROWN,
    RequestFinished: RequestTransition.FINISHED,
    RequestFailed: RequestTransition.FAILED,
    AttemptRejected: RequestTransition.REJECTED,
    AttemptMoved: RequestTransition.MOVED,
    EncodeFinished: RequestTransition.ENCODED,
    EncodeFailed: RequestTransition.NOT_ENCODED,
    PrefillFinished: RequestTransition.PREFILLED,
    PrefillFailed: RequestTransition.NOT_PREFILLED,
    TransferFailed: RequestTransition.NOT_TRANSFERRED,
}
