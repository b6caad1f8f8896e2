"""Fold the events of a reply slot into the response for a client. Performs no I/O and reads no clock.

Theory of operation. A `ResponseState` collects the valid output of one request on the log. When it has changed, the
HTTP API or the Kafka API calls `step`, which takes the new output and returns the JSON objects to send: for a stream
one chunk per call, at the end of a choice also a chunk with its finish reason, and at last the usage chunk; otherwise
nothing until the whole response object.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from forebay.core.state.reply_slot import ResponseState
from forebay.events.request_ids import choice_ids, client_id_of, part_id
from forebay.events.tokens import TokenLogprob, Usage
from forebay.ingress.errors import RETRY_AFTER_S, RETRY_STATUSES, ApiError
from forebay.ingress.formatter import ServingInfo
from forebay.ingress.openai.embeddings import EmbeddingBody, embeddings
from forebay.ingress.openai.requests import ChatBody, TextBody
from forebay.ingress.parsers.composer import Composer
from forebay.ingress.parsers.deltas import EMPTY_DELTA, OutputDelta, merge_deltas
from forebay.ingress.render import ResponseFormatter, with_usage


class ResponseFold(ABC):
    """Builds the response to one request of a client from the events of the reply slot.

    Attributes:
        ids: ids of the requests on the log, one per choice or input.
        cached_tokens: number of prompt tokens that the engine found in its cache; 0 until the response is over.
        is_over: whether the response is complete, successfully or with an error.
        error: error that ended the response; None for success, or if it is not over.
    """

    def __init__(
        self, endpoint: str, request_id: str, ids: Sequence[str], prompt_tokens: int, *, stream: bool = False
    ) -> None:
        self.endpoint = endpoint
        self.request_id = request_id
        self.ids = ids
        self.prompt_tokens = prompt_tokens
        self.stream = stream
        self.cached_tokens = 0
        self.output_tokens = 0
        self.is_over = False
        self.error: ApiError | None = None

    @property
    def client_id(self) -> str:
        """Value of the header `x-request-id` of the response: the id that the client chose, otherwise a random one."""
        return client_id_of(self.request_id)

    @property
    def cancel_reason(self) -> str:
        """Reason to cancel the requests on the log that have not ended when the response is over; empty before that."""
        if not self.is_over:
            return ""
        return "stop" if self.error is None else self.error.code

    def step(self, state: ResponseState, index: int = 0) -> list[bytes]:
        """Take the output of one request on the log since the previous step, and return the JSON objects to send.

        The call removes the output from `state`. `index` is the position of the choice or input, from 0.
        """
        if self.is_over or self.is_part_over(index):
            return []
        token_ids, logprobs = state.tokens, state.logprobs
        state.tokens, state.logprobs = [], []
        try:
            objects = self._push(state, index, token_ids, logprobs)
        except ApiError as error:  # raised by a parser, or for a vector that is too short
            self.fail(error)
            return []
        if not self.is_over and not self.is_part_over(index):
            if state.gap:
                lost = f"output tokens after the first {state.next_index} were lost; send the request again"
                self.fail(ApiError(502, "tokens_missing", lost))
            elif state.ended is not None and (reported := state.ended.error) is not None:
                after_s = reported.retry_after_s or RETRY_AFTER_S
                self.fail(ApiError(reported.status, reported.code, reported.message, retry_after_s=after_s))
        return objects

    def fail(self, error: ApiError) -> None:
        self.is_over, self.error = True, error

    @abstractmethod
    def is_part_over(self, index: int) -> bool:
        """Return whether the output of the choice or input at this position is complete."""

    @abstractmethod
    def _push(
        self, state: ResponseState, index: int, token_ids: list[int], logprobs: list[TokenLogprob]
    ) -> list[bytes]:
        """Return the JSON objects for new output. Set `is_over` after the last one.

        Raises ApiError if the output is unusable, for example if a parser fails or an embedding is missing.
        """


class _Choice:
    """State of one choice of a completion. `served` is None until it is complete.

    `deltas` (output so far) and `content` (the complete choice) are used only if the response is not a stream.
    """

    __slots__ = ("composer", "content", "deltas", "formatter", "has_chunk", "served")

    def __init__(self, composer: Composer, formatter: ResponseFormatter) -> None:
        self.composer = composer
        self.formatter = formatter
        self.served: ServingInfo | None = None
        self.has_chunk = False
        self.deltas: list[OutputDelta] = []
        self.content: dict[str, Any] = {}


class CompletionFold(ResponseFold):
    """Builds the response to a chat or text completion request, with one composer per choice."""

    def __init__(
        self,
        request_id: str,
        body: ChatBody | TextBody,
        prompt_tokens: int,
        composers: Sequence[Composer],
        created_s: int,
    ) -> None:
        ids = choice_ids(request_id, len(composers))
        super().__init__(body.endpoint, request_id, ids, prompt_tokens, stream=bool(body.stream))
        self._per_prompt = body.choices_per_prompt
        self._choices = [
            _Choice(
                composer,
                ResponseFormatter(
                    chat=isinstance(body, ChatBody),
                    response_id=request_id,
                    model=body.model,
                    created=created_s,
                    index=index,
                    names_worker=body.names_worker,
                ),
            )
            for index, composer in enumerate(composers)
        ]
        self._missing = len(composers)
        self._includes_usage = body.includes_usage
        self._counts_each_chunk = body.counts_each_chunk

    def is_part_over(self, index: int) -> bool:
        return self._choices[index].served is not None

    def _push(
        self, state: ResponseState, index: int, token_ids: list[int], logprobs: list[TokenLogprob]
    ) -> list[bytes]:
        choice, delta, ended = self._choices[index], EMPTY_DELTA, state.ended
        self.output_tokens += len(token_ids)
        if token_ids:
            delta = choice.composer.push(token_ids, logprobs)
            if choice.composer.stop:
                return self._close(state, index, delta, "stop")
        if ended is not None and ended.error is None:
            assert ended.usage is not None, "a response ends with its usage or an error"
            if not index % self._per_prompt:  # the choices of a prompt share it, so it counts once
                self.cached_tokens += ended.usage.cached_tokens
            rest = choice.composer.finish()
            reason = "content_filter" if ended.filtered else ended.finish_reason
            return self._close(state, index, merge_deltas([delta, rest]) if rest else delta, reason)
        return self._add(choice, delta) if token_ids else []

    def _add(self, choice: _Choice, delta: OutputDelta) -> list[bytes]:
        """Return the stream chunk of a delta, but none for an empty one after the first. Without a stream, keep it."""
        if not self.stream:
            choice.deltas.append(delta)
            return []
        if not delta and choice.has_chunk:
            return []
        chunk = choice.formatter.delta(delta, first=not choice.has_chunk)
        choice.has_chunk = True
        return [with_usage(chunk, self._usage()) if self._counts_each_chunk else chunk]

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens, cached_tokens=self.cached_tokens
        )

    def _close(self, state: ResponseState, index: int, delta: OutputDelta, reason: str) -> list[bytes]:
        choice = self._choices[index]
        self._missing -= 1
        self.is_over = not self._missing
        formatter, reason = choice.formatter, choice.composer.reason(reason)
        served = choice.served = ServingInfo(
            self.ids[index], state.worker_id, state.rank, state.attempt, state.prefilled, choice.composer.stop
        )
        objects = self._add(choice, delta)
        usage = self._usage()
        if not self.stream:
            choice.content = formatter.choice(merge_deltas(choice.deltas), reason)
            choice.deltas = []
            if not self.is_over:
                return []
            all_served = [one.served for one in self._choices if one.served is not None]
            return [formatter.whole([one.content for one in self._choices], usage, all_served)]
        last = formatter.last(reason, served)
        objects.append(with_usage(last, usage) if self._counts_each_chunk else last)
        if self.is_over and self._includes_usage:
            objects.append(formatter.usage(usage))
        return objects


class EmbeddingFold(ResponseFold):
    """Builds the response to an embedding request: one vector per input, in the order of the inputs."""

    def __init__(self, request_id: str, body: EmbeddingBody, prompt_tokens: int, inputs: int) -> None:
        ids = [part_id(request_id, index) for index in range(inputs)]
        super().__init__(body.endpoint, request_id, ids, prompt_tokens)
        self._body = body
        self._vectors = [b""] * inputs
        self._missing = inputs

    def is_part_over(self, index: int) -> bool:
        return bool(self._vectors[index])

    def _push(
        self, state: ResponseState, index: int, token_ids: list[int], logprobs: list[TokenLogprob]
    ) -> list[bytes]:
        if state.ended is None or state.ended.error is not None:
            return []
        if not state.vector:
            raise ApiError(502, "embedding_missing", f"worker {state.worker_id or 'unknown'} returned no embedding")
        self._vectors[index] = state.vector
        self._missing -= 1
        if self._missing:
            return []
        whole = embeddings(self._body, self._vectors, self.prompt_tokens)
        self.is_over = True
        return [whole]


def was_rejected(state: ResponseState) -> bool:
    """Return whether a request on the log was rejected because no worker had capacity, before it had any output."""
    error = None if state.ended is None else state.ended.error
    return error is not None and error.status in RETRY_STATUSES and not state.next_index
