"""Limits of the request bodies that an ingress accepts."""

import re
from dataclasses import dataclass
from itertools import chain

import msgspec

from forebay.ingress.errors import ApiError, invalid

TEXT_BYTES_MAX = 4 << 20  # a megatoken of English text
MEDIA_BYTES_MAX = 48 << 20  # far above 8 MiB of media in base64: the error of a larger image then names the image
MESSAGES_MAX = 10_000
TOOLS_MAX = 128  # OpenAI's limit
SMALL_BYTES = 64 << 10  # smaller bodies do not count, because the number of connections limits their total
# Decoding holds the interpreter, so a thread would not help other requests. 200,000 values take about 0.1 s.
VALUES_MAX = 200_000
MEMORY_BYTES_MAX = 256 << 20  # per process: bodies that are read, decoded or tokenized at the same time
BOM = b"\xef\xbb\xbf"  # PowerShell writes it at the beginning of UTF-8 files
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # an unterminated string is scanned once


class _Url(msgspec.Struct):
    url: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()  # image in base64, in the Messages API


class _Part(msgspec.Struct):
    image_url: _Url | str | None = None
    video_url: _Url | None = None
    source: _Url | None = None
    content: list["_Part"] | str | None = None  # result of a tool, in the Messages API


class _Message(msgspec.Struct):
    content: list[_Part] | str | None = None
    output: list[_Part] | str | None = None  # of a function


class _Chat(msgspec.Struct):
    """The parts with images and videos, in `input` those of the Responses API."""

    messages: list[_Message] = []
    input: list[_Message] | str = ""


class _Lists(msgspec.Struct):
    """Lists whose elements take microseconds each to validate."""

    messages: list[msgspec.Raw] | None = None
    tools: list[msgspec.Raw] | None = None


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
        if size > SMALL_BYTES:
            _require_short_lists(raw)


def _require_short_lists(raw: bytes) -> None:
    """Raise ApiError (400) for a list that validation would reject, which takes much longer."""
    try:
        found = msgspec.json.decode(raw, type=_Lists)
    except (msgspec.MsgspecError, RecursionError):
        return
    for name, given, limit in (("messages", found.messages, MESSAGES_MAX), ("tools", found.tools, TOOLS_MAX)):
        if given is not None and len(given) > limit:
            raise invalid(f"{name} has {len(given):,} elements; the limit is {limit:,}", name)


def _media_bytes(raw: bytes) -> int:
    """Return the total bytes of the URLs of images and videos, 0 if the body is not a chat request."""
    try:
        chat = msgspec.json.decode(raw, type=_Chat)
    except (msgspec.MsgspecError, RecursionError):
        return 0
    messages = [*chat.messages, *(chat.input if isinstance(chat.input, list) else ())]
    contents = (content for message in messages for content in (message.content, message.output))
    return sum(map(_part_bytes, chain.from_iterable(content for content in contents if isinstance(content, list))))


def _part_bytes(part: _Part) -> int:
    urls = (one for one in (part.image_url, part.video_url, part.source) if one)
    own = sum(len(one.encode()) if isinstance(one, str) else len(bytes(one.url)) + len(bytes(one.data)) for one in urls)
    return own + (sum(map(_part_bytes, part.content)) if isinstance(part.content, list) else 0)


def _separators(raw: bytes) -> int:
    """Return an upper bound of the number of JSON values: the separators outside of strings."""
    return 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{")


class BodyMemory:
    """Limits the memory of all request bodies that one process has read and not yet tokenized.

    Bodies of at most `SMALL_BYTES` do not count. At least one body of the maximum size always fits.
    """

    def __init__(self, limits: BodyLimits, bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self.limits = limits
        self.bytes_max = max(bytes_max, limits.bytes_max)
        self.held = 0
