"""Fold the events of a reply slot into the response for a client. Performs no I/O and reads no clock.

Theory of operation. A `ResponseState` collects the valid output of a request on the log. Whenever it changed, the HTTP
API or the Kafka API calls `step`, which takes the new output and returns the JSON objects that the client can receive:

- of a stream, a chunk per call, and at the end also the chunk with the finish reason and the usage chunk;
- otherwise nothing until the end, and then the whole object.

After the last objects `is_over` is true, and `error` is the error that ended the response, if any.
"""

from abc import ABC, abstractmethod

from forebay.core.state.reply_slot import ResponseState
from forebay.events.tokens import TokenLogprob, Usage
from forebay.ingress.errors import RETRY_STATUSES, ApiError
from forebay.ingress.openai.embeddings import EmbeddingBody, embeddings
from forebay.ingress.openai.render import ResponseFormatter, ServingInfo
from forebay.ingress.openai.requests import ChatBody, TextBody
from forebay.ingress.parsers.composer import Composer
from forebay.ingress.parsers.deltas import EMPTY_DELTA, OutputDelta, merge_deltas


class ResponseFold(ABC):
    """Response to one client request.

    Args:
        endpoint: label of the endpoint in metrics.
        request_id: id of the request for its client.
        prompt_tokens: number of prompt tokens, of all inputs.
        stream: whether the response is a stream of chunks.

    Attributes:
        cached_tokens: prompt tokens that the engine found in its cache; 0 until the end.
        is_over: whether the response is complete.
        error: error that ended the response, None for success.
    """

    def __init__(self, endpoint: str, request_id: str, prompt_tokens: int, *, stream: bool = False) -> None:
        self.endpoint = endpoint
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.stream = stream
        self.cached_tokens = 0
        self.is_over = False
        self.error: ApiError | None = None

    @property
    def cancel_reason(self) -> str:
        """Reason for cancelling a request on the log that has not ended; empty while the response is not over."""
        if not self.is_over:
            return ""
        return "stop" if self.error is None else self.error.code

    def step(self, state: ResponseState, index: int = 0) -> list[bytes]:
        """Take the output since the previous step, and return the JSON objects to send.

        Args:
            state: output of a request on the log; its tokens are taken away.
            index: position of the input that the request on the log belongs to, from 0.
        """
        if self.is_over:
            return []
        token_ids, logprobs = state.tokens, state.logprobs
        state.tokens, state.logprobs = [], []
        try:
            objects = self._push(state, index, token_ids, logprobs)
        except ApiError as error:  # of a parser, or of a vector that is too short
            self.fail(error)
            return []
        if not self.is_over:
            if state.gap:
                self.fail(ApiError(502, "tokens_missing", f"the response has a gap after {state.next_index} tokens"))
            elif state.ended is not None and (reported := state.ended.error) is not None:
                self.fail(ApiError(reported.status, reported.code, reported.message))
        return objects

    def fail(self, error: ApiError) -> None:
        """End the response with an error."""
        self.is_over, self.error = True, error

    @abstractmethod
    def _push(
        self, state: ResponseState, index: int, token_ids: list[int], logprobs: list[TokenLogprob]
    ) -> list[bytes]:
        """Return the JSON objects for new output. Sets `is_over` after the last one. Raises ApiError."""


class CompletionFold(ResponseFold):
    """Response of a chat or text completion.

    Args:
        request_id: id of the request and of the response.
        body: the body.
        prompt_tokens: number of prompt tokens.
        composer: turns output tokens into deltas.
        created_s: Unix time of the response in seconds.
    """

    def __init__(
        self, request_id: str, body: ChatBody | TextBody, prompt_tokens: int, composer: Composer, created_s: int
    ) -> None:
        chat = isinstance(body, ChatBody)
        endpoint = "chat_completions" if chat else "completions"
        super().__init__(endpoint, request_id, prompt_tokens, stream=bool(body.stream))
        self._formatter = ResponseFormatter(
            chat=chat, response_id=request_id, model=body.model, created=created_s, names_worker=body.names_worker
        )
        self._composer = composer
        self._includes_usage = body.includes_usage
        self._has_chunk = False
        self._deltas: list[OutputDelta] = []

    def _push(
        self, state: ResponseState, index: int, token_ids: list[int], logprobs: list[TokenLogprob]
    ) -> list[bytes]:
        delta, ended = EMPTY_DELTA, state.ended
        if token_ids:
            delta = self._composer.push(token_ids, logprobs)
            if self._composer.stopped:
                return self._close(state, delta, "stop")
        if ended is not None and ended.error is None:
            assert ended.usage is not None, "a response ends with its usage or an error"
            self.cached_tokens = ended.usage.cached_tokens
            return self._close(state, merge_deltas([delta, self._composer.finish()]), ended.finish_reason)
        return self._add(delta) if token_ids else []

    def _add(self, delta: OutputDelta) -> list[bytes]:
        """Return the chunk of a delta, even of an empty one if it is the first. Without a stream, keep the delta."""
        if not self.stream:
            self._deltas.append(delta)
            return []
        if not delta and self._has_chunk:
            return []
        chunk = self._formatter.delta(delta, first=not self._has_chunk)
        self._has_chunk = True
        return [chunk]

    def _close(self, state: ResponseState, delta: OutputDelta, reason: str) -> list[bytes]:
        self.is_over = True
        formatter, reason = self._formatter, self._composer.reason(reason)
        usage = Usage(
            prompt_tokens=self.prompt_tokens, output_tokens=state.next_index, cached_tokens=self.cached_tokens
        )
        served = ServingInfo(self.request_id, state.worker_id, state.rank, state.attempt, state.prefilled)
        objects = self._add(delta)
        if not self.stream:
            return [formatter.whole(merge_deltas(self._deltas), reason, usage, served)]
        objects.append(formatter.last(reason, served))
        if self._includes_usage:
            objects.append(formatter.usage(usage))
        return objects


class EmbeddingFold(ResponseFold):
    """Response of an embedding request: one vector per input, in order.

    Args:
        request_id: id of the request.
        body: the body.
        prompt_tokens: number of prompt tokens of all inputs.
        inputs: number of inputs.
    """

    def __init__(self, request_id: str, body: EmbeddingBody, prompt_tokens: int, inputs: int) -> None:
        super().__init__("embeddings", request_id, prompt_tokens)
        self._body = body
        self._vectors = [b""] * inputs
        self._missing = inputs

    def _push(
        self, state: ResponseState, index: int, token_ids: list[int], logprobs: list[TokenLogprob]
    ) -> list[bytes]:
        if state.ended is None or state.ended.error is not None or self._vectors[index]:
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
    """Return whether the request was rejected because no worker had capacity."""
    error = None if state.ended is None else state.ended.error
    return error is not None and error.status in RETRY_STATUSES and not state.next_index
