"""An answer as it stands on its reply slot: which of the tokens said are valid, and where it ends.

Theory of operation. Several workers may speak for one request, because one that is lost may not know it.
Their records are ordered by (attempt, owner epoch): `AttemptStarted` voids what is lower after it, and only after
it. So what is valid never changes once it was read; whoever reads the slot from the same record on, ingress or
worker, has the same answer.
"""

from collections.abc import Mapping
from typing import TypeVar, assert_never

from forebay.events.base import unpack_u32
from forebay.events.tokens import (
    AttemptStarted,
    CommandTold,
    Embedded,
    PrefilledBy,
    ResponseEnded,
    RouteTold,
    TokenChunk,
    TokenEvent,
    TokenLogprob,
    TokensEmitted,
)


class Reply:
    """The answer to one request so far.

    Attributes:
        tokens: the valid ones, in order; a reader may take them away.
        logprobs: of `tokens`, where the request asked for them; a reader takes both away.
        vector: of a prompt that was to be embedded, packed f32.
        next_index: how many valid tokens were said, taken away or not.
        attempt: the highest that began.
        worker_id: who said the last valid token; `rank` likewise.
        prefilled: who computed the prompt that the first valid token followed, where that is another.
        ended: the valid end; nothing counts after it.
        gap: tokens are missing after `next_index`: nothing more can be taken in.
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

    def is_void(self, attempt: int, owner_epoch: int) -> bool:
        """Whether what is said in this attempt, on this owner's order, counts no longer."""
        return (attempt, owner_epoch) < self._valid_from

    def start(self, attempt: int, owner_epoch: int) -> None:
        """A later attempt, or one under a later owner, begins: what is lower is void from here on."""
        if self.ended is not None:
            return
        self._valid_from = max(self._valid_from, (attempt, owner_epoch))
        self.attempt = self._valid_from[0]

    def push(self, event: TokensEmitted, chunk: TokenChunk) -> bool:
        """Take in the tokens of a chunk of `event` that are not known yet; whether the answer changed."""
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
        """Take in the vector of the prompt; whether it counts."""
        if self.ended is not None or self.is_void(event.attempt, event.owner_epoch):
            return False
        self.worker_id, self.rank, self.vector = event.worker_id, event.rank, event.vector
        return True

    def end(self, event: ResponseEnded) -> bool:
        """Take in the end of the answer; whether it counts."""
        if self.gap or self.ended is not None or self.is_void(event.attempt, event.owner_epoch):
            return False
        self.ended = event
        return True


R = TypeVar("R", bound=Reply)


def apply(replies: Mapping[str, R], event: TokenEvent, group: str) -> list[R]:
    """Give an event of the slot to the replies, by request id, that it is about; those that changed.

    Groups share the slot, and two may use one request id: only what is from `group` is about these replies.
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
        case RouteTold() | CommandTold():
            return []  # answers a question or a command, and is no part of an answer
        case _:
            assert_never(event)
