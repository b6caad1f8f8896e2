"""Phases of an active request. `forebay.core.state.transitions` has the table of transitions between them."""

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


ON_WORKER = frozenset((Phase.ENCODE, Phase.REMOTE_PREFILL, Phase.TRANSFER, Phase.PREFILL, Phase.DECODE))
BEFORE_RESPONSE = frozenset((Phase.ENCODE, Phase.REMOTE_PREFILL, Phase.WAITING))
