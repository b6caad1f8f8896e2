"""What a client may ask about requests: where one would go, and why one went there."""

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from forebay.ingress.errors import invalid
from forebay.ingress.explainer import Explainer
from forebay.ingress.http.body import request_id_of
from forebay.ingress.http.openapi import QUERIES, body_of, errors
from forebay.ingress.ingress import Ingress
from forebay.ingress.openai.fields import parse
from forebay.ingress.openai.render import route_of
from forebay.ingress.openai.requests import ChatBody, TextBody


class _Kind(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def add_queries(app: FastAPI, ingress: Ingress, explainer: Explainer) -> None:
    """Add the routes."""

    @app.post("/v1/route", openapi_extra=body_of(ChatBody, TextBody), responses=errors(*QUERIES))
    async def route(request: Request) -> Response:
        """Where a chat or a completion would go. The body is theirs; nothing is generated."""
        ingress.require_owner()
        with ingress.bodies.one() as held:
            raw = await held.read(request)
            return await answer_route(request, ingress, parse(kind_of(raw), raw))

    @app.get("/v1/requests/{request_id:path}/explain", responses=errors(404, 501, 504))
    async def explain(request_id: str) -> Response:
        """Why a request went where it did, and what became of it. Its id is that of its answer, or `x-request-id`."""
        status = "error"
        try:
            told = await explainer.explain(request_id, ingress.require_partition())
            status = "success"
        finally:
            ingress.metrics.ended("explain", stream=False, status=status)
        return Response(told, media_type="application/json")


async def answer_route(request: Request, ingress: Ingress, body: ChatBody | TextBody) -> Response:
    """Where a request would go, as JSON. Raises ApiError."""
    request_id = request_id_of(request, "route-")
    status = "error"
    try:
        prepared = await ingress.prepare(body, request.headers.items())
        told = await ingress.query(request_id, prepared)
        status = "success"
    finally:
        ingress.metrics.ended("route", stream=False, status=status)
    content = msgspec.json.encode(route_of(told, body.model, prepared.prompt_tokens))
    return Response(content, headers={"x-request-id": request_id}, media_type="application/json")


def kind_of(raw: bytes) -> type[ChatBody] | type[TextBody]:
    """What a body is. Raises ApiError for one with neither messages nor a prompt."""
    try:
        found = msgspec.json.decode(raw, type=_Kind)
    except (msgspec.MsgspecError, RecursionError):
        return ChatBody  # whose decoder says what is wrong
    if found.messages is not msgspec.UNSET:
        return ChatBody
    if found.prompt is msgspec.UNSET:
        raise invalid("the body has neither messages nor a prompt", "messages")
    return TextBody
