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


class Move(StrEnum):
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


_SENT: dict[Move, Phase | None] = {
    Move.ROUTED: Phase.PREFILL,
    Move.TO_BE_ENCODED: Phase.ENCODE,
    Move.TO_BE_PREFILLED: Phase.REMOTE_PREFILL,
    Move.ENDED: None,
}
TRANSITIONS: dict[Phase, dict[Move, Phase | None]] = {
    Phase.SUBMITTED: {Move.HELD: Phase.QUEUED, **_SENT},
    Phase.QUEUED: _SENT,
    Phase.ENCODE: {
        Move.ENCODED: Phase.WAITING,
        Move.NOT_ENCODED: Phase.WAITING,
        Move.WORKER_LOST: Phase.WAITING,
        Move.ENDED: None,
    },
    Phase.REMOTE_PREFILL: {
        Move.PREFILLED: Phase.WAITING,
        Move.NOT_PREFILLED: Phase.WAITING,
        Move.NOT_TRANSFERRED: Phase.WAITING,
        Move.WORKER_LOST: Phase.WAITING,
        Move.ENDED: None,
    },
    Phase.TRANSFER: {
        Move.FIRST_TOKEN: Phase.DECODE,
        Move.NOT_TRANSFERRED: Phase.WAITING,
        Move.WORKER_LOST: Phase.WAITING,
        Move.ENDED: None,
    },
    Phase.PREFILL: {
        Move.FIRST_TOKEN: Phase.DECODE,
        Move.NOT_TRANSFERRED: Phase.WAITING,
        Move.WORKER_LOST: Phase.WAITING,
        Move.ENDED: None,
    },
    Phase.DECODE: {Move.WORKER_LOST: Phase.WAITING, Move.ENDED: None},
    Phase.WAITING: {Move.TO_BE_DECODED: Phase.TRANSFER, **_SENT},
}
ON_WORKER = frozenset((Phase.ENCODE, Phase.REMOTE_PREFILL, Phase.TRANSFER, Phase.PREFILL, Phase.DECODE))
BEFORE_ANSWER = frozenset((Phase.ENCODE, Phase.REMOTE_PREFILL, Phase.WAITING))
