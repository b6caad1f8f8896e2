"""Limits of request bodies: bytes, and JSON values, which are what decoding takes time for."""

import re
from dataclasses import dataclass

import msgspec

from forebay.ingress.errors import ApiError

TEXT_BYTES_MAX = 4 << 20  # a megatoken of English text
MEDIA_BYTES_MAX = 48 << 20  # far above 8 MiB of media in base64: the error of a larger image then names the image
SMALL_BYTES = 64 << 10  # not counted as held: connections are bounded, and uvicorn buffers as much for each
# Decoding holds the interpreter, so a thread would not help other requests. 200,000 values take about 0.1 s.
VALUES_MAX = 200_000
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # the end is optional: no second look at an open string


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
    """How large and how detailed a body may be.

    Attributes:
        text_bytes_max: of a body without the URLs of its images and videos.
        media_bytes_max: of a whole body when the model takes images or videos.
        takes_media: whether the model does.
        values_max: JSON values, at least as many as the model's context has tokens.
    """

    text_bytes_max: int = TEXT_BYTES_MAX
    media_bytes_max: int = MEDIA_BYTES_MAX
    takes_media: bool = False
    values_max: int = VALUES_MAX

    @property
    def bytes_max(self) -> int:
        """The number of bytes that are read."""
        return max(self.text_bytes_max, self.media_bytes_max) if self.takes_media else self.text_bytes_max

    def too_large(self, size: int | None = None) -> ApiError:
        """Return the error for a body of `size` bytes, None when it is only known to be too large."""
        found = "more" if size is None else f"{size:,}"
        if self.takes_media:
            text = f"bodies with images or videos take up to {self.bytes_max:,} bytes (--media-body-bytes-max)"
        else:
            text = f"bodies take up to {self.text_bytes_max:,} bytes (--body-bytes-max)"
        return ApiError(413, "body_too_large", f"{text}, this one has {found}")

    def require(self, raw: bytes) -> None:
        """Raise ApiError for a body that is too large, or too expensive to decode. Linear, without decoding it."""
        size = len(raw)
        if size > self.bytes_max:
            raise self.too_large(size)
        if size > self.text_bytes_max:
            text_bytes = size - _media_bytes(raw)
            if text_bytes > self.text_bytes_max:
                limit = f"a body takes up to {self.text_bytes_max:,} bytes beside images and videos (--body-bytes-max)"
                raise ApiError(413, "body_too_large", f"{limit}, this one has {text_bytes:,}")
        if size > SMALL_BYTES and _separators(raw) > self.values_max:
            values = _separators(STRING.sub(b"", raw))
            if values > self.values_max:
                text = f"a body takes up to {self.values_max:,} JSON values, this one has {values:,}"
                raise ApiError(413, "too_many_values", text)


def _media_bytes(raw: bytes) -> int:
    """Return the bytes of the URLs of images and videos, 0 for a body that is no chat."""
    try:
        chat = msgspec.json.decode(raw, type=_Chat)
    except (msgspec.MsgspecError, RecursionError):
        return 0
    parts = (part for message in chat.messages if isinstance(message.content, list) for part in message.content)
    urls = (one.url for part in parts for one in (part.image_url, part.video_url) if one is not None)
    return sum(len(bytes(url)) for url in urls if url is not msgspec.UNSET)


def _separators(raw: bytes) -> int:
    """Return a bound of the JSON values in text without strings."""
    return 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{")
