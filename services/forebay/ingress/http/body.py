"""Read request bodies with bounded memory and time, and generate request ids."""

from types import TracebackType

from starlette.requests import ClientDisconnect, Request

from forebay import runtime
from forebay.events.request_ids import NUMBER_BYTES, http_request_id
from forebay.ingress.body_limits import SMALL_BYTES, BodyLimits, BodyMemory
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.openai.requests import REQUEST_ID

CLIENT_ID_BYTES = 8  # random; for a request without `x-request-id`
LENGTH_DIGITS_MAX = 19  # a signed 64-bit integer has at most 19 digits


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
