"""Routes whose results are in the catalog: requests, markers and metrics over time."""

from typing import Annotated, get_args

import msgspec
from fastapi import FastAPI, Path, Query
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from forebay.console.console import Console
from forebay.console.routes_derived import TIME_US_MAX, AtUs, Offset, TimeUs, json_response
from forebay.events.names import unknown_name
from forebay.ingress.errors import ApiError, invalid
from forebay.replay.catalog.facts import RequestState
from forebay.replay.catalog.requests import RequestFilter

REQUESTS_MAX = 500  # rows of a page, which the page shows at once
POINTS_MAX = 600
MARKERS_MAX = 1_000


def add_catalog_routes(app: FastAPI, console: Console) -> None:
    """Add the routes to `app`."""
    catalog = console.catalog

    @app.get("/v1/console")
    async def about() -> Response:
        """Return what this console shows and what it can do."""
        return json_response(msgspec.json.encode(await console.info()))

    @app.get("/v1/console/events")
    async def events() -> StreamingResponse:
        """Stream the state of the catalog as server-sent events."""
        return StreamingResponse(console.feed.stream(), media_type="text/event-stream")

    @app.get("/v1/console/requests")
    async def requests(  # noqa: PLR0913, PLR0917 - a parameter per field of the query string
        at_us: AtUs = None,
        state: str = "",
        model: str = "",
        worker: str = "",
        slow_ms: Annotated[float | None, Query(ge=0, le=86_400_000)] = None,
        failed: bool = False,
        q: Annotated[str, Query(max_length=1_024)] = "",
        before: Offset | None = None,
        limit: Annotated[int, Query(ge=1, le=REQUESTS_MAX)] = 100,
    ) -> Response:
        """Return requests that match all given filters, newest first."""
        states: tuple[RequestState, ...] = get_args(RequestState)
        wanted = next((one for one in states if one == state), None)
        if state and wanted is None:
            raise invalid(unknown_name("state", state, states), "state")
        slow_us = None if slow_ms is None else round(slow_ms * 1e3)
        filters = RequestFilter(
            state=wanted, model=model, worker_id=worker, slow_us=slow_us, is_unsuccessful=failed, text=q
        )
        return json_response(msgspec.json.encode(await catalog.requests(at_us, filters, before, limit)))

    @app.get("/v1/console/requests/{number}")
    async def request(number: Annotated[int, Path(ge=0, le=TIME_US_MAX)]) -> Response:
        """Return one request."""
        found = await catalog.request(number)
        if found is None:
            raise ApiError(404, "request_not_found", f"no request was submitted at offset {number}")
        return json_response(msgspec.json.encode(found))

    @app.get("/v1/console/series")
    async def series(
        from_us: TimeUs, to_us: TimeUs, points: Annotated[int, Query(ge=2, le=POINTS_MAX)] = 120
    ) -> Response:
        """Return metrics over time."""
        return json_response(msgspec.json.encode(await catalog.series(from_us, _after(from_us, to_us), points)))

    @app.get("/v1/console/markers")
    async def markers(
        from_us: TimeUs = 0, to_us: TimeUs | None = None, limit: Annotated[int, Query(ge=1, le=MARKERS_MAX)] = 500
    ) -> Response:
        """Return events of interest in a span of time."""
        until_us = TIME_US_MAX if to_us is None else _after(from_us, to_us)
        return json_response(msgspec.json.encode({"markers": await catalog.markers(from_us, until_us, limit)}))


def _after(from_us: int, to_us: int) -> int:
    if to_us <= from_us:
        raise invalid(f"to_us is {to_us}; it must be after from_us, which is {from_us}", "to_us")
    return to_us
