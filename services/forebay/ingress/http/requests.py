"""Serve the requests that workers run: chat and text completions, and embeddings.

`RunRoutes` calls these steps, as the Kafka API does in `kafka_api.partition`:
    read -> parse -> find the model -> `LoadedModel.prepare` -> `fold` -> `GroupClient.submit` -> `ResponseFold.step`

Theory of operation. The layers of FastAPI and Starlette around a route took a tenth of the CPU time of an ingress, and
these routes need neither dependencies nor parameters of the path. So they bypass the layers. They are still registered
with FastAPI, which describes them in the OpenAPI schema and responds to other methods.
"""

from collections.abc import Sequence

from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from forebay import runtime
from forebay.events.request_ids import RequestLocation
from forebay.events.requests import RequestSubmitted
from forebay.ingress.access_log import add_fields
from forebay.ingress.bodies import KINDS, AnyBody
from forebay.ingress.errors import ApiError, internal_error
from forebay.ingress.finder import RequestFinder
from forebay.ingress.front import Front
from forebay.ingress.group import GroupClient
from forebay.ingress.http.body import BodyReader, request_id_of
from forebay.ingress.http.idempotency import REPLAYED, Idempotency, idempotency_of
from forebay.ingress.http.queries import respond_to_query
from forebay.ingress.http.response import AttachedResponse, OneResponse, PartsResponse
from forebay.ingress.http.responses import BackgroundResponse, snapshot, with_history
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.prepare import PreparedRequest
from forebay.ingress.recorder import RecordedStream, Recorder
from forebay.ingress.responses.body import ResponsesBody
from forebay.ingress.served_models import ServedModels
from forebay.transport.base import LogError


class RunRoutes:
    """ASGI middleware that serves `POST` requests of the paths in `KINDS`, and passes on all others.

    A request is admitted or rejected before its body is read.
    """

    def __init__(self, app: ASGIApp, models: ServedModels, finder: RequestFinder) -> None:
        self._app = app
        self._models = models
        self._finder = finder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = KINDS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if kind is None:
            await self._app(scope, receive, send)
            return
        front = self._models.front
        try:
            front.admission.enter()
        except ApiError as error:
            front.metrics.reject(error.code)
            front.metrics.rejected(kind.endpoint)
            # The connection stays open. If it were closed during the upload, the client might not see the response.
            await error.send(send, body=error.encoded(scope["path"]))
            return
        try:
            try:
                response = await respond(Request(scope, receive), self._models, self._finder, kind)
            except (ApiError, LogError, ClientDisconnect) as error:
                response = error_response(front, error, scope["path"])
            await response(scope, receive, send)
        finally:
            front.admission.leave()


async def respond(request: Request, models: ServedModels, finder: RequestFinder, kind: type[AnyBody]) -> Response:
    """Submit a request, and return its unsent response. Raises ApiError if it is invalid or cannot be served."""
    began_s, replies_early = runtime.monotonic_s(), False
    front = models.front
    models.require_any()
    with BodyReader(front.bodies) as reader:
        raw = await reader.read(request)
        await front.admission.turn()
        body = front.parse(kind, raw)
        if body.queries_route and not isinstance(body, EmbeddingBody):
            return await respond_to_query(request, models, body.completion)
        request_id = request_id_of(request, body.id_prefix)
        add_fields(request.scope, request_id=request_id)
        idempotency = idempotency_of(request, raw)
        # Of the models of an alias, a repetition must reach the same one.
        model, name = await models.find(body.model, request_id if idempotency is None else idempotency.key)
        group = model.group
        group.require_capacity(body.endpoint)
        if isinstance(body, ResponsesBody):
            body = await with_history(body, finder, group)
            replies_early = bool(body.background and not body.stream)
        prepared = await model.prepare(body, request.headers.items(), name)
        add_fields(request.scope, model=body.model)
        parts = _submissions(group, request_id, body, prepared, idempotency)
    fold = model.fold(parts[0])

    async def replay(location: RequestLocation) -> Response:
        try:
            found = await finder.at(location)
            if idempotency is not None:
                idempotency.require_same_body(found.first)
            if replies_early:
                return await snapshot(found, REPLAYED)
            return AttachedResponse(found, began_s, headers=REPLAYED)
        except (ApiError, LogError) as error:
            return error_response(front, error, request.url.path)

    recorder = Recorder() if fold.rendering.is_kept else None
    if len(parts) > 1:
        return PartsResponse(group, fold, parts, began_s, recorder=recorder, replay=replay)
    (first,) = parts
    recorded = None if recorder is None else RecordedStream(first.reply_key, first.request_id, recorder)
    stream = await group.submit(first, recorded)
    response = BackgroundResponse if replies_early else OneResponse
    return response(group, fold, first, stream, began_s, recorder=recorder, replay=replay)


def _submissions(
    group: GroupClient,
    request_id: str,
    body: AnyBody,
    prepared: Sequence[PreparedRequest],
    idempotency: Idempotency | None,
) -> list[RequestSubmitted]:
    """Return the events of all parts, with the idempotency key, and with what the body says about their end."""
    parts = group.submissions(request_id, prepared)
    if body.outlives:
        parts = [replace(part, ingress_incarnation="") for part in parts]
    if idempotency is not None:
        parts = idempotency.applied(group.settings.model_name, parts)
    rendering = parts[0].rendering
    assert rendering is not None, "the first part of a response has its rendering"
    if body.outlives or idempotency is not None:
        parts[0] = replace(parts[0], rendering=replace(rendering, is_kept=True))
    return parts


def error_response(front: Front, error: Exception, path: str) -> Response:
    known = _as_api_error(error)
    front.metrics.reject(known.code)
    return Response(known.encoded(path), known.status, known.headers(), "application/json")


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LogError):
        return ApiError(503, "log_unavailable", str(error))
    if isinstance(error, ClientDisconnect):
        return ApiError(499, "client_disconnected", "the client disconnected before it sent the whole request")
    return internal_error()
