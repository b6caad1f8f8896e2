"""Routes of a console that change nothing.

Requests, markers and metrics are read from the catalog. The reader process derives moments, explanations and the state
of the planner. A comparison with another configuration is a job.
"""

from typing import Annotated, get_args

import msgspec
from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from forebay.console.console import Console
from forebay.console.jobs import WhatIf
from forebay.console.messages import ReadComparison, ReadExplanation, ReadMoment, ReadRecord, ReadScaling
from forebay.events.names import unknown_name
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.http.body import read_body
from forebay.replay.catalog import markers as markers_of
from forebay.replay.catalog import request_queries
from forebay.replay.catalog import series as metrics
from forebay.replay.catalog.facts import RequestState
from forebay.replay.catalog.request_queries import RequestFilter

REQUESTS_MAX = 500  # rows of a page, which the page shows at once
POINTS_MAX = 600
MARKERS_MAX = 1_000
WHAT_IF_BYTES_MAX = 1 << 16
TIME_US_MAX = (1 << 53) - 1  # the largest integer that JavaScript represents exactly
AtUs = Annotated[
    int | None,
    Query(ge=0, le=TIME_US_MAX, description="Time on the owner's clock, in microseconds since 1970; default: now."),
]
TimeUs = Annotated[int, Query(ge=0, le=TIME_US_MAX)]
Offset = Annotated[int, Query(ge=0, le=TIME_US_MAX)]


def add_routes(app: FastAPI, console: Console) -> None:
    _add_catalog_routes(app, console)
    _add_derived_routes(app, console)
    _add_what_if_routes(app, console)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _add_catalog_routes(app: FastAPI, console: Console) -> None:
    catalog = console.catalog

    @app.get("/v1/console")
    async def about() -> Response:
        """Return what this console shows and what it can do."""
        return _json(msgspec.json.encode(await console.info()))

    @app.get("/v1/console/events")
    async def events() -> StreamingResponse:
        """Stream the state of the catalog as server-sent events."""
        return StreamingResponse(console.feed.stream(), media_type="text/event-stream")

    @app.get("/v1/console/requests")
    async def requests(  # noqa: PLR0913, PLR0917 - a parameter per field of the query string
        at_us: AtUs = None,
        state: str = "",
        model: str = "",
        tenant: str = "",
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
        filters = RequestFilter(wanted, model, tenant, worker, slow_us, is_unsuccessful=failed, text=q)
        found = await catalog.query(
            lambda store: request_queries.requests(store.connection, at_us, filters, before, limit)
        )
        return _json(msgspec.json.encode(found))

    @app.get("/v1/console/requests/{number}")
    async def request(number: Annotated[int, Path(ge=0, le=TIME_US_MAX)]) -> Response:
        """Return one request."""
        found = await catalog.query(lambda store: request_queries.request(store.connection, number))
        if found is None:
            raise ApiError(404, "request_not_found", f"no request was submitted at offset {number}")
        return _json(msgspec.json.encode(found))

    @app.get("/v1/console/series")
    async def series(
        from_us: TimeUs, to_us: TimeUs, points: Annotated[int, Query(ge=2, le=POINTS_MAX)] = 120
    ) -> Response:
        """Return metrics over time."""
        until_us = _after(from_us, to_us)
        found = await catalog.query(lambda store: metrics.series(store.connection, from_us, until_us, points))
        return _json(msgspec.json.encode(found))

    @app.get("/v1/console/markers")
    async def markers(
        from_us: TimeUs = 0, to_us: TimeUs | None = None, limit: Annotated[int, Query(ge=1, le=MARKERS_MAX)] = 500
    ) -> Response:
        """Return events of interest in a span of time."""
        until_us = TIME_US_MAX if to_us is None else _after(from_us, to_us)
        found = await catalog.query(lambda store: markers_of.markers(store.connection, from_us, until_us, limit))
        return _json(msgspec.json.encode({"markers": found}))


def _after(from_us: int, to_us: int) -> int:
    if to_us <= from_us:
        raise invalid(f"to_us is {to_us}; it must be after from_us, which is {from_us}", "to_us")
    return to_us


def _add_derived_routes(app: FastAPI, console: Console) -> None:
    @app.get("/v1/status")
    async def status(at_us: AtUs = None) -> Response:
        """Return the status of the group, in the same form as an ingress."""
        return _json(await console.status(at_us))

    @app.get("/v1/console/fleet")
    async def fleet(at_us: AtUs = None) -> Response:
        """Return the status of the group with the activity of its workers and current problems."""
        return _json(await console.fleet(at_us))

    @app.get("/v1/console/moment")
    async def moment(at_us: AtUs = None, offset: Offset | None = None) -> Response:
        """Return the owner's state, in the form of `forebay replay at --json`."""
        if at_us is not None and offset is not None:
            raise invalid("at_us and offset exclude each other; give one of them", "offset")
        return _json(await console.reader.request(ReadMoment(at_us, offset)))

    @app.get("/v1/console/compare")
    async def compare(a_us: TimeUs, b_us: TimeUs) -> Response:
        """Return the differences between two moments."""
        return _json(await console.reader.request(ReadComparison(min(a_us, b_us), max(a_us, b_us))))

    @app.get("/v1/requests/{request_id:path}/explain")
    async def explain(request_id: str, number: Offset | None = None, changes: bool = False) -> Response:
        """Explain the routing and outcome of a request, in the same form as an ingress.

        `changes` adds to each routing the changes that would have changed the selection of a worker.
        """
        return _json(await console.reader.request(ReadExplanation(request_id, number, changes)))

    @app.get("/v1/console/scaling")
    async def scaling(at_us: AtUs = None) -> Response:
        """Return the state of the planner, its decisions, and the sizes of pools over time."""
        return _json(await console.reader.request(ReadScaling(at_us)))

    @app.get("/v1/console/records")
    async def record(topic: str, offset: Offset) -> Response:
        """Return a record of the log, decoded as by `forebay topics tail`."""
        return _json(await console.reader.request(ReadRecord(topic, offset)))


def _add_what_if_routes(app: FastAPI, console: Console) -> None:
    @app.post("/v1/console/what-if")
    async def start(request: Request) -> Response:
        """Start a comparison, and return its job."""
        try:
            wanted = msgspec.json.decode(await read_body(request, WHAT_IF_BYTES_MAX), type=WhatIf)
        except msgspec.DecodeError as error:
            raise invalid(f"the body is invalid: {error}") from error
        if not wanted.policy and not wanted.sets:
            raise invalid("nothing is changed; give another policy, or at least one setting in sets", "policy")
        console.require_policy(wanted.policy, wanted.sets)
        return _json(msgspec.json.encode(console.jobs.start(wanted)))

    @app.get("/v1/console/what-if/{job}")
    async def status(job: str) -> Response:
        """Return the state of a job, with the report once it is done."""
        return _json(msgspec.json.encode(console.jobs.status(job)))

    @app.delete("/v1/console/what-if/{job}")
    async def cancel(job: str) -> Response:
        """Cancel a job."""
        return _json(msgspec.json.encode(console.jobs.cancel(job)))
