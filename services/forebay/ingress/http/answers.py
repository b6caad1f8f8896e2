"""Routes for responses that another connection or ingress began: resume, read, cancel and delete them."""

import re
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from forebay import runtime
from forebay.events.request_ids import RequestLocation, part_ids
from forebay.ingress.caller import caller_of
from forebay.ingress.errors import invalid
from forebay.ingress.finder import FoundRequest, RequestFinder
from forebay.ingress.front import Front
from forebay.ingress.http.openapi import EVENTS, JSON, content, errors
from forebay.ingress.http.response import AttachedResponse, LastEvent

EVENT_ID = re.compile(r"\d{1,9}-\d{1,9}-\d{1,9}")
NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
SHOWN_CHARS_MAX = 64
READS = (400, 404, 410, 429, 501, 504)
CANCELLED = "cancelled by a client"


def add_answers(app: FastAPI, front: Front, finder: RequestFinder) -> None:
    @app.get(
        "/v1/requests/{request_id}/stream", responses={**content(EVENTS, "string", "The events."), **errors(*READS)}
    )
    async def resume(request: Request, request_id: str) -> Response:
        """Stream the response to a request, after the event in `Last-Event-ID` or `?last_event_id=` if there is one."""
        after = last_event(request.headers, "Last-Event-ID", EVENT_ID)
        after = after or last_event(request.query_params, "last_event_id", EVENT_ID)
        began_s = runtime.monotonic_s()
        found = await finder.find(request_id, caller_of(request.scope).tenant)
        if found.rendering.api == "embeddings":
            raise invalid("embeddings have no stream; read the whole response", code="unsupported_parameter")
        return _attached(finder, found, began_s, stream=True, after=after)

    @app.get("/v1/requests/{request_id}", responses={**content(JSON, "object", "The response."), **errors(*READS)})
    async def whole(request: Request, request_id: str) -> Response:
        """Return the whole response to a request, once it is complete."""
        began_s = runtime.monotonic_s()
        found = await finder.find(request_id, caller_of(request.scope).tenant)
        return _attached(finder, found, began_s, stream=False)

    @app.post("/v1/requests/{request_id}/cancel", responses={**content(JSON, "object", "The id."), **errors(404, 410)})
    async def cancel(request: Request, request_id: str) -> Response:
        """Cancel a request. A finished one stays as it is."""
        cancel_request(await finder.find(request_id, caller_of(request.scope).tenant))
        return _done(request_id, "cancelled")

    @app.delete("/v1/requests/{request_id}", responses={**content(JSON, "object", "The id."), **errors(404, 410)})
    async def delete(request: Request, request_id: str) -> Response:
        """Cancel a request if it has not finished, and delete its answer."""
        found = await finder.find(request_id, caller_of(request.scope).tenant)
        cancel_request(found)
        await front.answers.delete(found.request_id, found.location)
        return _done(request_id, "deleted")


def _attached(
    finder: RequestFinder, found: FoundRequest, began_s: float, *, stream: bool, after: LastEvent | None = None
) -> Response:
    """Return the response to a request, or to the earlier one that it repeats with an idempotency key."""

    async def replay(location: RequestLocation) -> Response:
        return _attached(finder, await finder.at(location, found.first.tenant), began_s, stream=stream, after=after)

    return AttachedResponse(found, began_s, stream=stream, after=after, replay=replay)


def cancel_request(found: FoundRequest) -> None:
    """Append the cancellation of all parts of a request, unless its answer is kept because it has finished."""
    if found.content is None:
        group = found.loaded.group
        for name in part_ids(found.request_id, found.rendering.parts):
            group.cancel(name, CANCELLED)


def last_event(given: Mapping[str, str], param: str, pattern: re.Pattern[str]) -> LastEvent | None:
    """Return the event that a client names in a header or in the query. Raises ApiError (400) if malformed."""
    text = given.get(param)
    if text is None:
        return None
    if pattern.fullmatch(text) is None:
        what = "the id of an event, such as 0-17-0" if pattern is EVENT_ID else "the sequence_number of an event"
        raise invalid(f"{param} is {text[:SHOWN_CHARS_MAX]!r}; it must be {what}", param)
    return LastEvent(param, text)


def _done(request_id: str, what: str) -> Response:
    return Response(msgspec.json.encode({"id": request_id, what: True}), media_type="application/json")
