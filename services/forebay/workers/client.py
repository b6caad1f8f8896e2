"""Call endpoints of components through an ingress, also from other components."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

TIMEOUT_S = 30.0  # between two reads; a silent ingress sends a comment every ten seconds
OK = 200


class CallFailed(Exception):
    """A call was rejected or failed. Values that were yielded before stay valid.

    Attributes:
        status: HTTP status of the error; 0 if the stream was interrupted.
        code: name of the error.
    """

    def __init__(self, message: str, status: int = 0, code: str = "response_interrupted") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


async def call(
    name: str, payload: Any = None, *, url: str = "http://127.0.0.1:8000", headers: Mapping[str, str] | None = None
) -> AsyncGenerator[Any]:
    """Yield the values of an endpoint.

    Args:
        name: the endpoint, `namespace.component.endpoint`.
        payload: its argument, any JSON value. If it has tokens in `token_ids`, they select the worker; otherwise
            workers take turns.
        url: URL of an ingress.
        headers: further headers, such as an API key.

    Raises:
        CallFailed: the endpoint is unknown, or it failed.
        httpx.TransportError: the ingress did not respond.
    """
    address = f"{url.rstrip('/')}/v1/endpoints/{quote(name, safe='')}"
    sent = {"content-type": "application/json", **(headers or {})}
    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S) as client,
        client.stream("POST", address, content=msgspec.json.encode(payload), headers=sent) as response,
    ):
        if response.status_code != OK:
            raise _failed(response.status_code, await response.aread())
        buffer = b""
        try:
            async for part in response.aiter_bytes():  # not lines, which end at U+2028 of a value, too
                *events, buffer = (buffer + part).split(b"\n\n")
                for event in events:
                    head, _, data = event.partition(b"data: ")
                    if b"event: error\n" in head:
                        raise _failed(0, data)
                    if b"event: end\n" in head:
                        return
                    if data and not event.startswith(b":"):
                        yield msgspec.json.decode(data)
        except httpx.TransportError as error:
            raise CallFailed(f"the stream of {name} was interrupted: {error!r}") from error
    raise CallFailed(f"the stream of {name} ended before its last event")


def _failed(status: int, body: bytes) -> CallFailed:
    try:
        error = msgspec.json.decode(body)["error"]
        return CallFailed(str(error["message"]), status, str(error["code"]))
    except (msgspec.MsgspecError, LookupError, TypeError):
        return CallFailed(f"unexpected response, HTTP {status}; check the URL of the ingress", status, "unexpected")
