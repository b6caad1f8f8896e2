"""An answer on its way to a topic: a fold over its reply slot, without a clock.

Each event of the slot gives the same records whoever folds it. So an answer that another ingress gives again,
after it took the partition over, is the same record by record.
"""

from dataclasses import dataclass

from forebay.core.replies import Reply
from forebay.events.tokens import Usage
from forebay.ingress.errors import ApiError
from forebay.ingress.render import Served, Shape
from forebay.ingress.text import TextAssembler

EVENT_PREFIX, EVENT_SUFFIX = b"data: ", b"\n\n"
OK = 200


@dataclass(frozen=True, slots=True)
class Piece:
    """A record of an answer. `index` counts them from 0; `last` marks the end."""

    index: int
    status: int
    last: bool
    value: bytes


class DoorAnswer(Reply):
    """The answer to one request.

    Attributes:
        over: its last piece was given out.
        error: why there is no answer, or no more of it.
        stopped: a stop string ended it, so the engine is not needed any more.
    """

    __slots__ = (
        "_index",
        "_prompt_tokens",
        "_said",
        "_shape",
        "_text",
        "_usage_chunk",
        "error",
        "over",
        "request_id",
        "stopped",
        "stream",
    )

    def __init__(
        self, request_id: str, prompt_tokens: int, shape: Shape, text: TextAssembler, *, stream: bool, usage_chunk: bool
    ) -> None:
        super().__init__()
        self.request_id = request_id
        self.stream = stream
        self.over = False
        self.error: ApiError | None = None
        self.stopped = False
        self._prompt_tokens = prompt_tokens
        self._shape = shape
        self._text = text
        self._usage_chunk = usage_chunk
        self._said: list[str] = []
        self._index = 0

    def pieces(self) -> list[Piece]:
        """What can be said now, after the reply changed."""
        if self.over:
            return []
        text = ""
        if self.tokens:
            token_ids, self.tokens = self.tokens, []
            text = self._text.push(token_ids)
            if self._text.stopped:
                self.stopped = True
                return self._close(text, "stop", 0)
        if self.gap:
            return [self.fail(ApiError(502, "tokens_missing", f"the answer has a gap after {self.next_index} tokens"))]
        ended = self.ended
        if ended is None:
            return self._open(text)
        if ended.error is not None:
            return [self.fail(ApiError(ended.error.status, ended.error.code, ended.error.message))]
        cached_tokens = 0 if ended.usage is None else ended.usage.cached_tokens
        return self._close(text + self._text.finish(), ended.finish_reason, cached_tokens)

    def fail(self, error: ApiError) -> Piece:
        """The last piece: an error, in OpenAI's shape."""
        self.over, self.error = True, error
        return self._piece(error.encoded(), last=True, status=error.status)

    def _open(self, text: str) -> list[Piece]:
        if not self.stream:
            self._said.append(text)
            return []
        if not text and self._index:
            return []
        return [self._piece(_json_of(self._shape.piece(text, first=not self._index)))]

    def _close(self, text: str, reason: str, cached_tokens: int) -> list[Piece]:
        self.over = True
        usage = Usage(prompt_tokens=self._prompt_tokens, output_tokens=self.next_index, cached_tokens=cached_tokens)
        served = Served(self.request_id, self.worker_id, self.rank, self.attempt)
        if not self.stream:
            whole = "".join((*self._said, text))
            return [self._piece(self._shape.whole(whole, reason, usage, served), last=True)]
        pieces = self._open(text)
        pieces.append(self._piece(_json_of(self._shape.last(reason, served)), last=not self._usage_chunk))
        if self._usage_chunk:
            pieces.append(self._piece(_json_of(self._shape.usage(usage)), last=True))
        return pieces

    def _piece(self, value: bytes, *, last: bool = False, status: int = OK) -> Piece:
        piece = Piece(self._index, status, last, value)
        self._index += 1
        return piece


def _json_of(event: bytes) -> bytes:
    """The JSON of a server-sent event."""
    return event.removeprefix(EVENT_PREFIX).removesuffix(EVENT_SUFFIX)
