"""Requests to SGLang's own API `/generate`, which accepts and returns token ids.

SGLang's completions API returns text only.
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from forebay.events.requests import Sampling
from forebay.events.tokens import ResponseError, TokenLogprob
from forebay.workers.engine import EngineError
from forebay.workers.engines.attached.api import Call, Delta
from forebay.workers.engines.attached.errors import Rejected, StreamCut, message_of
from forebay.workers.engines.attached.server import MALFORMED, Server
from forebay.workers.engines.model_directory import one_line
from forebay.workers.engines.sglang import requests

PATH = "/generate"


class _Meta(msgspec.Struct):
    finish_reason: dict[str, Any] | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    output_token_logprobs: list[Any] = []
    output_top_logprobs: list[Any] = []


class _Output(msgspec.Struct):
    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: msgspec.Raw | None = None


_DECODER = msgspec.json.Decoder(_Output)


class Generate:
    """API `/generate` of one SGLang server.

    Args:
        server: client of the server.
    """

    takes_token_ids = True
    returns_token_ids = True
    salts_cache = True

    def __init__(self, server: Server) -> None:
        self._server = server

    async def probe(self, prompt: list[int], text: str) -> None:
        """Run a small request. See `Api.probe`."""
        del text
        call = Call(token_ids=prompt, sampling=Sampling(max_tokens=1, temperature=0.0), request_id="")
        try:
            found = self._read(await self._server.post(PATH, self.body(call, stream=False)))
        except Rejected as rejected:
            raise EngineError(f"the server {self._server.url} rejected the first prompt: {rejected}") from None
        except StreamCut as cut:
            raise EngineError(f"the server {self._server.url} sent no output: {cut}") from None
        if not found.output_ids:
            raise EngineError(f"the server {self._server.url} returned no token ids; use SGLang 0.5 or newer")

    async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        """Run a request, and yield its output. See `Api.generate`."""
        top, sent, is_over = call.sampling.logprobs, 0, False
        async with self._server.stream(PATH, self.body(call, stream=True), {}) as events:
            async for data in events:
                found = self._read(data)
                meta = found.meta_info
                if meta is None or found.output_ids is None:
                    raise StreamCut("an event of the stream has no token ids")
                reason = meta.finish_reason or {}
                if reason.get("type") == "abort":
                    raise Rejected(requests.abort_error(reason))
                # By default each event repeats the whole output. With --incremental-streaming-output it has the new
                # tokens only.
                is_whole = len(found.output_ids) == meta.completion_tokens
                new = found.output_ids[sent:] if is_whole else found.output_ids
                logprobs: tuple[TokenLogprob, ...] = ()
                if top is not None and new:
                    last = {
                        "output_token_logprobs": meta.output_token_logprobs[-len(new) :],
                        "output_top_logprobs": meta.output_top_logprobs[-len(new) :],
                    }
                    logprobs = requests.token_logprobs(last, top)
                sent += len(new)
                is_over = bool(reason)
                yield Delta(
                    token_ids=new,
                    logprobs=logprobs,
                    finish_reason=str(reason.get("type", "")),
                    cached_tokens=meta.cached_tokens,
                )
        if not is_over:
            raise StreamCut("the stream ended without a finish reason")

    def body(self, call: Call, *, stream: bool) -> Mapping[str, Any]:
        """Return the body of a request. Raises Rejected if its structured output is invalid."""
        try:
            sampling = requests.sampling_arguments(call.sampling)
        except ValueError as error:
            message = one_line(error)
            raise Rejected(ResponseError(status=400, code="invalid_request", message=message)) from None
        body: dict[str, Any] = {
            "input_ids": call.token_ids,
            "sampling_params": sampling,
            "stream": stream,
            **requests.logprob_arguments(call.sampling),
        }
        if call.request_id:
            body["rid"] = call.request_id
        if call.lora_name:
            body["lora_path"] = call.lora_name
        if call.cache_salt:
            body["cache_salt"] = call.cache_salt
        return body

    def _read(self, data: bytes) -> _Output:
        try:
            found = _DECODER.decode(data)
        except MALFORMED as error:
            raise StreamCut(f"the server sent malformed output: {one_line(error)}") from error
        if found.error is not None:
            message = message_of(data)
            raise Rejected(ResponseError(status=502, code="engine_error", message=message))
        return found
