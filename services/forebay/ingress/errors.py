"""Errors as callers see them: OpenAI's shape, an HTTP status, a code that can be counted."""

from typing import Any

import msgspec
from starlette.types import Send

RETRY_STATUSES = frozenset({429, 503})  # nothing is wrong with the request: later it may be taken
MESSAGE_CHARS_MAX = 4_096  # names that a client made up are repeated to it, but not megabytes of them
PARAM_CHARS_MAX = 256
RETRY_AFTER_S = 1  # load reports come ten times a second, an owner that died is replaced within some seconds


class Unusable(Exception):
    """Something a user gave cannot be used; one line says what is wrong and what to do."""


class ApiError(Exception):
    """An answer that is not a completion."""

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
        """The headers that go with it, in lower case."""
        return {"www-authenticate": "Bearer"} if self.status == 401 else retry_headers(self.status, self.retry_after_s)

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(self.body())

    async def send(self, send: Send, request_id: str = "") -> None:
        """Send it as the whole answer of an HTTP request."""
        body = self.encoded()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if request_id:
            headers.append((b"x-request-id", request_id.encode()))
        headers += [(name.encode(), value.encode()) for name, value in self.headers().items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def retry_headers(status: int, after_s: int = RETRY_AFTER_S) -> dict[str, str]:
    """What tells a client when to try again, where that may help."""
    return {"retry-after": str(after_s)} if status in RETRY_STATUSES else {}


def internal_error() -> ApiError:
    """What is nobody's fault but ours."""
    return ApiError(500, "internal_error", "an internal error; the server's log has the details")


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that is wrong in itself."""
    return ApiError(400, code, message, param)
