"""State of a response as read from its reply slot: which tokens are valid, and where it ends.

Several workers may write output of one request, because a lost worker may not know that it was replaced. Records are
ordered by (attempt, owner epoch). `AttemptStarted` makes lower records stale, but only those after it. So a token that
was valid when read stays valid. Every reader of the slot, ingress or worker, that starts at the same record gets the
same response.
"""

from collections.abc import Mapping
from typing import TypeVar, assert_never

from forebay.events.base import unpack_u32
from forebay.events.tokens import (
    AttemptStarted,
    CommandResponse,
    Embedded,
    PrefilledBy,
    ResponseEnded,
    RouteResponse,
    TokenChunk,
    TokenEvent,
    TokenLogprob,
    TokensEmitted,
)


class ResponseState:
    """Response to one request so far.

    Attributes:
        tokens: valid output tokens, in order; the reader may take them away.
        logprobs: log probabilities of `tokens`, if the request asked for them; taken away together with `tokens`.
        vector: embedding of the prompt as packed f32; empty for generated responses.
        next_index: number of valid tokens received, including those taken away.
        attempt: highest attempt that started.
        worker_id: worker that generated the last valid token.
        rank: rank that generated the last valid token.
        prefilled: worker that computed the prompt of the first valid token; None if it is the same worker.
        ended: valid end of the response; no record counts after it.
        gap: whether tokens after `next_index` are missing; no record can be applied then.
    """

    __slots__ = (
        "_valid_from",
        "attempt",
        "ended",
        "gap",
        "logprobs",
        "next_index",
        "prefilled",
        "rank",
        "tokens",
        "vector",
        "worker_id",
    )

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.vector = b""
        self.next_index = 0
        self.attempt = 0
        self.worker_id = ""
        self.rank = 0
        self.prefilled: PrefilledBy | None = None
        self.ended: ResponseEnded | None = None
        self.gap = False
        self._valid_from = (0, -1)

    def is_stale(self, attempt: int, owner_epoch: int) -> bool:
        """Return whether records of this attempt and owner epoch are stale."""
        return (attempt, owner_epoch) < self._valid_from

    def start(self, attempt: int, owner_epoch: int) -> None:
        """Start a later attempt, or one under a later owner; lower records are stale from here on."""
        if self.ended is not None:
            return
        self._valid_from = max(self._valid_from, (attempt, owner_epoch))
        self.attempt = self._valid_from[0]

    def push(self, event: TokensEmitted, chunk: TokenChunk) -> bool:
        """Add the new tokens of a chunk of `event`; return whether the response changed."""
        attempt = chunk.attempt
        if self.gap or self.ended is not None or (attempt, event.owner_epoch) < self._valid_from:
            return False
        if attempt > self.attempt:
            self.start(attempt, -1)
        token_ids = unpack_u32(chunk.token_ids)
        known = self.next_index - chunk.first_index
        if known < 0:
            self.gap = True
            return True
        if known >= len(token_ids):
            return False
        self.worker_id, self.rank = event.worker_id, event.rank
        if chunk.prefilled is not None:
            self.prefilled = chunk.prefilled
        self.tokens += token_ids[known:] if known else token_ids
        self.logprobs += chunk.logprobs[known:]
        self.next_index += len(token_ids) - known
        return True

    def embed(self, event: Embedded) -> bool:
        """Set the embedding of the prompt; return whether the record is valid."""
        if self.ended is not None or self.is_stale(event.attempt, event.owner_epoch):
            return False
        self.worker_id, self.rank, self.vector = event.worker_id, event.rank, event.vector
        return True

    def end(self, event: ResponseEnded) -> bool:
        """Set the end of the response; return whether the record is valid."""
        if self.gap or self.ended is not None or self.is_stale(event.attempt, event.owner_epoch):
            return False
        self.ended = event
        return True


R = TypeVar("R", bound=ResponseState)


def apply(replies: Mapping[str, R], event: TokenEvent, group: str) -> list[R]:
    """Apply an event of the reply slot to the responses it is about, and return those that changed.

    Groups share a slot, and two groups may use the same request id. Events of groups other than `group` are ignored.

    Args:
        replies: responses by request id.
        event: next event of the slot.
        group: group of these responses.
    """
    if event.group != group:
        return []
    match event:
        case TokensEmitted():
            changed = []
            for chunk in event.chunks:
                reply = replies.get(chunk.request_id)
                if reply is not None and reply.push(event, chunk):
                    changed.append(reply)
            return changed
        case ResponseEnded():
            reply = replies.get(event.request_id)
            return [reply] if reply is not None and reply.end(event) else []
        case Embedded():
            reply = replies.get(event.request_id)
            return [reply] if reply is not None and reply.embed(event) else []
        case AttemptStarted():
            reply = replies.get(event.request_id)
            if reply is not None:
                reply.start(event.attempt, event.owner_epoch)
            return []
        case RouteResponse() | CommandResponse():
            return []  # these complete a query or a command, not a request
        case _:
            assert_never(event)
