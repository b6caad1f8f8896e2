"""Append the output of a worker, so that the owner does not learn of output that the client never gets.

On Kafka each partition acknowledges its records independently. If a worker died after the owner had read the end of a
request on `progress`, but before its last tokens were durable, nobody would continue the response, and its client would
wait until the deadline.
"""

from collections.abc import Sequence

from forebay.events.topics import PROGRESS, TOKENS
from forebay.transport.base import Draft, Log


def append_output(log: Log, drafts: Sequence[Draft]) -> None:
    """Append records without waiting. Those on `progress` follow once those on `tokens` are durable.

    Raises:
        LogError: the log has failed.
    """
    tokens = [draft for draft in drafts if draft.topic == TOKENS.name]
    progress = [draft for draft in drafts if draft.topic == PROGRESS.name]
    if len(tokens) + len(progress) < len(drafts):
        log.append_soon([draft for draft in drafts if draft.topic not in (TOKENS.name, PROGRESS.name)])
    log.append_soon(tokens, then=progress)
