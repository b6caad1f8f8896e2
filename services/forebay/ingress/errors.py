"""Errors of the APIs: an HTTP status, a stable code, and a body in the format of OpenAI or Anthropic."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from starlette.types import Send

RETRY_STATUSES = frozenset({429, 503})  # temporary: the same request may succeed later
FINAL_STATUSES = frozenset({409, 501})  # official clients send the request again, unless a header forbids it
MESSAGE_CHARS_MAX = 4_096  # messages quote names from the request, which may be megabytes long
PARAM_CHARS_MAX = 256
UNSUPPORTED_CODING = "unsupported_content_encoding"
ACCEPTED_CODING = "gzip"
ID_HEADERS = ("x-request-id", "request-id")  # the second one is Anthropic's
MESSAGES_PATH = "/v1/messages"  # errors of this path and those below have Anthropic's format
MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
RETRY_AFTER_S = 1  # load reports arrive ten times per second; a lost owner is replaced within seconds


class ApiError(Exception):
    """The request cannot be served. A client receives the exception as an error response.

    Args:
        code: name of the error for programs, which does not change between versions.
        message: what failed and what to do, truncated to `MESSAGE_CHARS_MAX`.
        param: path of the invalid parameter, None if the error concerns no parameter.
        retry_after_s: sent with status 429 and 503.
    """

    models: list[str] | None = None  # of `model_required`, for clients that send a request for each

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, *, retry_after_s: int = RETRY_AFTER_S
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status
        self.code = code
        self.message = message[:MESSAGE_CHARS_MAX]
        self.param = param and param[:PARAM_CHARS_MAX]

    def headers(self) -> dict[str, str]:
        if self.code == UNSUPPORTED_CODING:
            return {"accept-encoding": ACCEPTED_CODING}
        if self.status in FINAL_STATUSES:
            return {"x-should-retry": "false"}
        return {"www-authenticate": "Bearer"} if self.status == 401 else retry_headers(self.status, self.retry_after_s)

    def body(self, path: str = "", request_id: str = "") -> dict[str, Any]:
        """Return the body of an error response, in the format of the API that the path of the request belongs to."""
        if is_of_messages(path):
            kind = MESSAGES_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            error = {"type": kind, "message": self.message, "details": {"error_code": self.code}}
            return {"type": "error", "error": error, "request_id": request_id or None}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        more = {} if self.models is None else {"models": self.models}
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **more}}

    def encoded(self, path: str = "", request_id: str = "") -> bytes:
        return msgspec.json.encode(self.body(path, request_id))

    def event(self, path: str) -> bytes:
        """Return the error as the last server-sent event of a stream."""
        return (b"event: error\ndata: " if is_of_messages(path) else b"data: ") + self.encoded(path) + b"\n\n"

    def raw_headers(self, body: bytes, *, request_id: str = "", closes: bool = False) -> list[tuple[bytes, bytes]]:
        headers = {"content-type": "application/json", "content-length": str(len(body)), **self.headers()}
        if request_id:
            headers |= dict.fromkeys(ID_HEADERS, request_id)
        if closes:
            headers["connection"] = "close"
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    async def send(self, send: "Send", request_id: str = "", body: bytes = b"", *, closes: bool = False) -> None:
        """Send the error as an HTTP response. Its body is in OpenAI's format unless it is given."""
        body = body or self.encoded()
        headers = self.raw_headers(body, request_id=request_id, closes=closes)
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def is_of_messages(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def retry_headers(status: int, after_s: int = RETRY_AFTER_S) -> dict[str, str]:
    return {"retry-after": str(after_s)} if status in RETRY_STATUSES else {}


def internal_error() -> ApiError:
    return ApiError(500, "internal_error", "an internal error; the server's log has the details")


def model_required(names: Iterable[str]) -> ApiError:
    """Return the error for a request about one model that names none, although there are several models."""
    listed = list(names)
    text = f"name a model, as in ?model=NAME; models are: {', '.join(listed) or 'none'}"
    error = ApiError(400, "model_required", text, "model")
    error.models = listed
    return error


def no_router(model: str) -> ApiError:
    return ApiError(503, "no_group", f"no router serves {model} yet; start a router and a worker for it")


def deadline_exceeded(timeout_s: float) -> ApiError:
    return ApiError(504, "deadline_exceeded", f"no response within {timeout_s:g} s")


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param)
