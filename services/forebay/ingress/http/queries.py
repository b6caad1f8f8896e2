"""Routes that query the route of a request, and explain a request."""

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
    """Add the routes of route queries and explanations."""

    @app.post("/v1/route", openapi_extra=body_of(ChatBody, TextBody), responses=errors(*QUERIES))
    async def route(request: Request) -> Response:
        """Return the worker that the router would select for a chat or text completion. Nothing is generated."""
        ingress.require_owner()
        with ingress.bodies.reader() as reader:
            raw = await reader.read(request)
            return await respond_to_query(request, ingress, parse(kind_of(raw), raw))

    @app.get("/v1/requests/{request_id:path}/explain", responses=errors(404, 501, 504))
    async def explain(request_id: str) -> Response:
        """Explain the routing and outcome of a request. Its id is the `id` of its response, or its `x-request-id`."""
        status = "error"
        try:
            explanation = await explainer.explain(request_id, ingress.require_partition())
            status = "success"
        finally:
            ingress.metrics.ended("explain", stream=False, status=status)
        return Response(explanation, media_type="application/json")


async def respond_to_query(request: Request, ingress: Ingress, body: ChatBody | TextBody) -> Response:
    """Return the response to a route query. Raises ApiError."""
    request_id = request_id_of(request, "route-")
    status = "error"
    try:
        prepared = await ingress.prepare(body, request.headers.items())
        result = await ingress.query(request_id, prepared)
        status = "success"
    finally:
        ingress.metrics.ended("route", stream=False, status=status)
    content = msgspec.json.encode(route_of(result, body.model, prepared.prompt_tokens))
    return Response(content, headers={"x-request-id": request_id}, media_type="application/json")


def kind_of(raw: bytes) -> type[ChatBody] | type[TextBody]:
    """Return the class of a body. Raises ApiError if it has neither messages nor a prompt."""
    try:
        found = msgspec.json.decode(raw, type=_Kind)
    except (msgspec.MsgspecError, RecursionError):
        return ChatBody  # parsing it raises the error
    if found.messages is not msgspec.UNSET:
        return ChatBody
    if found.prompt is msgspec.UNSET:
        raise invalid("the body has neither messages nor a prompt; give one of them", "messages")
    return TextBody
