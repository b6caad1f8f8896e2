"""Read request bodies with bounded memory and time, and generate request ids."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from urllib.parse import quote

from starlette.requests import Request

from forebay import runtime
from forebay.events.request_ids import NUMBER_BYTES, http_request_id
from forebay.ingress.access_log import add_fields
from forebay.ingress.body_limits import BOM, SMALL_BYTES, BodyLimits, BodyMemory
from forebay.ingress.errors import ACCEPTED_CODING, UNSUPPORTED_CODING, ApiError, invalid
from forebay.ingress.openai.requests import REQUEST_ID

CLIENT_ID_BYTES = 8  # random; for a request without `x-request-id`
LENGTH_DIGITS_MAX = 19  # a signed 64-bit integer has at most 19 digits
GZIP_BITS = 31  # zlib's `wbits` for gzip
DECODED_BYTES = 64 << 10  # decoded at a time, so that a small body cannot take much memory before its limit is checked
SHOWN_CHARS_MAX = 128


class BodyReader(AbstractContextManager["BodyReader"]):
    """Context manager that reads one body and counts its bytes in `BodyMemory.held` until the `with` block ends."""

    __slots__ = ("_held", "_memory")

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._held = 0

    def __exit__(self, *_: object) -> None:
        self._memory.held -= self._held
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """Return the whole body.

        Raises ApiError: 413 above a limit of one body, 503 if all bodies together would exceed `BodyMemory.bytes_max`.
        Raises ClientDisconnect if the client disconnected before it sent the whole body.
        """
        limits = self._memory.limits
        _require_declared(request, limits)
        parts, size = [], 0
        async for part in _parts(request, limits.bytes_max):
            size += len(part)
            self.hold(size)
            parts.append(part)
        raw = b"".join(parts).removeprefix(BOM)
        limits.require(raw)
        return raw

    def hold(self, size: int) -> None:
        """Count a body of which `size` bytes were read so far. Raises ApiError as `read`."""
        memory = self._memory
        if size > memory.limits.bytes_max:
            raise memory.limits.too_large()
        if size > SMALL_BYTES:
            if memory.held + size - self._held > memory.bytes_max:
                text = f"bodies in flight take {memory.held:,} of {memory.bytes_max:,} bytes; try again later"
                raise ApiError(503, "overloaded", text)
            memory.held += size - self._held
            self._held = size


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Return a body without counting it in `BodyMemory`. Raises ApiError (413) if it is larger than `bytes_max`."""
    raw = bytearray()
    async for part in _parts(request, bytes_max):
        raw += part
        if len(raw) > bytes_max:
            raise ApiError(413, "body_too_large", f"the body has more than {bytes_max:,} bytes, the limit of this path")
    return bytes(raw).removeprefix(BOM)


async def _parts(request: Request, bytes_max: int) -> AsyncIterator[bytes]:
    """Yield a body in parts, decoded if its `Content-Encoding` is gzip.

    Raises ApiError: 415 for another encoding, 400 if the body is not valid gzip, 413 if the gzip has more bytes than
    `bytes_max`, because gzip of any length may decode to nothing. Raises ClientDisconnect.
    """
    coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if coding in ("", "identity"):
        async for part in request.stream():
            yield part
        return
    if coding not in (ACCEPTED_CODING, "x-gzip"):
        text = f"the Content-Encoding {coding[:SHOWN_CHARS_MAX]!r} is not supported; use {ACCEPTED_CODING} or none"
        raise ApiError(415, UNSUPPORTED_CODING, text)
    decoder, size = zlib.decompressobj(GZIP_BITS), 0
    try:
        async for part in request.stream():
            rest, size = part, size + len(part)
            if size > bytes_max:
                raise ApiError(413, "body_too_large", f"the gzip has more than {bytes_max:,} bytes, the limit")
            while rest:
                if decoder.eof:  # gzip is a sequence of members
                    decoder = zlib.decompressobj(GZIP_BITS)
                yield decoder.decompress(rest, DECODED_BYTES)
                rest = decoder.unconsumed_tail or decoder.unused_data
                await asyncio.sleep(0)  # decoding megabytes must not block other requests
        yield decoder.flush()
    except zlib.error as error:
        raise invalid(f"the body is not valid gzip: {error}", code="invalid_encoding") from error
    if not decoder.eof:
        raise invalid("the gzip body is incomplete", code="invalid_encoding")


def request_id_of(request: Request, prefix: str) -> str:
    """Return a unique id that begins with the header `x-request-id`, or with `prefix` if there is no valid one."""
    given = client_id(request) or prefix + runtime.random_bytes(CLIENT_ID_BYTES).hex()
    return http_request_id(given, runtime.random_int(NUMBER_BYTES))


def client_id(request: Request) -> str | None:
    """Return the header `x-request-id`; None if it is missing, or if it is not a valid id, such as that of a proxy.

    The access log shows an invalid value, because the client may be unable to change it.
    """
    given = request.headers.get("x-request-id")
    if given is None or REQUEST_ID.fullmatch(given):
        return given
    add_fields(request.scope, x_request_id=quote(given[:SHOWN_CHARS_MAX].encode("latin-1"), safe="=#/:;,+@"))
    return None


def _require_declared(request: Request, limits: BodyLimits) -> None:
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal():
        return
    if len(declared) > LENGTH_DIGITS_MAX:  # Python raises for more than 4,300 digits
        raise limits.too_large()
    if int(declared) > limits.bytes_max:
        raise limits.too_large(int(declared))
