"""Fold the events of a reply slot into the response for a client. Performs no I/O and reads no clock.

Theory of operation. A `ResponseState` collects the valid output of one request on the log. When it has changed, `step`
takes the new output and returns the events to send: for a stream those of each token position, otherwise nothing until
the whole response. The events depend on the first submission of the request, the id of the response and the order of
the records in the slot, but not on how many records a step takes. So every ingress makes the same events, from any
position. The id of an event is `choice-position-part`: the position is the number of tokens of the choice before the
event, and the part is the number of events of the choice since that token.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from forebay.core.state.reply_slot import ResponseState
from forebay.events.rendering import Api, Rendering
from forebay.events.request_ids import client_id_of, part_ids, whole_id
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import ResponseEnded, TokenLogprob, Usage
from forebay.ingress.errors import MESSAGES_PATH, RETRY_AFTER_S, RETRY_STATUSES, ApiError
from forebay.ingress.formatter import Formatter, ServingInfo, StreamEvent, WholeChoice
from forebay.ingress.messages.formatter import MessagesFormatter
from forebay.ingress.model import Model
from forebay.ingress.openai.embeddings import embeddings
from forebay.ingress.openai.tools import decode_selection
from forebay.ingress.parsers.composer import Composer, OutputPlan
from forebay.ingress.parsers.deltas import OutputDelta
from forebay.ingress.parsers.selection import ParseOptions, ParserFactory
from forebay.ingress.render import CompletionFormatter
from forebay.ingress.responses.formatter import ResponsesFormatter

FORMATTERS: Mapping[Api, type[Formatter]] = {
    "chat_completions": CompletionFormatter,
    "completions": CompletionFormatter,
    "responses": ResponsesFormatter,
    "messages": MessagesFormatter,
}


class ResponseFold(ABC):
    """Builds the response to one request of a client from the events of the reply slot.

    Attributes:
        request_id: id of the request of the client.
        ids: ids of the requests on the log, one per choice or input.
        cached_tokens: number of prompt tokens that the engine found in its cache; 0 until the response is over.
        is_over: whether the response is complete, successfully or with an error.
        error: error that ended the response; None for success, or if it is not over.
    """

    done = b""  # bytes after the last event of a stream that succeeded

    def __init__(self, first: RequestSubmitted, rendering: Rendering) -> None:
        self.rendering = rendering
        self.endpoint = rendering.api
        self.stream = rendering.stream
        self.prompt_tokens = rendering.prompt_tokens
        self.request_id = whole_id(first.request_id, rendering.parts)
        self.ids = part_ids(self.request_id, rendering.parts)
        self.cached_tokens = 0
        self.output_tokens = 0
        self.is_over = False
        self.error: ApiError | None = None
        self._failed_at: int | None = None
        self._missing = rendering.parts  # number of parts that are not over
        self._events: list[StreamEvent] = []  # of the current step

    @property
    def client_id(self) -> str:
        """Value of the header `x-request-id` of the response: the id that the client chose, otherwise a random one."""
        return client_id_of(self.request_id)

    def passed_tokens(self, index: int) -> int:
        """Return how many output tokens of the choice at this position the client has got, or gets with this step."""
        return 0

    @property
    def cancel_reason(self) -> str:
        """Reason to cancel the requests on the log that have not ended when the response is over; empty before that."""
        if not self.is_over:
            return ""
        return "stop" if self.error is None else self.error.code

    @property
    def is_final(self) -> bool:
        """Whether the response is over because of records on the log, so every reader of them reaches the same end."""
        return self.is_over and (self.error is None or self._failed_at is not None)

    def begin(self, response_id: str) -> list[StreamEvent]:
        """Set the id of the response before the first step, and return the events before any output."""
        return []

    def step(
        self, state: ResponseState, index: int = 0, *, before: int | None = None, has_end: bool = True
    ) -> list[StreamEvent]:
        """Take the output of one request on the log since the previous step, and return the events to send.

        The call removes the output from `state`. `index` is the position of the choice or input, from 0. To take only
        the output of the first records that `state` has read, `before` is the position of the output after them, and
        `has_end` whether they include its end.
        """
        if self.is_over or self.is_part_over(index):
            return []
        token_ids, logprobs = state.take(before)
        try:
            self._push(state, index, token_ids, logprobs)
            if has_end and not self.is_part_over(index):
                if state.gap:
                    lost = f"output tokens after the first {state.next_index} were lost; send the request again"
                    raise ApiError(502, "tokens_missing", lost)
                if state.ended is not None:
                    if (error := state.ended.error) is not None:
                        after_s = error.retry_after_s or RETRY_AFTER_S
                        raise ApiError(error.status, error.code, error.message, retry_after_s=after_s)
                    self._end(state, index, state.ended)
        except ApiError as error:  # also of a parser, or for a vector that is too short
            self.fail(error, index)
        events, self._events = self._events, []
        return events

    def fail(self, error: ApiError, index: int | None = None) -> None:
        """End the response with an error. `index` is the position of the part if its records have the error."""
        self.is_over, self.error, self._failed_at = True, error, index

    def error_body(self, error: ApiError) -> bytes:
        """Return the body of a response with the HTTP status of an error."""
        return error.encoded(MESSAGES_PATH if self.endpoint == "messages" else "")

    def error_events(self, error: ApiError) -> list[StreamEvent]:
        """Return the events that end a stream with an error, which have ids if the error is on the log."""
        return [StreamEvent(self.error_body(error))]

    @abstractmethod
    def is_part_over(self, index: int) -> bool:
        """Return whether the output of the choice or input at this position is complete."""

    def _push(  # noqa: B027 - tokens are no part of an embedding
        self, state: ResponseState, index: int, token_ids: list[int], logprobs: list[TokenLogprob | None]
    ) -> None:
        """Add the events for new output. Set `is_over` after the last one. Raises ApiError for unusable output."""

    @abstractmethod
    def _end(self, state: ResponseState, index: int, ended: ResponseEnded) -> None:
        """Add the events for the successful end of a request on the log. Raises ApiError if its output is missing."""


@dataclass(slots=True)
class _Choice:
    """State of one choice of a completion.

    Attributes:
        position: number of tokens so far.
        part: number of events since the last token.
        has_delta: whether the stream has a delta of the choice.
        deltas: the output so far, unless the response is a stream.
        whole: the output with the reason of its end and the workers; None before its end.
    """

    composer: Composer
    position: int = 0
    part: int = 0
    has_delta: bool = False
    deltas: list[OutputDelta] = field(default_factory=list)
    whole: WholeChoice | None = None


class CompletionFold(ResponseFold):
    """Builds the response to a completion request of any API, with one composer per choice."""

    formatter: Formatter

    def __init__(self, first: RequestSubmitted, rendering: Rendering, composers: Sequence[Composer]) -> None:
        super().__init__(first, rendering)
        self._choices = [_Choice(composer) for composer in composers]

    def begin(self, response_id: str) -> list[StreamEvent]:
        self.formatter = FORMATTERS[self.rendering.api](self.rendering, response_id)
        self.done = self.formatter.done
        return self._placed(0, self.formatter.begin()) if self.stream else []

    def passed_tokens(self, index: int) -> int:
        choice = self._choices[index]
        return choice.position if self.stream or choice.whole is not None else 0

    def is_part_over(self, index: int) -> bool:
        return self._choices[index].whole is not None

    def error_events(self, error: ApiError) -> list[StreamEvent]:
        events = self.formatter.error(error)
        if error is not self.error or self._failed_at is None:
            return events
        return self._placed(self._failed_at, events)

    def _push(
        self, state: ResponseState, index: int, token_ids: list[int], logprobs: list[TokenLogprob | None]
    ) -> None:
        choice = self._choices[index]
        composer = choice.composer
        if composer.is_joinable and not self.stream and not self.formatter.needs_positions:
            choice.position += len(token_ids)
            self.output_tokens += len(token_ids)
            choice.deltas.append(self._with_tokens(composer.push(token_ids), token_ids))
            return
        known = len(logprobs)
        for at, token_id in enumerate(token_ids):
            choice.position += 1
            choice.part = 0
            self.output_tokens += 1
            delta = composer.push([token_id], logprobs[at] if at < known else None)
            self._add(index, self._with_tokens(delta, [token_id]))
            if composer.stop:
                served = state.served_at(choice.position - 1)
                info = ServingInfo(self.ids[index], *served[1:], composer.stop)
                self._close(index, "stop", info)
                return

    def _with_tokens(self, delta: OutputDelta, token_ids: list[int]) -> OutputDelta:
        return msgspec.structs.replace(delta, token_ids=tuple(token_ids)) if self.formatter.needs_tokens else delta

    def _end(self, state: ResponseState, index: int, ended: ResponseEnded) -> None:
        assert ended.usage is not None, "a response ends with its usage or an error"
        choice = self._choices[index]
        if not index % self.rendering.choices_per_prompt:  # the choices of a prompt share it, so it counts once
            self.cached_tokens += ended.usage.cached_tokens
        self._add(index, choice.composer.finish())
        reason = "content_filter" if ended.filtered else ended.finish_reason
        info = ServingInfo(self.ids[index], state.worker_id, state.rank, state.attempt, state.prefilled)
        self._close(index, reason, info)

    def _add(self, index: int, delta: OutputDelta) -> None:
        """Add the events of a delta, none for an empty one after the first. Without a stream, keep the delta."""
        choice = self._choices[index]
        if not self.stream:
            choice.deltas.append(delta)
        elif delta or not choice.has_delta:
            choice.has_delta = True
            found = self.formatter.delta(index, delta)
            self._events += self._placed(index, found, counts=self.formatter.counts_each_event)

    def _close(self, index: int, reason: str, served: ServingInfo) -> None:
        choice, formatter = self._choices[index], self.formatter
        reason = choice.composer.reason(reason)
        choice.whole = WholeChoice(choice.deltas, reason, served)
        self._missing -= 1
        self.is_over = not self._missing
        if self.stream:
            found = formatter.close(index, reason, served)
            self._events += self._placed(index, found, counts=formatter.counts_each_event)
            if self.is_over:
                self._events += self._placed(index, formatter.finish(self._usage()))
        elif self.is_over:
            choices = [one.whole for one in self._choices if one.whole is not None]
            self._events.append(StreamEvent(formatter.whole(choices, self._usage())))

    def _placed(self, index: int, events: Sequence[StreamEvent], *, counts: bool = False) -> list[StreamEvent]:
        """Return the next events of a choice with their ids, and with the token counts so far if these are wanted."""
        choice, placed = self._choices[index], []
        for event in events:
            data = self.formatter.with_usage(event.data, self._usage()) if counts else event.data
            placed.append(StreamEvent(data, event.name, index, choice.position, choice.part))
            choice.part += 1
        return placed

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens, cached_tokens=self.cached_tokens
        )


class EmbeddingFold(ResponseFold):
    """Builds the response to an embedding request: one vector per input, in the order of the inputs."""

    def __init__(self, first: RequestSubmitted, rendering: Rendering) -> None:
        super().__init__(first, rendering)
        self._vectors = [b""] * rendering.parts

    def is_part_over(self, index: int) -> bool:
        return bool(self._vectors[index])

    def _end(self, state: ResponseState, index: int, ended: ResponseEnded) -> None:
        if not state.vector:
            raise ApiError(502, "embedding_missing", f"worker {state.worker_id or 'unknown'} returned no embedding")
        self._vectors[index] = state.vector
        self._missing -= 1
        if not self._missing:
            self._events.append(StreamEvent(embeddings(self.rendering, self._vectors)))
            self.is_over = True


class CallFold(ResponseFold):
    """Builds the response to a call: an event per JSON value of the endpoint, then `end` or `error`."""

    _response_id = ""

    def begin(self, response_id: str) -> list[StreamEvent]:
        self._response_id = response_id
        return []

    def passed_tokens(self, index: int) -> int:
        return self.output_tokens

    def is_part_over(self, index: int) -> bool:
        return self.is_over

    def error_events(self, error: ApiError) -> list[StreamEvent]:
        return [StreamEvent(self.error_body(error), "error", *self._place() if self.is_final else ())]

    def _push(
        self, state: ResponseState, index: int, token_ids: list[int], logprobs: list[TokenLogprob | None]
    ) -> None:
        count = len(token_ids)
        values, state.objects = state.objects[:count], state.objects[count:]
        for value in values:
            self.output_tokens += 1
            self._events.append(StreamEvent(value.encode(), "", 0, self.output_tokens))

    def _end(self, state: ResponseState, index: int, ended: ResponseEnded) -> None:
        assert ended.usage is not None, "a response ends with its usage or an error"
        self.cached_tokens, self.is_over = ended.usage.cached_tokens, True
        served = ServingInfo(self._response_id, state.worker_id, state.rank, ended.attempt)
        self._events.append(StreamEvent(msgspec.json.encode(served.plain()), "end", *self._place()))

    def _place(self) -> tuple[int, int, int]:
        return 0, self.output_tokens, 1


def fold_of(first: RequestSubmitted, rendering: Rendering, model: Model, parsers: ParserFactory) -> ResponseFold:
    """Return the empty response to a request, given its first part on the log and the rendering in it.

    Raises ApiError if a parser rejects the tools.
    """
    if rendering.api == "embeddings":
        return EmbeddingFold(first, rendering)
    if rendering.api == "endpoints":
        return CallFold(first, rendering)
    parsing = None
    if rendering.is_chat:
        parsing = ParseOptions(
            decode_selection(rendering.tools),
            rendering.is_open,
            structured=first.sampling.structured is not None,
            prompt=first.token_ids,
        )
    plan = OutputPlan(rendering.stops, parsing, first.sampling.logprobs, special=rendering.special)
    request_id, per_prompt = whole_id(first.request_id, rendering.parts), rendering.choices_per_prompt
    composers = []
    for index, name in enumerate(part_ids(request_id, rendering.parts)):
        echo = rendering.echo[index // per_prompt] if rendering.echo else ""
        composers.append(msgspec.structs.replace(plan, echo=echo).composer(model, parsers, name))
    return CompletionFold(first, rendering, composers)


def was_rejected(state: ResponseState) -> bool:
    """Return whether a request on the log was rejected because no worker had capacity, before it had any output."""
    error = None if state.ended is None else state.ended.error
    return error is not None and error.status in RETRY_STATUSES and not state.next_index
