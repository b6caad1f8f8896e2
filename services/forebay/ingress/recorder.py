"""Record the output of a response while it is rendered, so that its answer can be kept without reading it again.

The events of an answer lead to the same response as the records of the reply slot. Successive tokens of one part are
one event, because the fold of a response does not depend on how many tokens an event has.
"""

from msgspec.structs import replace

from forebay.events.answers import AnswerContent, OutputEvent
from forebay.events.base import U32_BYTES
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import AttemptStarted, Embedded, ResponseEnded, TokenChunk, TokenLogprob, TokensEmitted
from forebay.ingress.streams import OnChange, Stream


class Recorder:
    """Valid output of all parts of a response, in the order of the reply slot.

    `has_gap` is whether tokens are missing.
    """

    def __init__(self) -> None:
        self.has_gap = False
        self._events: list[OutputEvent] = []
        self._first: TokensEmitted | None = None  # of successive tokens of one part, without the tokens
        self._key: object = None  # equal for tokens that become one event
        self._token_ids = bytearray()
        self._logprobs: list[TokenLogprob] = []

    def content(self, first: RequestSubmitted, *, has_failed: bool) -> AnswerContent:
        """Return the answer to the request whose first part is `first`."""
        self._add_tokens()
        submission = replace(first, sequence_hashes=b"", media=())
        return AnswerContent(submission=submission, events=tuple(self._events), has_failed=has_failed)

    def add(self, event: OutputEvent) -> None:
        self._add_tokens()
        self._events.append(event)

    def add_tokens(self, event: TokensEmitted, chunk: TokenChunk, known: int) -> None:
        """Add the tokens of a chunk of `event` after the first `known` ones."""
        key = chunk.request_id, chunk.attempt, event.worker_id, event.rank, event.owner_epoch, bool(chunk.logprobs)
        if key != self._key or chunk.prefilled is not None:
            self._add_tokens()
            first = replace(chunk, first_index=chunk.first_index + known, token_ids=b"", logprobs=(), objects=())
            self._first, self._key = replace(event, chunks=(first,)), key
        self._token_ids += chunk.token_ids[known * U32_BYTES :]
        self._logprobs += chunk.logprobs[known:]
        self._objects += chunk.objects[known:]

    def _add_tokens(self) -> None:
        if self._first is not None:
            (chunk,) = self._first.chunks
            output = {"logprobs": tuple(self._logprobs), "objects": tuple(self._objects)}
            chunk = replace(chunk, token_ids=bytes(self._token_ids), **output)
            self._events.append(replace(self._first, chunks=(chunk,)))
        self._first, self._key, self._token_ids, self._logprobs = None, None, bytearray(), []
        self._objects: list[str] = []


class RecordedStream(Stream):
    """Stream that passes its valid output to a recorder."""

    __slots__ = ("_recorder", "_request_id")

    def __init__(self, key: int, request_id: str, recorder: Recorder, on_change: OnChange | None = None) -> None:
        super().__init__(key, on_change)
        self._request_id = request_id
        self._recorder = recorder

    def start(self, attempt: int, owner_epoch: int) -> None:
        super().start(attempt, owner_epoch)
        if owner_epoch >= 0 and self.ended is None:  # otherwise a chunk of the attempt starts it again
            event = AttemptStarted(request_id=self._request_id, attempt=attempt, owner_epoch=owner_epoch, worker_id="-")
            self._recorder.add(replace(event, reply_key=self.key))

    def push(self, event: TokensEmitted, chunk: TokenChunk) -> bool:
        attempt, known = self.attempt, self.next_index - chunk.first_index
        has_changed = super().push(event, chunk)
        if self.gap:
            self._recorder.has_gap = True
        elif has_changed or self.attempt > attempt:  # without a new token, a chunk may start an attempt
            self._recorder.add_tokens(event, chunk, known)
        return has_changed

    def embed(self, event: Embedded) -> bool:
        is_set = super().embed(event)
        if is_set:
            self._recorder.add(event)
        return is_set

    def end(self, event: ResponseEnded) -> bool:
        is_set = super().end(event)
        if is_set:
            self._recorder.add(event)
        return is_set
