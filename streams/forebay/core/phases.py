"""Phases of an active request. `forebay.core.state.transitions` has the table of transitions between them."""

from enum import StrEnum


class Phase(StrEnum):
    """Phase of an active request.

    Attributes:
        SUBMITTED: the owner has applied the submission and not decided yet.
        QUEUED: it waits in the router's queue.
        TRANSFER: a decode worker has it and fetches the KV of the prompt.
        PREFILL: the worker that generates the response has it and computes the prompt.
        DECODE: the worker that generates the response has emitted the first token.
        WAITING: it has no worker, and the owner will route it to the next one.
    """

    SUBMITTED = "submitted"
    QUEUED = "queued"
    ENCODE = "encode"
    REMOTE_PREFILL = "remote_prefill"
    TRANSFER = "transfer"
    PREFILL = "prefill"
    DECODE = "decode"
    WAITING = "waiting"


ON_WORKER = frozenset((Phase.ENCODE, Phase.REMOTE_PREFILL, Phase.TRANSFER, Phase.PREFILL, Phase.DECODE))
BEFORE_FIRST_TOKEN = frozenset((Phase.REMOTE_PREFILL, Phase.TRANSFER, Phase.PREFILL))
"""A worker has the request, but has not reported that it computed the prompt or fetched its KV."""
BEFORE_RESPONSE = frozenset((Phase.ENCODE, Phase.REMOTE_PREFILL, Phase.WAITING))
