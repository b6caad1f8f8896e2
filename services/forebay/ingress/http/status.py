"""Route that returns the status of the group that an ingress serves."""

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response

from forebay.ingress.errors import ApiError
from forebay.ingress.http.openapi import errors
from forebay.replay.status import GroupStatus

StatusReader = Callable[[], Awaitable[GroupStatus]]  # may raise ApiError or LogError


def add_status(app: FastAPI, read: StatusReader | None) -> None:
    """Add `GET /v1/status` to `app`.

    Args:
        app: the application to which the route is added.
        read: returns the status; with None the route responds with 501.
    """

    @app.get("/v1/status", responses=errors(501, 504))
    async def status() -> Response:
        """Return the status of the model: owner, workers, requests and topics."""
        if read is None:
            raise ApiError(501, "not_recorded", "this server has no log from which it could derive a status")
        return Response(msgspec.json.encode(await read()), media_type="application/json")
