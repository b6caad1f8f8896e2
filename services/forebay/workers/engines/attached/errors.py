"""Failures of a request to an attached server."""

from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from forebay import runtime
from forebay.events.codec import MALFORMED
from forebay.workers.engine import AttemptFailed, clipped

OPERATOR = frozenset((401, 402, 403, 405, 407))
"""Statuses for which forebay's own credentials, account or address are responsible, not the client's request."""
OVERLOADED: Mapping[int, int] = {408: 503, 425: 503, 429: 429, 503: 503, 529: 503}
"""Statuses with which a server asks to send the request later, with the status for the client."""
OVERLOADED_CODE = "engine_overloaded"
UNAUTHORIZED = frozenset((401, 403))
RETRY_AFTER_S_MAX = 3_600
# FastChat's codes have five digits: an HTTP status and a number. With 403, however, the request is invalid.
FASTCHAT_CODES = range(40_000, 60_000)
FASTCHAT_INVALID = range(40_300, 40_400)
INVALID_TYPES = frozenset(("invalid_request_error", "BadRequestError", "NotFoundError"))


class Rejected(AttemptFailed):
    """The server responded with an error, whose `body` may be known, or forebay cannot send it the request."""

    body = b""


class StreamCut(Exception):
    """The connection ended, or the response became unreadable, before the response was complete."""


class _Body(msgspec.Struct):
    error: Any = None
    detail: Any = None
    message: Any = None
    text: Any = None
    msg: Any = None
    error_code: Any = None
    code: Any = None
    status: Any = None
    status_code: Any = None
    type: Any = None
    object: Any = None
    choices: Any = None


def message_of(body: bytes) -> str:
    """Return the message in the body of an error, in any of the forms that servers use, as one line."""
    found = _decoded(body)
    texts = map(_text, () if found is None else (found.error, found.detail, found.message, found.text, found.msg))
    text = next(filter(None, texts), None) or body.decode(errors="replace")
    return clipped(text) or "the response has no message"


def _decoded(body: bytes) -> _Body | None:
    """Return the fields of a JSON object, None for any other content."""
    try:
        return msgspec.json.decode(body, type=_Body)
    except MALFORMED:
        return None


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(filter(None, map(_text, value)))
    if isinstance(value, dict):
        if isinstance(value.get("loc"), list):  # an invalid field, as FastAPI reports it
            return f"{'.'.join(map(str, value['loc']))}: {value.get('msg', 'invalid')}"
        texts = (_text(value.get(name)) for name in ("message", "msg", "detail", "text", "error"))
        return next(filter(None, texts), "")
    return value if isinstance(value, str) else ""


def rejection(url: str, status: int, body: bytes, retry_after: str = "") -> Rejected:
    text, after_s = message_of(body), _seconds(retry_after)
    if status in OPERATOR:
        hint = "denied access; set --upstream-api-key-file" if status in UNAUTHORIZED else f"responded with {status}"
        message = f"the server {url} {hint}: {text}"
        return Rejected(502, "engine_error", message, may_move=True, retry_after_s=after_s)
    if 400 <= status < 500 and status not in OVERLOADED:
        rejected = Rejected(status, "invalid_request", text)
        rejected.body = body
        return rejected
    code = OVERLOADED_CODE if status in OVERLOADED else "engine_error"
    message = f"the server responded with {status}: {text}"
    return Rejected(OVERLOADED.get(status, 502), code, message, may_move=True, retry_after_s=after_s)


def error_in(url: str, data: bytes, *, is_error: bool = False) -> Rejected | None:
    """Return the exception for an error that a server sent with status 200, None if the data are no error.

    `is_error` tells whether the type of the event says that it is an error.
    """
    found = _decoded(data) or _Body()
    has_message = found.choices is None and bool(_text(found.detail) or _text(found.message))
    is_named = found.error not in (None, "", False, 0) or found.object == "error" or _code(found.error_code)
    if not (is_error or is_named or has_message):
        return None
    status = _status(found)
    if status is not None:
        return rejection(url, status, data)
    return Rejected(502, "engine_error", message_of(data), may_move=True)


def _status(found: _Body) -> int | None:
    inner = found.error if isinstance(found.error, dict) else {}
    names = ("status", "status_code", "error_code", "code")
    for value in (*map(inner.get, names), *(getattr(found, name) for name in names)):
        code = _code(value)
        if code in FASTCHAT_CODES:
            code = 400 if code in FASTCHAT_INVALID else code // 100
        if 400 <= code <= 599:
            return code
    return 400 if {inner.get("type"), found.type} & INVALID_TYPES else None


def _code(value: Any) -> int:
    """Return a code that is a number, also as a text; 0 for any other value."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 5:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _seconds(retry_after: str) -> int:
    """Return the seconds in a header `Retry-After`, which may be a date; 0 if it is missing, invalid or over."""
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return min(int(text[:9]), RETRY_AFTER_S_MAX)
    try:
        due = parsedate_to_datetime(text)
    except ValueError:
        return 0
    if due.tzinfo is None:
        due = due.replace(tzinfo=UTC)
    return max(0, min(round(due.timestamp() - runtime.wall_us() / 1e6), RETRY_AFTER_S_MAX))
