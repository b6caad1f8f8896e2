"""Read bodies of HTTP requests with bounded memory, and request ids."""

from types import TracebackType

from fastapi import Request

from forebay import runtime
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.http.body_limits import SMALL_BYTES, BodyLimits
from forebay.ingress.openai.requests import REQUEST_ID

MEMORY_BYTES_MAX = 256 << 20  # per process: bodies that are read, decoded or tokenised at the same time
LENGTH_DIGITS_MAX = 19  # a 64-bit integer has no more


class BodyMemory:
    """Memory of the bodies that one process holds at the same time.

    Args:
        limits: limits of each body.
        bytes_max: maximum bytes of all bodies; at least one body always fits.

    Attributes:
        held: bytes of all bodies now.
    """

    def __init__(self, limits: BodyLimits, bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self.limits = limits
        self.bytes_max = max(bytes_max, limits.bytes_max)
        self.held = 0

    def reader(self) -> "BodyReader":
        """Return a reader for one body. The body counts until the `with` block of the reader ends."""
        return BodyReader(self)


class BodyReader:
    """Reader of one body, whose bytes count while its `with` block runs."""

    __slots__ = ("_held", "_memory")

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._held = 0

    def __enter__(self) -> "BodyReader":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._memory.held -= self._held

    async def read(self, request: Request) -> bytes:
        """Return the whole body. Raises ApiError: 413 above a limit of the body, 503 above the limit of all bodies."""
        limits, memory = self._memory.limits, self._memory
        _require_declared(request, limits)
        parts, size = [], 0
        async for part in request.stream():
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
    """Return a small body, which does not count. Raises ApiError above `bytes_max` bytes."""
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > bytes_max:
            raise ApiError(413, "body_too_large", f"the body has more than {bytes_max:,} bytes, the limit of this path")
    return bytes(raw)


def request_id_of(request: Request, prefix: str) -> str:
    """Return the `x-request-id` of a request, or a new id with this prefix. Raises ApiError if it is invalid."""
    given = request.headers.get("x-request-id")
    if given is None:
        return prefix + runtime.random_id()
    if not REQUEST_ID.fullmatch(given):
        raise invalid(
            "invalid x-request-id; it must be 1 to 128 letters, digits, dots, dashes and underscores", "x-request-id"
        )
    return given


def _require_declared(request: Request, limits: BodyLimits) -> None:
    """Raise ApiError if `content-length` exceeds the limit."""
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal():
        return
    if len(declared) > LENGTH_DIGITS_MAX:  # Python converts no more than 4,300 digits
        raise limits.too_large()
    if int(declared) > limits.bytes_max:
        raise limits.too_large(int(declared))
