"""Record the output of a response while it is rendered, so that its answer can be kept without reading it again.

The events of an answer lead to the same response as the records of the reply slot. Successive tokens of one part are
one event, because the fold of a response does not depend on how many tokens an event has.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from forebay.events.answers import AnswerContent, OutputEvent
from forebay.events.base import U32_BYTES
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import AttemptStarted, Embedded, ResponseEnded, TokenChunk, TokenLogprob, TokensEmitted
from forebay.ingress.streams import OnChange, Stream


@dataclass(slots=True)
class _Run:
    """Successive tokens of one part; `event` is their first event, with one chunk."""

    event: TokensEmitted
    token_ids: bytearray
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def finished(self) -> TokensEmitted:
        chunk = replace(self.event.chunks[0], token_ids=bytes(self.token_ids), logprobs=tuple(self.logprobs))
        return replace(self.event, chunks=(chunk,))


class Recorder:
    """Valid output of all parts of a response, in the order of the reply slot.

    `has_gap` is whether tokens are missing.
    """

    def __init__(self) -> None:
        self._events: list[OutputEvent] = []
        self._run: _Run | None = None
        self.has_gap = False

    def content(self, first: RequestSubmitted) -> AnswerContent:
        """Return the answer to the request whose first part is `first`."""
        self._end_run()
        return AnswerContent(submission=replace(first, sequence_hashes=b"", media=()), events=tuple(self._events))

    def add(self, event: OutputEvent) -> None:
        self._end_run()
        self._events.append(event)

    def add_tokens(self, event: TokensEmitted, chunk: TokenChunk, known: int) -> None:
        """Add the tokens of a chunk of `event` after the first `known` ones."""
        run = self._run
        if run is None or not _continues(run, event, chunk):
            self._end_run()
            first = replace(chunk, first_index=chunk.first_index + known, token_ids=b"", logprobs=())
            run = self._run = _Run(replace(event, chunks=(first,)), bytearray())
        run.token_ids += chunk.token_ids[known * U32_BYTES :]
        run.logprobs += chunk.logprobs[known:]

    def _end_run(self) -> None:
        if self._run is not None:
            self._events.append(self._run.finished())
            self._run = None


def _continues(run: _Run, event: TokensEmitted, chunk: TokenChunk) -> bool:
    first, known = run.event.chunks[0], len(run.token_ids) // U32_BYTES
    same_rank = (event.worker_id, event.rank, event.owner_epoch) == (
        run.event.worker_id,
        run.event.rank,
        run.event.owner_epoch,
    )
    return (
        same_rank
        and (chunk.request_id, chunk.attempt, chunk.text_only) == (first.request_id, first.attempt, first.text_only)
        and chunk.prefilled is None
        and len(run.logprobs) == (known if chunk.logprobs else 0)
    )


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
        known = self.next_index - chunk.first_index
        if not super().push(event, chunk):
            return False
        if self.gap:
            self._recorder.has_gap = True
        else:
            self._recorder.add_tokens(event, chunk, known)
        return True

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
