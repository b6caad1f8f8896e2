"""The route `/v1/completions`: reads a request, runs its prompt, and writes the response of the imitated server.

The errors are those of vLLM 0.32, SGLang 0.5.23 and a plain server.
"""

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from forebay.events.requests import Sampling
from forebay.ingress.model import Decoder, Model
from tests.harness.openai_server.cache import Prefix
from tests.harness.openai_server.engine import EngineRequest, StandInEngine
from tests.harness.openai_server.settings import Faults, Flavor, ServerSettings
from tests.harness.openai_server.tokens import structure_of

LOGPROB = -0.7  # of the generated token, as with a mock engine; each further token is as much less likely
Tokens = list[int]


class ApiFailure(Exception):
    """A request is answered with an error.

    Args:
        param: parameter that is wrong; None for none.
    """

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


def invalid(message: str, param: str, value: int | None = None) -> ApiFailure:
    """Return the error for an invalid parameter, with a message like vLLM's."""
    shown = "" if value is None else f", value={value}"
    return ApiFailure(400, f"{message} (parameter={param}{shown})", param=param)


class StreamOptions(BaseModel):
    include_usage: bool | None = False


class CompletionBody(BaseModel):
    """Body of a completion: the fields that the stand-in reads. It accepts others, as the engines do."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: Tokens | str | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: Tokens | None = None
    temperature: float | None = None
    seed: int | None = None
    logprobs: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    request_id: str | None = None
    rid: str | None = None  # of SGLang
    lora_path: str | None = None  # of SGLang
    kv_transfer_params: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        """Check what vLLM checks before it reads the fields."""
        if not isinstance(data, dict):
            return data
        if data.get("max_tokens") is None:
            data = {**data, "max_tokens": 16}
        if data.get("prompt") in (None, ""):
            raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        if data.get("stream_options") and not data.get("stream"):
            raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
        if data.get("cache_salt") == "":
            raise invalid("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
        logprobs = data.get("logprobs")
        if isinstance(logprobs, int) and logprobs < -1:
            raise invalid("`logprobs` must be a positive value or -1.", "logprobs", logprobs)
        return data


class LoraBody(BaseModel):
    """Body of a request to load or unload an adapter."""

    lora_name: str
    lora_path: str = ""


def error_body(flavor: Flavor, failure: ApiFailure) -> dict[str, Any]:
    """Return the body of a response for an error."""
    error = {"message": str(failure), "type": failure.kind, "param": failure.param, "code": failure.status}
    return {"object": "error", **error} if flavor == "sglang" else {"error": error}


def validation_failure(error: RequestValidationError) -> ApiFailure:
    """Return the error for a body that cannot be read. The message lists the errors as vLLM's does."""
    errors = [{**one, "loc": _location(one["loc"])} for one in error.errors()]
    for one in errors:
        one.pop("ctx", None)
    lines = "\n".join(f"  {one}" for one in errors)
    label = "error" if len(errors) == 1 else "errors"
    return ApiFailure(400, f"{len(errors)} validation {label}:\n{lines}", "Bad Request", errors[0]["loc"])


def _location(parts: Sequence[int | str]) -> str:
    """Return the path of a field, without pydantic's names of the types of a union."""
    return ".".join(str(part) for part in parts if part not in ("str", "int") and "[" not in str(part))


def answer_failure(flavor: Flavor, failure: ApiFailure) -> JSONResponse:
    return JSONResponse(error_body(flavor, failure), failure.status)


def request_id_of(flavor: Flavor, body: CompletionBody, request: Request) -> str | None:
    """Return the id that the client gave to a completion; None for none."""
    if flavor == "sglang":
        return body.rid
    return request.headers.get("x-request-id", body.request_id)


class StreamCut(Exception):
    """The connection of a stream is closed, by a fault."""


class StopText:
    """Decodes output tokens, and finds stop strings."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._held = max((len(stop) - 1 for stop in stops), default=0)  # characters that may begin a stop string
        self._text = ""
        self._taken = 0
        self._end: int | None = None

    def push(self, token_ids: list[int], *, has_ended: bool) -> str | None:
        """Add tokens. Return the stop string that the output contains now, without which it ends."""
        before = max(0, len(self._text) - self._held)
        self._text += self._decoder.push(token_ids)
        for stop in self._stops:
            at = self._text.find(stop, before)
            if at >= 0:
                self._end = at
                return stop
        if has_ended:
            self._end = len(self._text)
        return None

    def take(self) -> str:
        """Return the new text. The end that may be the beginning of a stop string is returned later."""
        end = max(self._taken, len(self._text) - self._held) if self._end is None else self._end
        text = self._text[self._taken : end]
        self._taken = end
        return text


class Completion:
    """One request to `/v1/completions`.

    Args:
        request_id: id that the client gave; None for none.

    Raises:
        ApiFailure: the request is invalid.
    """

    def __init__(
        self,
        settings: ServerSettings,
        model: Model,
        engine: StandInEngine,
        faults: Callable[[], Faults],
        *,
        body: CompletionBody,
        request_id: str | None,
        model_name: str,
        lora: tuple[str, int] | None,
    ) -> None:
        self._settings = settings
        self._model = model
        self._engine = engine
        self._faults = faults
        self._body = body
        self._is_vllm = settings.flavor == "vllm"
        self._client_id = uuid.uuid4().hex if request_id is None else request_id
        self._id = f"cmpl-{self._client_id}" if self._is_vllm or request_id is None else request_id
        self._created = int(time.time())
        self._model_name = model_name
        self._shows_ids = bool(body.return_token_ids) and settings.flavor != "plain" and not faults().without_token_ids
        self._prompt = self._read_prompt()
        self._request = self._engine_request(lora)
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        self._text = StopText(model.decoder(() if body.skip_special_tokens else None), stops)
        # The output so far.
        self._token_ids: list[int] = []
        self._cached_tokens = 0
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._transfer: dict[str, Any] | None = None

    def _read_prompt(self) -> list[int]:
        prompt, longest, most = self._body.prompt, self._engine.max_model_len, self._body.max_tokens or 0
        assert prompt is not None
        if self._settings.flavor == "plain" and not isinstance(prompt, str):
            raise ApiFailure(400, "prompt must be a string", "invalid_request_error", "prompt")
        if most > longest:
            message = (
                f"max_tokens={most} cannot be greater than max_model_len={longest}. Please request fewer output tokens."
            )
            raise invalid(message, "max_tokens", most)
        if isinstance(prompt, str):
            prompt = self._model.encode(prompt, special=self._body.add_special_tokens)
        if len(prompt) > longest:
            message = (
                f"This model's maximum context length is {longest} tokens. However, your prompt contains {len(prompt)}"
                " input tokens, which exceeds this limit even without any output tokens. Please reduce the length"
                " of the input prompt."
            )
            raise invalid(message, "input_tokens", len(prompt))
        if not prompt:
            raise ApiFailure(400, "The decoder prompt cannot be empty", param="prompt")
        if max(prompt) >= self._model.vocabulary_size:
            raise ApiFailure(400, f"Token id {max(prompt)} is out of vocabulary")
        return list(prompt)

    def _engine_request(self, lora: tuple[str, int] | None) -> EngineRequest:
        body = self._body
        most = min(body.max_tokens or 0, self._engine.max_model_len - len(self._prompt))
        if most < 1:
            raise invalid(f"max_tokens must be at least 1, got {most}.", "max_tokens", most)
        if body.min_tokens > most:
            text = f"min_tokens must be less than or equal to max_tokens={most}, got {body.min_tokens}."
            raise ApiFailure(400, text)
        sampling = Sampling(
            max_tokens=most,
            min_tokens=body.min_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            seed=body.seed,
            ignore_eos=body.ignore_eos,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            structured=structure_of(body.model_dump(include={"structured_outputs", "response_format"})),
        )
        return EngineRequest(
            request_id=f"{self._id}-0-{uuid.uuid4().hex[:8]}",
            client_id=self._client_id,
            prompt=self._prompt,
            sampling=sampling,
            prefix=Prefix(body.cache_salt or "", *(lora or ())),
            transfer=body.kv_transfer_params,
        )

    async def stream(self) -> AsyncIterator[str]:
        """Yield the events of a stream. Raises StreamCut if a fault closes the connection."""
        is_first, offset = True, 0
        async for text, ids in self._run():
            if self._finish_reason == "error":
                failure = ApiFailure(500, "Internal server error", "InternalServerError")
                yield _event(error_body(self._settings.flavor, failure))
                yield "data: [DONE]\n\n"
                return
            choice = self._choice(text, ids, offset)
            offset += sum(len(token) for token in (choice["logprobs"] or {}).get("tokens", ()))
            if self._shows_ids or self._is_vllm:
                choice["prompt_token_ids"] = self._prompt if is_first and self._shows_ids else None
            if self._is_vllm:
                choice["token_ids"] = ids if self._shows_ids else None
            is_first = False
            yield _event({**self._head(), "choices": [choice]})
            cut = self._faults().cut_after_tokens
            if cut is not None and len(self._token_ids) >= cut:
                raise StreamCut
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield _event({**self._head(), "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    async def response(self) -> dict[str, Any]:
        """Return the whole response. Raises ApiFailure if the KV of the prompt could not be fetched."""
        text = "".join([text async for text, _ in self._run()])
        if self._finish_reason == "error":
            raise ApiFailure(500, "Internal server error", "InternalServerError")
        choice = self._choice(text, self._token_ids, 0)
        body = {**self._head(), "choices": [choice], "usage": self._usage()}
        if self._shows_ids or self._is_vllm:
            choice["prompt_token_ids"] = self._prompt if self._shows_ids else None
        if self._is_vllm:
            choice["token_ids"] = self._token_ids if self._shows_ids else None
            body["usage"].setdefault("prompt_tokens_details", None)
            body["kv_transfer_params"] = self._transfer
        return body

    async def _run(self) -> AsyncGenerator[tuple[str, list[int]], None]:
        """Yield text and tokens of each chunk of the response, and update the output before."""
        async with aclosing(self._engine.generate(self._request)) as deltas:
            async for delta in deltas:
                self._token_ids += delta.token_ids
                self._cached_tokens, self._transfer = delta.cached_tokens, delta.transfer
                self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
                stopped = self._text.push(delta.token_ids, has_ended=delta.finish_reason is not None)
                if stopped is not None and len(self._token_ids) >= self._body.min_tokens:
                    self._finish_reason, self._stop_reason = "stop", stopped
                yield self._text.take(), delta.token_ids
                if self._finish_reason is not None:
                    return

    def _choice(self, text: str, ids: list[int], offset: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": 0,
            "text": text,
            "logprobs": None if self._body.logprobs is None else self._logprobs(ids, self._body.logprobs, offset),
            "finish_reason": self._finish_reason,
        }
        if self._settings.flavor == "plain":
            return body
        body["stop_reason" if self._is_vllm else "matched_stop"] = self._stop_reason
        if self._shows_ids and not self._is_vllm:
            body["token_ids"] = ids
        return body

    def _logprobs(self, ids: list[int], count: int, offset: int) -> dict[str, Any]:
        tokens = [self._token(token_id) for token_id in ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [LOGPROB] * len(ids),
            "tokens": tokens,
            "top_logprobs": [self._top(token_id, max(1, count)) for token_id in ids],
        }

    def _top(self, token_id: int, count: int) -> dict[str, float]:
        """Return the most likely tokens at a position: the generated one, then others, as with a mock engine."""
        others = (other for other in self._engine.vocabulary if other != token_id)
        likeliest = [token_id, *(other for other, _ in zip(others, range(count - 1), strict=False))]
        return {self._token(other): LOGPROB * (at + 1) for at, other in enumerate(likeliest)}

    def _token(self, token_id: int) -> str:
        if self._body.return_tokens_as_token_ids and self._is_vllm:
            return f"token_id:{token_id}"
        text: str = self._model.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model_name}

    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": len(self._prompt),
            "total_tokens": len(self._prompt) + len(self._token_ids),
            "completion_tokens": len(self._token_ids),
        }
        if self._settings.prompt_tokens_details and self._settings.flavor != "plain":
            usage["prompt_tokens_details"] = {"cached_tokens": self._cached_tokens}
        return usage


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
