"""Routes whose results the reader process derives from the log: moments, explanations and the planner."""

from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.responses import Response
from pydantic import Field

from forebay.console.console import Console
from forebay.console.messages import (
    ReadComparison,
    ReadCounterfactuals,
    ReadExplanation,
    ReadMoment,
    ReadRecord,
    ReadScaling,
)
from forebay.ingress.errors import invalid

TIME_US_MAX = (1 << 53) - 1  # the largest integer that JavaScript represents exactly
AtUs = Annotated[
    int | None,
    Query(ge=0, le=TIME_US_MAX, description="Time on the owner's clock, in microseconds since 1970; default: now."),
]
TimeUs = Annotated[int, Query(ge=0, le=TIME_US_MAX)]
Offset = Annotated[int, Query(ge=0, le=TIME_US_MAX)]
JournalOffset = Annotated[int, Field(ge=0, le=TIME_US_MAX)]  # an item of a list, whose `Query` is that of the list
ROUTINGS_MAX = 64  # stages and attempts of a request


def json_response(content: bytes) -> Response:
    """Return a response whose body is encoded JSON."""
    return Response(content, media_type="application/json")


def add_derived_routes(app: FastAPI, console: Console) -> None:
    """Add the routes to `app`."""

    @app.get("/v1/status")
    async def status(at_us: AtUs = None) -> Response:
        """Return the status of the group, in the same form as an ingress."""
        return json_response(await console.status(at_us))

    @app.get("/v1/console/fleet")
    async def fleet(at_us: AtUs = None) -> Response:
        """Return the status of the group with the activity of its workers and current problems."""
        return json_response(await console.fleet(at_us))

    @app.get("/v1/console/moment")
    async def moment(at_us: AtUs = None, offset: Offset | None = None) -> Response:
        """Return the owner's state, in the form of `forebay replay at --json`."""
        if at_us is not None and offset is not None:
            raise invalid("at_us and offset exclude each other; give one of them", "offset")
        return json_response(await console.reader.request(ReadMoment(at_us, offset)))

    @app.get("/v1/console/compare")
    async def compare(a_us: TimeUs, b_us: TimeUs) -> Response:
        """Return the differences between two moments."""
        return json_response(await console.reader.request(ReadComparison(min(a_us, b_us), max(a_us, b_us))))

    @app.get("/v1/requests/{request_id:path}/explain")
    async def explain(request_id: str, number: Offset | None = None) -> Response:
        """Explain the routing and outcome of a request, in the same form as an ingress."""
        return json_response(await console.reader.request(ReadExplanation(request_id, number)))

    @app.get("/v1/console/counterfactuals")
    async def counterfactuals(
        request_id: str, routing: Annotated[list[JournalOffset] | None, Query(max_length=ROUTINGS_MAX)] = None
    ) -> Response:
        """Return changes that would have changed the selection of a worker, for each given routing of a request."""
        message = ReadCounterfactuals(request_id, tuple(routing or ()))
        return json_response(await console.reader.request(message))

    @app.get("/v1/console/scaling")
    async def scaling(at_us: AtUs = None) -> Response:
        """Return the state of the planner, its decisions, and the sizes of pools over time."""
        return json_response(await console.reader.request(ReadScaling(at_us)))

    @app.get("/v1/console/records")
    async def record(topic: str, offset: Offset) -> Response:
        """Return a record of the log, decoded as by `forebay topics tail`."""
        return json_response(await console.reader.request(ReadRecord(topic, offset)))
