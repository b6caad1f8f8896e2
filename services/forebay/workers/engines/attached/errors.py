"""Failures of a request to an attached server."""

from typing import Any

import msgspec

from forebay.events.codec import MALFORMED
from forebay.events.tokens import ResponseError
from forebay.workers.engines.model_directory import TEXT_CHARS_MAX

DENIED = (401, 403)
OVERLOADED = (429, 503)


class Rejected(Exception):
    """The server responded with an error, or forebay cannot send the request to it.

    Attributes:
        error: the error for the client.
    """

    def __init__(self, error: ResponseError) -> None:
        super().__init__(error.message)
        self.error = error


class StreamCut(Exception):
    """The connection ended, or the response became unreadable, before the response was complete."""


class _Body(msgspec.Struct):
    error: Any = None
    detail: Any = None
    message: Any = None


def message_of(body: bytes) -> str:
    """Return the message in the body of an error, in any of the forms that servers use, as one line."""
    try:
        found = msgspec.json.decode(body, type=_Body)
    except MALFORMED:
        found = _Body()  # not JSON, or another form: show the whole body
    texts = map(_text, (found.error, found.detail, found.message))
    text = next(filter(None, texts), None) or body.decode(errors="replace")
    return clipped(text) or "the response has no message"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("message")
    return value if isinstance(value, str) else ""


def clipped(text: str) -> str:
    """Return a server's text as one line of at most `TEXT_CHARS_MAX` characters."""
    return " ".join(text.split())[:TEXT_CHARS_MAX]


def rejection(url: str, status: int, body: bytes) -> Rejected:
    """Return the exception for an error response of a server.

    Args:
        url: address of the server.
        status: HTTP status.
        body: body of the response.
    """
    text = message_of(body)
    if status in DENIED:  # of forebay's request, not of the client's
        message = f"the server {url} denied access; set --upstream-api-key-file: {text}"
        return Rejected(ResponseError(status=502, code="engine_error", message=message))
    if 400 <= status < 500 and status not in OVERLOADED:
        return Rejected(ResponseError(status=status, code="invalid_request", message=text))
    code = "engine_overloaded" if status in OVERLOADED else "engine_error"
    known = status if status in OVERLOADED else 502
    return Rejected(ResponseError(status=known, code=code, message=f"the server responded with {status}: {text}"))
