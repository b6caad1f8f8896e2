"""Bodies of HTTP requests, bounded, and the ids that requests go by."""

import uuid

from fastapi import Request

from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.openai import REQUEST_ID

LENGTH_DIGITS_MAX = 19  # of a 64-bit content-length


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The whole body. Raises ApiError for a larger one."""
    too_large = ApiError(413, "body_too_large", f"the body is larger than {bytes_max} bytes")
    declared = request.headers.get("content-length", "")
    # Python converts no more than 4,300 digits, hence the length.
    if declared.isdecimal() and (len(declared) > LENGTH_DIGITS_MAX or int(declared) > bytes_max):
        raise too_large
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > bytes_max:
            raise too_large
    return bytes(raw)


def request_id_of(request: Request, prefix: str) -> str:
    """The client's, or a new one. Raises ApiError for one that is of no use."""
    given = request.headers.get("x-request-id")
    if given is None:
        return prefix + uuid.uuid4().hex
    if not REQUEST_ID.fullmatch(given):
        raise invalid("x-request-id takes 1 to 128 letters, digits, dots, dashes and underscores", "x-request-id")
    return given
