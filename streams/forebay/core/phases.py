"""Phases of an active request, and the transition table between them.

submitted --routed--> prefill --first token--> decode --finished--> (ended); submitted --held--> queued --routed-->
prefill, decode --worker lost, not transferred--> waiting --routed--> prefill   any --failed, aborted--> (ended)
submitted, queued, waiting --images to be encoded--> encode --(not) encoded, worker lost--> waiting
submitted, queued, waiting --to be prefilled--> remote prefill --(not) prefilled, worker lost--> waiting
waiting --to be decoded--> transfer --first token--> decode; transfer --worker lost, not transferred--> waiting
"""

from enum import StrEnum


class Phase(StrEnum):
    """Phase of an active request."""

    SUBMITTED = "submitted"
    QUEUED = "queued"
    ENCODE = "encode"
    REMOTE_PREFILL = "remote_prefill"
    TRANSFER = "transfer"
    PREFILL = "prefill"
    DECODE = "decode"
    WAITING = "waiting"


class RequestTransition(StrEnum):
    """Transition of an active request."""

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
    FIRST_TOKEN = "first_token"  # noqa: S105 - a token of text
    WORKER_LOST = "worker_lost"
    ENDED = "ended"


_SENT: dict[RequestTransition, Phase | None] = {
    RequestTransition.ROUTED: Phase.PREFILL,
    RequestTransition.TO_BE_ENCODED: Phase.ENCODE,
    RequestTransition.TO_BE_PREFILLED: Phase.REMOTE_PREFILL,
    RequestTransition.ENDED: None,
}
TRANSITIONS: dict[Phase, dict[RequestTransition, Phase | None]] = {
    Phase.SUBMITTED: {RequestTransition.HELD: Phase.QUEUED, **_SENT},
    Phase.QUEUED: _SENT,
    Phase.ENCODE: {
        RequestTransition.ENCODED: Phase.WAITING,
        RequestTransition.NOT_ENCODED: Phase.WAITING,
        RequestTransition.WORKER_LOST: Phase.WAITING,
        RequestTransition.ENDED: None,
    },
    Phase.REMOTE_PREFILL: {
        RequestTransition.PREFILLED: Phase.WAITING,
        RequestTransition.NOT_PREFILLED: Phase.WAITING,
        RequestTransition.NOT_TRANSFERRED: Phase.WAITING,
        RequestTransition.WORKER_LOST: Phase.WAITING,
        RequestTransition.ENDED: None,
    },
    Phase.TRANSFER: {
        RequestTransition.FIRST_TOKEN: Phase.DECODE,
        RequestTransition.NOT_TRANSFERRED: Phase.WAITING,
        RequestTransition.WORKER_LOST: Phase.WAITING,
        RequestTransition.ENDED: None,
    },
    Phase.PREFILL: {
        RequestTransition.FIRST_TOKEN: Phase.DECODE,
        RequestTransition.NOT_TRANSFERRED: Phase.WAITING,
        RequestTransition.WORKER_LOST: Phase.WAITING,
        RequestTransition.ENDED: None,
    },
    Phase.DECODE: {RequestTransition.WORKER_LOST: Phase.WAITING, RequestTransition.ENDED: None},
    Phase.WAITING: {RequestTransition.TO_BE_DECODED: Phase.TRANSFER, **_SENT},
}
ON_WORKER = frozenset((Phase.ENCODE, Phase.REMOTE_PREFILL, Phase.TRANSFER, Phase.PREFILL, Phase.DECODE))
BEFORE_RESPONSE = frozenset((Phase.ENCODE, Phase.REMOTE_PREFILL, Phase.WAITING))
