"""Routes that return where a request would be routed (route query), and explain how a request was routed."""

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from forebay.events.request_ids import client_id_of
from forebay.ingress.errors import invalid
from forebay.ingress.explainer import Explainer
from forebay.ingress.group import GroupClient
from forebay.ingress.http.body import request_id_of
from forebay.ingress.http.openapi import QUERIES, body_of, errors
from forebay.ingress.openai.render import route_of
from forebay.ingress.openai.requests import ChatBody, TextBody
from forebay.ingress.served import ServedModels


class _Kind(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def add_route_query(app: FastAPI, models: ServedModels) -> None:
    """Add `POST /v1/route` to `app`."""
    front = models.front

    @app.post("/v1/route", openapi_extra=body_of(ChatBody, TextBody), responses=errors(*QUERIES))
    async def route(request: Request) -> Response:
        """Return the worker that the router would select for a chat or text completion. Nothing is generated."""
        models.require_any()
        with front.bodies.reader() as reader:
            raw = await reader.read(request)
            body = front.parse(kind_of(raw), raw)
            return await respond_to_query(request, models, body)


def add_explain(app: FastAPI, ingress: GroupClient, explainer: Explainer) -> None:
    """Add `GET /v1/requests/{request_id}/explain` to `app`.

    Args:
        ingress: serves the model of the requests.
    """

    @app.get("/v1/requests/{request_id:path}/explain", responses=errors(404, 501, 504))
    async def explain(request_id: str) -> Response:
        """Explain the routing and outcome of a request.

        The path names the `id` of its response, or the id that the client chose. If several requests have the same id,
        the explanation is about the last routed one.
        """
        status = "error"
        try:
            explanation = await explainer.explain(request_id, ingress.require_partition())
            status = "success"
        finally:
            ingress.metrics.ended("explain", stream=False, status=status)
        return Response(explanation, media_type="application/json")


async def respond_to_query(request: Request, models: ServedModels, body: ChatBody | TextBody) -> Response:
    """Query the owner where it would route a request now, and return the HTTP response with the selected worker.

    Args:
        request: HTTP request of the client, for its headers.
        body: parsed body of the request that would be routed.

    Raises:
        ApiError: the body is invalid, or the owner does not respond.
    """
    if isinstance(body, TextBody) and len(body.prompts) > 1:
        raise invalid("a route query has one prompt; send one query per prompt", "prompt", "unsupported_parameter")
    request_id = request_id_of(request, "route-")
    ingress, model = await models.find(body.model, request_id)
    status = "error"
    try:
        prepared, *_ = await ingress.prepare(body, request.headers.items(), model)
        result = await ingress.query(request_id, prepared)
        status = "success"
    finally:
        ingress.metrics.ended("route", stream=False, status=status)
    content = msgspec.json.encode(route_of(result, body.model, prepared.prompt_tokens))
    return Response(content, headers={"x-request-id": client_id_of(request_id)}, media_type="application/json")


def kind_of(raw: bytes) -> type[ChatBody] | type[TextBody]:
    """Return the class of a completion body: ChatBody if it has `messages`, TextBody if it has `prompt`.

    Raises:
        ApiError: 400 if the body has neither of them.
    """
    try:
        found = msgspec.json.decode(raw, type=_Kind)
    except (msgspec.MsgspecError, RecursionError):
        return ChatBody  # parsing it raises the error
    if found.messages is not msgspec.UNSET:
        return ChatBody
    if found.prompt is msgspec.UNSET:
        raise invalid("the body has neither messages nor a prompt; give one of them", "messages")
    return TextBody
