"""State of a response as read from its reply slot: which tokens are valid, and where the response ends.

Several workers may write output of one request, because a lost worker may not know that it was replaced. Records are
ordered by (attempt, owner epoch). An `AttemptStarted` makes records with lower values stale, but only those that follow
it in the slot. So a token that was valid when it was read stays valid. All readers of the slot, ingresses and workers,
that start at the same record get the same response. Events without the key of the request have no effect, because
neither the owner nor a worker of the request wrote them.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar, assert_never

from forebay.events.base import unpack_u32
from forebay.events.tokens import (
    AttemptStarted,
    CommandResponse,
    DestinationSelected,
    Embedded,
    PrefilledBy,
    RequestLocated,
    ResponseEnded,
    RouteResponse,
    TokenChunk,
    TokenEvent,
    TokenLogprob,
    TokensEmitted,
)


class ServedFrom(NamedTuple):
    """The worker rank that generated the valid tokens from position `first` on, in which attempt."""

    first: int
    worker_id: str
    rank: int
    attempt: int
    prefilled: PrefilledBy | None


class ResponseState:
    """Response to the request with the reply key `key`, as far as it has been read from the reply slot.

    Attributes:
        tokens: valid output tokens, in order; the reader may remove them.
        logprobs: log probabilities of `tokens`, None for a token without one. The list may be shorter than `tokens`.
        objects: JSON values of a call, one per token of `tokens`.
        vector: embedding of the prompt as packed f32; empty for generated responses.
        next_index: number of valid tokens received, including removed ones; also the position of the next token.
        served: which worker rank generated which tokens, in order.
        worker_id: worker that generated the last valid token, on its rank `rank`.
        prefilled: worker that computed the prompt; None if the worker that generated the first token did.
        foreign: number of events with another key, which had no effect.
        ended: valid end of the response; None if it has not ended. Later records have no effect.
        located: the earlier request whose response is also the response of this request; None if the request is run.
        destination: where a gateway sends the request; None if the request is not external, or the reader has removed
            it.
        text_only: whether valid tokens were computed from text.
        gap: whether tokens after `next_index` are missing. If so, no record can be applied.
    """

    __slots__ = (
        "_valid_from",
        "attempt",
        "destination",
        "ended",
        "foreign",
        "gap",
        "key",
        "located",
        "logprobs",
        "next_index",
        "objects",
        "prefilled",
        "rank",
        "served",
        "text_only",
        "tokens",
        "vector",
        "worker_id",
    )

    def __init__(self, key: int = 0) -> None:
        self.key = key
        self.foreign = 0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob | None] = []
        self.served: list[ServedFrom] = []
        self.objects: list[str] = []
        self.vector = b""
        self.next_index = 0
        self.attempt = 0
        self.worker_id = ""
        self.rank = 0
        self.prefilled: PrefilledBy | None = None
        self.ended: ResponseEnded | None = None
        self.located: RequestLocated | None = None
        self.destination: DestinationSelected | None = None
        self.gap = False
        self.text_only = False
        self._valid_from = (0, -1)

    def has_key(self, key: int) -> bool:
        """Return whether this is the key of the request. If not, count the event as foreign."""
        is_own = key == self.key
        self.foreign += not is_own
        return is_own

    def is_stale(self, attempt: int, owner_epoch: int) -> bool:
        """Return whether records are stale: a later attempt has started, or the same attempt under a later owner."""
        return (attempt, owner_epoch) < self._valid_from

    def start(self, attempt: int, owner_epoch: int) -> None:
        """Start a later attempt, or the same attempt under a later owner. Earlier records become stale."""
        if self.ended is not None:
            return
        self._valid_from = max(self._valid_from, (attempt, owner_epoch))
        self.attempt = self._valid_from[0]

    def push(self, event: TokensEmitted, chunk: TokenChunk) -> bool:
        """Add those tokens of a chunk of `event` that are new. Return whether the response changed."""
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
        last = self.served[-1] if self.served and chunk.prefilled is None else None
        if last is None or (last.attempt, last.worker_id, last.rank) != (attempt, event.worker_id, event.rank):
            self.served.append(ServedFrom(self.next_index, event.worker_id, event.rank, attempt, self.prefilled))
        if chunk.logprobs:
            self.logprobs += [None] * (len(self.tokens) - len(self.logprobs))
            self.logprobs += chunk.logprobs[known:]
        self.objects += chunk.objects[known:]
        self.tokens += token_ids[known:] if known else token_ids
        self.next_index += len(token_ids) - known
        self.text_only |= chunk.text_only
        return True

    def take(self, before: int | None = None) -> tuple[list[int], list[TokenLogprob | None]]:
        """Remove and return `tokens` and `logprobs`, only those before a position of the output if it is given."""
        tokens, logprobs = self.tokens, self.logprobs
        count = len(tokens) if before is None else before - self.next_index + len(tokens)
        self.tokens, self.logprobs = tokens[count:], logprobs[count:]
        return tokens[:count], logprobs[:count]

    def served_at(self, position: int) -> ServedFrom:
        """Return which worker rank generated the valid token at a position."""
        return next(one for one in reversed(self.served) if one.first <= position)

    def embed(self, event: Embedded) -> bool:
        """Set the embedding of the prompt, unless the record is stale. Return whether it was set."""
        if self.ended is not None or self.is_stale(event.attempt, event.owner_epoch):
            return False
        self.worker_id, self.rank, self.vector = event.worker_id, event.rank, event.vector
        return True

    def end(self, event: ResponseEnded) -> bool:
        """Set the end of the response, unless the record is stale or tokens are missing. Return whether it was set."""
        if self.gap or self.ended is not None or self.is_stale(event.attempt, event.owner_epoch):
            return False
        self.ended = event
        return True

    def locate(self, event: RequestLocated) -> bool:
        """Set the earlier request, unless it is known. Return whether it was set."""
        if self.located is not None or self.ended is not None:
            return False
        self.located = event
        return True

    def direct(self, event: DestinationSelected) -> bool:
        """Set the destination of an external request, unless the record is stale or known. Return whether it was set.

        A new owner repeats the last destination, because its predecessor may not have sent it.
        """
        if self.ended is not None or event.attempt <= self.attempt:
            return False
        self.start(event.attempt, event.owner_epoch)
        self.destination = event
        return True


R = TypeVar("R", bound=ResponseState)


def apply(replies: Mapping[str, R], event: TokenEvent, group: str) -> list[R]:
    """Apply the next event of a reply slot to the responses that it contains, and return the responses that changed.

    Groups share a slot, and two groups may use the same request id. Events of other groups than `group` are ignored.
    """
    if event.group != group:
        return []
    match event:
        case TokensEmitted():
            changed = []
            for chunk in event.chunks:
                reply = replies.get(chunk.request_id)
                if reply is not None and reply.has_key(chunk.reply_key) and reply.push(event, chunk):
                    changed.append(reply)
            return changed
        case ResponseEnded() | Embedded() | AttemptStarted() | RequestLocated() | DestinationSelected():
            reply = replies.get(event.request_id)
            if reply is None or not reply.has_key(event.reply_key):
                return []
            match event:
                case AttemptStarted():
                    reply.start(event.attempt, event.owner_epoch)
                    return []
                case ResponseEnded():
                    changes = reply.end(event)
                case Embedded():
                    changes = reply.embed(event)
                case DestinationSelected():
                    changes = reply.direct(event)
                case _:
                    changes = reply.locate(event)
            return [reply] if changes else []
        case RouteResponse() | CommandResponse():
            return []  # these complete a query or a command, not a request
        case _:
            assert_never(event)
