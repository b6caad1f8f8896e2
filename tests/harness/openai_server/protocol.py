"""Requests and errors of the stand-in, as vLLM 0.32, SGLang 0.5.23 and a plain server have them."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from tests.harness.openai_server.settings import Flavor

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
    continuous_usage_stats: bool | None = False


class CompletionBody(BaseModel):
    """Body of a completion: the fields that the stand-in reads. It accepts others, as the engines do."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: list[Tokens] | Tokens | str | list[str] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: Tokens | None = None
    temperature: float | None = None
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    echo: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    priority: int = 0
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
    """Body of a request to load or unload an adapter. SGLang's is the same, without `load_inplace`."""

    lora_name: str
    lora_path: str = ""
    load_inplace: bool = False


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
    """Return the response for an error."""
    return JSONResponse(error_body(flavor, failure), failure.status)


def request_id_of(flavor: Flavor, body: CompletionBody, request: Request) -> str | None:
    """Return the id that the client gave to a completion; None for none."""
    if flavor == "sglang":
        return body.rid
    return request.headers.get("x-request-id", body.request_id)
