"""Read request bodies with bounded memory and time, and generate request ids."""

import re
from dataclasses import dataclass
from types import TracebackType

import msgspec
from starlette.requests import ClientDisconnect, Request

from forebay import runtime
from forebay.events.request_ids import NUMBER_BYTES, http_request_id
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.http import MEDIA_BYTES_MAX, TEXT_BYTES_MAX
from forebay.ingress.openai.requests import REQUEST_ID

SMALL_BYTES = 64 << 10  # smaller bodies do not count, because the number of connections limits their total
# Decoding holds the interpreter, so a thread would not help other requests. 200,000 values take about 0.1 s.
VALUES_MAX = 200_000
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # an unterminated string is scanned once


class _Url(msgspec.Struct):
    url: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Part(msgspec.Struct):
    image_url: _Url | None = None
    video_url: _Url | None = None


class _Message(msgspec.Struct):
    content: list[_Part] | str | None = None


class _Chat(msgspec.Struct):
    messages: list[_Message] = []


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of one request body.

    Attributes:
        text_bytes_max: maximum bytes of a body, not counting the URLs of its images and videos.
        media_bytes_max: maximum bytes of a whole body with these URLs. Used only if `takes_media`.
        values_max: maximum number of JSON values, which determines the time to decode a body. At least the context
            length of the model, because a prompt of token ids has one value per token.
    """

    text_bytes_max: int = TEXT_BYTES_MAX
    media_bytes_max: int = MEDIA_BYTES_MAX
    takes_media: bool = False
    values_max: int = VALUES_MAX

    @property
    def bytes_max(self) -> int:
        return max(self.text_bytes_max, self.media_bytes_max) if self.takes_media else self.text_bytes_max

    def too_large(self, size: int | None = None) -> ApiError:
        """Return the error for a body above the limit. A `size` of None means that it was not read to its end."""
        found = "too many" if size is None else f"{size:,}"
        if self.takes_media:
            limit = f"{self.bytes_max:,} bytes for bodies with images or videos (--media-body-bytes-max)"
        else:
            limit = f"{self.text_bytes_max:,} bytes (--body-bytes-max)"
        return ApiError(413, "body_too_large", f"the body has {found} bytes; the limit is {limit}")

    def require(self, raw: bytes) -> None:
        """Raise ApiError (413) above a limit. Takes time linear in the size of the body."""
        size = len(raw)
        if size > self.bytes_max:
            raise self.too_large(size)
        if size > self.text_bytes_max:
            text_bytes = size - _media_bytes(raw)
            if text_bytes > self.text_bytes_max:
                text = f"the body has {text_bytes:,} bytes without its images and videos; the limit is "
                raise ApiError(413, "body_too_large", f"{text}{self.text_bytes_max:,} bytes (--body-bytes-max)")
        if size > SMALL_BYTES and _separators(raw) > self.values_max:
            values = _separators(STRING.sub(b"", raw))
            if values > self.values_max:
                text = f"the body has {values:,} JSON values; the limit is {self.values_max:,}"
                raise ApiError(413, "too_many_values", text)


def _media_bytes(raw: bytes) -> int:
    """Return the total bytes of the URLs of images and videos, 0 if the body is not a chat request."""
    try:
        chat = msgspec.json.decode(raw, type=_Chat)
    except (msgspec.MsgspecError, RecursionError):
        return 0
    parts = (part for message in chat.messages if isinstance(message.content, list) for part in message.content)
    urls = (one.url for part in parts for one in (part.image_url, part.video_url) if one is not None)
    return sum(len(bytes(url)) for url in urls if url is not msgspec.UNSET)


def _separators(raw: bytes) -> int:
    """Return an upper bound of the number of JSON values: the separators outside of strings."""
    return 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{")


MEMORY_BYTES_MAX = 256 << 20  # per process: bodies that are read, decoded or tokenized at the same time
CLIENT_ID_BYTES = 8  # random; for a request without `x-request-id`
LENGTH_DIGITS_MAX = 19  # a signed 64-bit integer has at most 19 digits


class BodyMemory:
    """Limits the memory of all request bodies that one process has read and not yet tokenized.

    Bodies of at most `SMALL_BYTES` do not count. At least one body of the maximum size always fits.
    """

    def __init__(self, limits: BodyLimits, bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self.limits = limits
        self.bytes_max = max(bytes_max, limits.bytes_max)
        self.held = 0

    def reader(self) -> "BodyReader":
        return BodyReader(self)


class BodyReader:
    """Context manager that reads one body and counts its bytes in `BodyMemory.held` until the `with` block ends."""

    __slots__ = ("_held", "_memory")

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._held = 0

    def __enter__(self) -> "BodyReader":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._memory.held -= self._held

    async def read(self, request: Request) -> bytes:
        """Return the whole body.

        Raises ApiError: 413 above a limit of one body, 503 if all bodies together would exceed `BodyMemory.bytes_max`.
        Raises ClientDisconnect if the client disconnected before it sent the whole body.
        """
        limits, memory = self._memory.limits, self._memory
        _require_declared(request, limits)
        parts, size, has_more = [], 0, True
        while has_more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            has_more = message.get("more_body", False)
            size += len(part)
            if size > limits.bytes_max:
                raise limits.too_large()
            if size > SMALL_BYTES:
                if memory.held + size - self._held > memory.bytes_max:
                    text = f"bodies in flight take {memory.held:,} of {memory.bytes_max:,} bytes; try again later"
                    raise ApiError(503, "overloaded", text)
                memory.held += size - self._held
                self._held = size
            parts.append(part)
        raw = parts[0] if len(parts) == 1 else b"".join(parts)
        limits.require(raw)
        return raw


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Return a body without counting it in `BodyMemory`. Raises ApiError (413) if it is larger than `bytes_max`."""
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > bytes_max:
            raise ApiError(413, "body_too_large", f"the body has more than {bytes_max:,} bytes, the limit of this path")
    return bytes(raw)


def request_id_of(request: Request, prefix: str) -> str:
    """Return a unique id that begins with the header `x-request-id`, or with `prefix` if there is no such header.

    Raises ApiError (400) if the header is not a valid id.
    """
    given = client_id(request) or prefix + runtime.random_bytes(CLIENT_ID_BYTES).hex()
    return http_request_id(given, runtime.random_int(NUMBER_BYTES))


def client_id(request: Request) -> str | None:
    """Return the header `x-request-id`, None if it is missing. Raises ApiError (400) if it is not a valid id."""
    given = request.headers.get("x-request-id")
    if given is not None and not REQUEST_ID.fullmatch(given):
        raise invalid(
            "invalid x-request-id; it must be 1 to 128 letters, digits, dots, dashes and underscores", "x-request-id"
        )
    return given


def _require_declared(request: Request, limits: BodyLimits) -> None:
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal():
        return
    if len(declared) > LENGTH_DIGITS_MAX:  # Python raises for more than 4,300 digits
        raise limits.too_large()
    if int(declared) > limits.bytes_max:
        raise limits.too_large(int(declared))
