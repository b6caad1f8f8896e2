"""Bodies of HTTP requests, bounded, and the ids that requests go by."""

from types import TracebackType

from fastapi import Request

from forebay import runtime
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.http.body_limits import SMALL_BYTES, BodyLimits
from forebay.ingress.openai.requests import REQUEST_ID

HELD_BYTES_MAX = 256 << 20  # bodies of one process that are read, decoded or tokenised at a time
LENGTH_DIGITS_MAX = 19  # of a 64-bit content-length


class BodyMemory:
    """The bodies that one process holds at a time."""

    def __init__(self, limits: BodyLimits, bytes_max: int = HELD_BYTES_MAX) -> None:
        self.limits = limits
        self.bytes_max = max(bytes_max, limits.bytes_max)
        self.held = 0

    def one(self) -> "BodyReader":
        """Return a body to be read; it counts until its `with` block ends."""
        return BodyReader(self)


class BodyReader:
    """One body, counted while its `with` block runs."""

    __slots__ = ("_all", "_held")

    def __init__(self, bodies: BodyMemory) -> None:
        self._all = bodies
        self._held = 0

    def __enter__(self) -> "BodyReader":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._all.held -= self._held

    async def read(self, request: Request) -> bytes:
        """Return the whole body. Raises ApiError for a body beyond the limits, 503 when all bodies exceed theirs."""
        limits, bodies = self._all.limits, self._all
        _require_declared(request, limits)
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limits.bytes_max:
                raise limits.too_large()
            if size > SMALL_BYTES:
                if bodies.held + size - self._held > bodies.bytes_max:
                    text = f"this server holds {bodies.held:,} bytes of other requests, its limit; try again"
                    raise ApiError(503, "overloaded", text)
                bodies.held += size - self._held
                self._held = size
            parts.append(part)
        raw = parts[0] if len(parts) == 1 else b"".join(parts)
        limits.require(raw)
        return raw


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Return a body of up to `bytes_max` bytes, too few to be counted as held. Raises ApiError for a larger one."""
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > bytes_max:
            raise ApiError(413, "body_too_large", f"the body of this request takes up to {bytes_max:,} bytes")
    return bytes(raw)


def request_id_of(request: Request, prefix: str) -> str:
    """The client's, or a new one. Raises ApiError for one that is of no use."""
    given = request.headers.get("x-request-id")
    if given is None:
        return prefix + runtime.random_id()
    if not REQUEST_ID.fullmatch(given):
        raise invalid("x-request-id takes 1 to 128 letters, digits, dots, dashes and underscores", "x-request-id")
    return given


def _require_declared(request: Request, limits: BodyLimits) -> None:
    """Raise ApiError for a body that its header says to be too large."""
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal():
        return
    if len(declared) > LENGTH_DIGITS_MAX:  # Python converts no more than 4,300 digits
        raise limits.too_large()
    if int(declared) > limits.bytes_max:
        raise limits.too_large(int(declared))
