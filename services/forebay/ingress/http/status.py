"""Route that returns the status of the group that an ingress serves."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response

from forebay import runtime
from forebay.ingress.errors import ApiError
from forebay.ingress.http.openapi import errors, json_of
from forebay.replay.status import GroupStatus

SHARED_S = 1.0  # a derivation takes about a second of CPU time, so scripts that poll cost at most about half a core

StatusReader = Callable[[], Awaitable[GroupStatus]]  # may raise ApiError or LogError
StatusOf = Callable[[str], Awaitable[GroupStatus]]  # the same for the model of this name


class SharedReader:
    """Reads a status that is expensive to derive, at most once at a time.

    Concurrent calls share one derivation. For `SHARED_S` seconds after it, later calls get the same status. An error is
    raised to the calls that wait for it, and the next call derives again.
    """

    def __init__(self, derive: StatusReader) -> None:
        self._derive = derive
        self._derivation: asyncio.Task[GroupStatus] | None = None
        self._shared_until_s = 0.0

    async def read(self) -> GroupStatus:
        """Return the status. Raises the errors of `derive`."""
        derivation = self._derivation
        if derivation is None or (derivation.done() and runtime.monotonic_s() >= self._shared_until_s):
            derivation = self._derivation = asyncio.create_task(self._run(), name="status")
        return await asyncio.shield(derivation)  # a client that disconnects must not end the other calls

    async def _run(self) -> GroupStatus:
        status = await self._derive()
        self._shared_until_s = runtime.monotonic_s() + SHARED_S
        return status


def add_status(app: FastAPI, read: StatusReader | None) -> None:
    """Add `GET /v1/status` to `app`.

    Args:
        read: returns the status; with None the route responds with 501.
    """

    @app.get("/v1/status", responses={**json_of(GroupStatus), **errors(501, 504)})
    async def status() -> Response:
        """Return the status of the model: owner, workers, requests and topics."""
        if read is None:
            raise ApiError(501, "not_recorded", "this server has no log from which it could derive a status")
        return Response(msgspec.json.encode(await read()), media_type="application/json")
