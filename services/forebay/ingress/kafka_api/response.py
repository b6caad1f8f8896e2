"""An answer on its way to a topic: a fold over its reply slot, without a clock.

Each event of the slot gives the same records whoever folds it. So an answer that another ingress gives again,
after it took the partition over, is the same record by record.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.core.state.reply_slot import ResponseState
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import Usage
from forebay.ingress.errors import ApiError
from forebay.ingress.kafka_api.request import ReplyAddress
from forebay.ingress.openai.embeddings import EmbeddingBody, embeddings, vector_of
from forebay.ingress.openai.render import ResponseFormatter, ServingInfo
from forebay.ingress.parsers.composer import Composer
from forebay.ingress.parsers.deltas import EMPTY_DELTA, OutputDelta, merge_deltas

EVENT_PREFIX, EVENT_SUFFIX = b"data: ", b"\n\n"
OK = 200


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A record of an answer. `index` counts them from 0; `last` marks the end."""

    index: int
    status: int
    last: bool
    value: bytes


@dataclass(slots=True)
class WindowEntry:
    """A record of the partition: answered, or where in the slot its answer can begin."""

    offset: int
    slot_from: int
    answered: bool = False
    diverted: bool = False


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Which record asks, where its answer goes, and what it is counted as."""

    entry: WindowEntry
    where: ReplyAddress
    endpoint: str


class PendingResponse(ResponseState):
    """A request on the log and its answer so far; some records need several.

    Attributes:
        over: the last piece of the record's answer was given out.
        error: why there is no answer, or no more of it.
        stopped: a stop string ended it, so the engine is not needed any more.
        submission: what is still to be submitted, None once it was.
    """

    __slots__ = ("error", "over", "place", "request_id", "stopped", "stream", "submission")

    def __init__(self, request_id: str, place: RequestOrigin, *, stream: bool) -> None:
        super().__init__()
        self.request_id = request_id
        self.place = place
        self.stream = stream
        self.over = False
        self.error: ApiError | None = None
        self.stopped = False
        self.submission: RequestSubmitted | None = None

    @property
    def parts(self) -> Sequence["PendingResponse"]:
        """All that the answer of its record needs, this one too."""
        return (self,)

    def pieces(self) -> list[ResponseRecord]:
        """What can be said now, after the reply changed."""
        raise NotImplementedError

    def fail(self, error: ApiError) -> ResponseRecord:
        """The last piece: an error, in OpenAI's shape."""
        raise NotImplementedError


class PendingCompletion(PendingResponse):
    """A chat or a completion."""

    __slots__ = ("_index", "_prompt_tokens", "_said", "_shape", "_text", "_usage_chunk")

    def __init__(
        self,
        request_id: str,
        place: RequestOrigin,
        prompt_tokens: int,
        shape: ResponseFormatter,
        text: Composer,
        *,
        stream: bool,
        usage_chunk: bool,
    ) -> None:
        super().__init__(request_id, place, stream=stream)
        self._prompt_tokens = prompt_tokens
        self._shape = shape
        self._text = text
        self._usage_chunk = usage_chunk
        self._said: list[OutputDelta] = []
        self._index = 0

    def pieces(self) -> list[ResponseRecord]:
        """As `PendingResponse` has it."""
        if self.over:
            return []
        try:
            return self._fold()
        except ApiError as error:  # of a parser
            return [self.fail(error)]

    def _fold(self) -> list[ResponseRecord]:
        said = EMPTY_DELTA
        if self.tokens:
            token_ids, logprobs = self.tokens, self.logprobs
            self.tokens, self.logprobs = [], []
            said = self._text.push(token_ids, logprobs)
            if self._text.stopped:
                self.stopped = True
                return self._close(said, "stop", 0)
        if self.gap:
            return [self.fail(ApiError(502, "tokens_missing", f"the answer has a gap after {self.next_index} tokens"))]
        ended = self.ended
        if ended is None:
            return self._open(said)
        if ended.error is not None:
            return [self.fail(ApiError(ended.error.status, ended.error.code, ended.error.message))]
        cached_tokens = 0 if ended.usage is None else ended.usage.cached_tokens
        return self._close(merge_deltas([said, self._text.finish()]), ended.finish_reason, cached_tokens)

    def fail(self, error: ApiError) -> ResponseRecord:
        """As `PendingResponse` has it."""
        self.over, self.error = True, error
        return self._piece(error.encoded(), last=True, status=error.status)

    def _open(self, said: OutputDelta) -> list[ResponseRecord]:
        if not self.stream:
            self._said.append(said)
            return []
        if not said and self._index:
            return []
        return [self._piece(_json_of(self._shape.delta(said, first=not self._index)))]

    def _close(self, said: OutputDelta, reason: str, cached_tokens: int) -> list[ResponseRecord]:
        self.over = True
        reason = self._text.reason(reason)
        usage = Usage(prompt_tokens=self._prompt_tokens, output_tokens=self.next_index, cached_tokens=cached_tokens)
        served = ServingInfo(self.request_id, self.worker_id, self.rank, self.attempt, self.prefilled)
        if not self.stream:
            whole = merge_deltas([*self._said, said])
            return [self._piece(self._shape.whole(whole, reason, usage, served), last=True)]
        pieces = self._open(said)
        pieces.append(self._piece(_json_of(self._shape.last(reason, served)), last=not self._usage_chunk))
        if self._usage_chunk:
            pieces.append(self._piece(_json_of(self._shape.usage(usage)), last=True))
        return pieces

    def _piece(self, value: bytes, *, last: bool = False, status: int = OK) -> ResponseRecord:
        piece = ResponseRecord(self._index, status, last, value)
        self._index += 1
        return piece


class EmbeddingBatch:
    """What the inputs of one record have in common."""

    def __init__(self, body: EmbeddingBody) -> None:
        self.body = body
        self.parts: list[PendingEmbedding] = []

    def end(self, error: ApiError | None = None) -> None:
        """Every part is over."""
        for part in self.parts:
            part.over, part.error = True, error

    def whole(self) -> ResponseRecord | None:
        """The answer, once every part has its vector."""
        if not all(part.packed for part in self.parts):
            return None
        prompt_tokens = sum(part.prompt_tokens for part in self.parts)
        value = embeddings(self.body, [part.packed for part in self.parts], prompt_tokens)
        self.end()
        return ResponseRecord(0, OK, True, value)


class PendingEmbedding(PendingResponse):
    """One input of an embedding request; the part that is ready last gives the answer of all."""

    __slots__ = ("_shared", "packed", "prompt_tokens")

    def __init__(self, request_id: str, place: RequestOrigin, prompt_tokens: int, shared: EmbeddingBatch) -> None:
        super().__init__(request_id, place, stream=False)
        self.packed = b""
        self.prompt_tokens = prompt_tokens
        self._shared = shared
        shared.parts.append(self)

    @property
    def parts(self) -> Sequence[PendingResponse]:
        """As `PendingResponse` has it."""
        return self._shared.parts

    def pieces(self) -> list[ResponseRecord]:
        """As `PendingResponse` has it."""
        if self.over or self.ended is None:
            return []
        try:
            self.packed = vector_of(self)
            whole = self._shared.whole()
        except ApiError as error:
            return [self.fail(error)]
        return [] if whole is None else [whole]

    def fail(self, error: ApiError) -> ResponseRecord:
        """As `PendingResponse` has it: one input that fails fails all."""
        self._shared.end(error)
        return ResponseRecord(0, error.status, True, error.encoded())


def _json_of(event: bytes) -> bytes:
    """The JSON of a server-sent event."""
    return event.removeprefix(EVENT_PREFIX).removesuffix(EVENT_SUFFIX)
