"""Responses of the Kafka API: a fold over the events of a reply slot, without a clock.

The records of a response depend only on the events. So a response that another ingress sends again after a takeover has
identical records.
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
    """A record of a response. `index` counts from 0; `last` marks the last record."""

    index: int
    status: int
    last: bool
    value: bytes


@dataclass(slots=True)
class WindowEntry:
    """A record of the partition in the window of incomplete requests.

    Attributes:
        offset: offset in the partition.
        slot_from: offset in the reply slot at which the response can begin.
        answered: whether the response is complete and acknowledged.
        diverted: whether the response goes to the default topic because its reply topic failed.
    """

    offset: int
    slot_from: int
    answered: bool = False
    diverted: bool = False


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Record of a request, destination of its response, and endpoint label for metrics."""

    entry: WindowEntry
    where: ReplyAddress
    endpoint: str


class PendingResponse(ResponseState):
    """A request and its response so far. A record with several inputs has several requests.

    Attributes:
        over: whether the last record of the response was returned.
        error: error that ended the response, None for success.
        stopped: whether a stop string ended the response.
        submission: event to submit, None once it was submitted.
    """

    __slots__ = ("error", "origin", "over", "request_id", "stopped", "stream", "submission")

    def __init__(self, request_id: str, origin: RequestOrigin, *, stream: bool) -> None:
        super().__init__()
        self.request_id = request_id
        self.origin = origin
        self.stream = stream
        self.over = False
        self.error: ApiError | None = None
        self.stopped = False
        self.submission: RequestSubmitted | None = None

    @property
    def parts(self) -> Sequence["PendingResponse"]:
        """All requests of the same record, including this one."""
        return (self,)

    def pieces(self) -> list[ResponseRecord]:
        """Return the records that can be sent after the reply changed."""
        raise NotImplementedError

    def fail(self, error: ApiError) -> ResponseRecord:
        """Return the last record: an error in OpenAI's format."""
        raise NotImplementedError


class PendingCompletion(PendingResponse):
    """Response of a chat or text completion."""

    __slots__ = ("_deltas", "_index", "_prompt_tokens", "_shape", "_text", "_usage_chunk")

    def __init__(
        self,
        request_id: str,
        origin: RequestOrigin,
        prompt_tokens: int,
        shape: ResponseFormatter,
        text: Composer,
        *,
        stream: bool,
        usage_chunk: bool,
    ) -> None:
        super().__init__(request_id, origin, stream=stream)
        self._prompt_tokens = prompt_tokens
        self._shape = shape
        self._text = text
        self._usage_chunk = usage_chunk
        self._deltas: list[OutputDelta] = []
        self._index = 0

    def pieces(self) -> list[ResponseRecord]:
        """Return the records that can be sent after the reply changed."""
        if self.over:
            return []
        try:
            return self._fold()
        except ApiError as error:  # of a parser
            return [self.fail(error)]

    def _fold(self) -> list[ResponseRecord]:
        delta = EMPTY_DELTA
        if self.tokens:
            token_ids, logprobs = self.tokens, self.logprobs
            self.tokens, self.logprobs = [], []
            delta = self._text.push(token_ids, logprobs)
            if self._text.stopped:
                self.stopped = True
                return self._close(delta, "stop", 0)
        if self.gap:
            return [
                self.fail(ApiError(502, "tokens_missing", f"the response has a gap after {self.next_index} tokens"))
            ]
        ended = self.ended
        if ended is None:
            return self._open(delta)
        if ended.error is not None:
            return [self.fail(ApiError(ended.error.status, ended.error.code, ended.error.message))]
        cached_tokens = 0 if ended.usage is None else ended.usage.cached_tokens
        return self._close(merge_deltas([delta, self._text.finish()]), ended.finish_reason, cached_tokens)

    def fail(self, error: ApiError) -> ResponseRecord:
        """Return the last record: an error in OpenAI's format."""
        self.over, self.error = True, error
        return self._piece(error.encoded(), last=True, status=error.status)

    def _open(self, delta: OutputDelta) -> list[ResponseRecord]:
        if not self.stream:
            self._deltas.append(delta)
            return []
        if not delta and self._index:
            return []
        return [self._piece(_json_of(self._shape.delta(delta, first=not self._index)))]

    def _close(self, delta: OutputDelta, reason: str, cached_tokens: int) -> list[ResponseRecord]:
        self.over = True
        reason = self._text.reason(reason)
        usage = Usage(prompt_tokens=self._prompt_tokens, output_tokens=self.next_index, cached_tokens=cached_tokens)
        served = ServingInfo(self.request_id, self.worker_id, self.rank, self.attempt, self.prefilled)
        if not self.stream:
            whole = merge_deltas([*self._deltas, delta])
            return [self._piece(self._shape.whole(whole, reason, usage, served), last=True)]
        pieces = self._open(delta)
        pieces.append(self._piece(_json_of(self._shape.last(reason, served)), last=not self._usage_chunk))
        if self._usage_chunk:
            pieces.append(self._piece(_json_of(self._shape.usage(usage)), last=True))
        return pieces

    def _piece(self, value: bytes, *, last: bool = False, status: int = OK) -> ResponseRecord:
        piece = ResponseRecord(self._index, status, last, value)
        self._index += 1
        return piece


class EmbeddingBatch:
    """State that the inputs of one embedding request share."""

    def __init__(self, body: EmbeddingBody) -> None:
        self.body = body
        self.parts: list[PendingEmbedding] = []

    def end(self, error: ApiError | None = None) -> None:
        """Complete all inputs, with an error or successfully."""
        for part in self.parts:
            part.over, part.error = True, error

    def whole(self) -> ResponseRecord | None:
        """Return the response once every input has its vector."""
        if not all(part.packed for part in self.parts):
            return None
        prompt_tokens = sum(part.prompt_tokens for part in self.parts)
        value = embeddings(self.body, [part.packed for part in self.parts], prompt_tokens)
        self.end()
        return ResponseRecord(0, OK, True, value)


class PendingEmbedding(PendingResponse):
    """One input of an embedding request. The last input to complete returns the response."""

    __slots__ = ("_shared", "packed", "prompt_tokens")

    def __init__(self, request_id: str, origin: RequestOrigin, prompt_tokens: int, shared: EmbeddingBatch) -> None:
        super().__init__(request_id, origin, stream=False)
        self.packed = b""
        self.prompt_tokens = prompt_tokens
        self._shared = shared
        shared.parts.append(self)

    @property
    def parts(self) -> Sequence[PendingResponse]:
        """All requests of the same record, including this one."""
        return self._shared.parts

    def pieces(self) -> list[ResponseRecord]:
        """Return the response once every input has its vector."""
        if self.over or self.ended is None:
            return []
        try:
            self.packed = vector_of(self)
            whole = self._shared.whole()
        except ApiError as error:
            return [self.fail(error)]
        return [] if whole is None else [whole]

    def fail(self, error: ApiError) -> ResponseRecord:
        """Fail all inputs, and return the error as the only record."""
        self._shared.end(error)
        return ResponseRecord(0, error.status, True, error.encoded())


def _json_of(event: bytes) -> bytes:
    """Return the JSON of a server-sent event."""
    return event.removeprefix(EVENT_PREFIX).removesuffix(EVENT_SUFFIX)
