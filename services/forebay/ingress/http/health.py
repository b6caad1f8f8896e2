"""Routes for probes and for Prometheus."""

from collections.abc import Callable, Mapping
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from forebay.ingress.errors import ApiError
from forebay.ingress.http.openapi import errors, text


def add_health(
    app: FastAPI,
    registry: CollectorRegistry,
    why_not_ready: Callable[[], str | None],
    details: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Add the routes. `details` are additional fields of the response to `GET /ready`."""

    @app.get("/live", responses=errors())
    async def live() -> dict[str, str]:
        """Return whether the process responds."""
        return {"status": "live"}

    @app.get("/health", responses=errors())
    @app.get("/ready", responses=errors())
    async def ready() -> dict[str, str]:
        """Return whether requests can be served."""
        reason = why_not_ready()
        if reason is not None:
            raise ApiError(503, "not_ready", reason)
        return {"status": "ready", **details()}

    @app.get("/version", responses=errors())
    async def server_version() -> dict[str, str]:
        """Return the version of forebay."""
        return {"version": version("forebay")}

    @app.get("/metrics", response_class=Response, responses={**text("Metrics in the text format."), **errors()})
    async def metrics() -> Response:
        """Return Prometheus metrics."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
