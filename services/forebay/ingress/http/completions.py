"""Serve the routes of chat and text completions, without the layers that FastAPI and Starlette put around a route.

Theory of operation. For each request these layers call about twenty functions, and pass each message of the response
through two more. They took a tenth of the CPU time of an ingress, and the completion routes use none of them: neither
dependencies nor parameters of the path. The routes are still registered with FastAPI, which describes them in the
OpenAPI schema and responds to other methods.
"""

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from forebay import runtime
from forebay.ingress.access_log import add_fields
from forebay.ingress.errors import ApiError, internal_error
from forebay.ingress.front import Front
from forebay.ingress.http.body import request_id_of
from forebay.ingress.http.queries import respond_to_query
from forebay.ingress.http.response import ChoicesResponse, CompletionResponse
from forebay.ingress.openai.requests import ChatBody, TextBody
from forebay.ingress.served import ServedModels
from forebay.transport.base import LogError

BODIES: dict[str, type[ChatBody] | type[TextBody]] = {"/v1/chat/completions": ChatBody, "/v1/completions": TextBody}


class CompletionRoutes:
    """ASGI middleware that serves `POST` requests of the paths in `BODIES`.

    Args:
        app: the application that serves all other requests.
    """

    def __init__(self, app: ASGIApp, models: ServedModels) -> None:
        self._app = app
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = BODIES.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if kind is None:
            await self._app(scope, receive, send)
            return
        response: Response
        try:
            response = await complete(Request(scope, receive), self._models, kind)
        except (ApiError, LogError, ClientDisconnect) as error:
            response = error_response(self._models.front, error)
        await response(scope, receive, send)


async def complete(request: Request, models: ServedModels, kind: type[ChatBody] | type[TextBody]) -> Response:
    """Submit a completion, and return its response, which still has to be sent.

    Raises:
        ApiError: the request is invalid or cannot be served.
    """
    began_s = runtime.monotonic_s()
    front = models.front
    models.require_any()
    with front.bodies.reader() as reader:
        raw = await reader.read(request)
        await front.admission.turn()
        body = front.parse(kind, raw)
        if body.queries_route:
            return await respond_to_query(request, models, body)
        request_id = request_id_of(request, "chatcmpl-" if isinstance(body, ChatBody) else "cmpl-")
        add_fields(request.scope, request_id=request_id)
        ingress, model = await models.find(body.model, request_id)
        models.require_capacity(ingress, "chat_completions" if isinstance(body, ChatBody) else "completions")
        prepared = await ingress.prepare(body, request.headers.items(), model)
        add_fields(request.scope, model=body.model)
    response = ingress.completion(request_id, body, prepared, created_s=int(runtime.wall_s()))
    if len(prepared) > 1:
        return ChoicesResponse(ingress, response, prepared, began_s)
    return CompletionResponse(ingress, response, await ingress.submit(request_id, prepared[0]), began_s)


def error_response(front: Front, error: Exception) -> Response:
    """Count an error of a request, and return the response for the client.

    Args:
        front: counts the error.
    """
    known = _as_api_error(error)
    front.metrics.reject(known.code)
    return Response(known.encoded(), known.status, known.headers(), "application/json")


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LogError):
        return ApiError(503, "log_unavailable", str(error))
    if isinstance(error, ClientDisconnect):
        return ApiError(499, "client_disconnected", "the client disconnected before it sent the whole request")
    return internal_error()
