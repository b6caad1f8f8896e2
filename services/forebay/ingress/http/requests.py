"""Serve the requests that workers run: completions, embeddings, and calls of endpoints.

`RunRoutes` calls these steps, as the Kafka API does in `kafka_api.partition`:
    read -> parse -> find the model -> `LoadedModel.prepare` -> `fold` -> `GroupClient.submit` -> `ResponseFold.step`

Theory of operation. The layers of FastAPI and Starlette around a route took a tenth of the CPU time of an ingress, and
these routes need neither dependencies nor parameters of the path. So they bypass the layers. They are still registered
with FastAPI, which describes them in the OpenAPI schema and responds to other methods.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay import runtime
from forebay.events.keys import KeySet
from forebay.events.request_ids import NUMBER_BYTES, RequestLocation, client_id_of, http_request_id
from forebay.events.requests import RequestSubmitted
from forebay.ingress.access_log import add_fields
from forebay.ingress.bodies import KINDS, AnyBody
from forebay.ingress.caller import caller_of
from forebay.ingress.errors import ApiError, internal_error
from forebay.ingress.finder import RequestFinder
from forebay.ingress.front import Front
from forebay.ingress.http.body import BodyReader, request_id_of
from forebay.ingress.http.idempotency import REPLAYED, Idempotency, idempotency_of
from forebay.ingress.http.queries import respond_to_query
from forebay.ingress.http.response import AttachedResponse, OneResponse, PartsResponse
from forebay.ingress.http.responses import BackgroundResponse, snapshot, with_history
from forebay.ingress.limits import LimitsOfKeys
from forebay.ingress.loaded_model import LoadedModel
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.prepare import PreparedRequest, reserved_tokens
from forebay.ingress.recorder import RecordedStream, Recorder
from forebay.ingress.responses.body import RESPONSES_PATH, ResponsesBody
from forebay.ingress.served_models import ServedModels
from forebay.transport.base import LogError

ENDPOINTS_PATH = "/v1/endpoints/"
READ_PATHS = ("/v1/requests/", f"{RESPONSES_PATH}/")


class RunRoutes:
    """ASGI middleware that serves `POST` requests of the paths in `KINDS` and of endpoints, and passes on all others.

    A request is admitted or rejected before its body is read, also one that reads or cancels an earlier request.
    """

    def __init__(self, app: ASGIApp, models: ServedModels, finder: RequestFinder) -> None:
        self._app = app
        self._models = models
        self._finder = finder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, is_post = scope.get("path", ""), scope["type"] == "http" and scope["method"] == "POST"
        kind = KINDS.get(path) if is_post else None
        is_call = is_post and path.startswith(ENDPOINTS_PATH)
        endpoint = "endpoints" if is_call else "" if kind is None else kind.endpoint
        if not endpoint and (not path.startswith(READ_PATHS) or path.endswith("/explain")):
            await self._app(scope, receive, send)
            return
        front = self._models.front
        try:
            caller = caller_of(scope)
            if caller.tenant:
                send = _with_limits(send, front.limits, caller.key)
            front.admission.enter(tenant=caller.tenant, is_read=not endpoint)
        except ApiError as error:
            front.metrics.reject(error.code)
            if endpoint:
                front.metrics.rejected(endpoint)
            # The connection stays open. If it were closed during the upload, the client might not see the response.
            await error.send(send, body=error.encoded(scope["path"]))
            return
        try:
            if not endpoint:
                await self._app(scope, receive, send)
                return
            request = Request(scope, receive)
            try:
                if kind is None:
                    response = await respond_to_call(request, self._models, self._finder)
                else:
                    response = await respond(request, self._models, self._finder, kind)
            except (ApiError, LogError, ClientDisconnect) as error:
                response = error_response(front, error, scope["path"])
            await response(scope, receive, send)
        finally:
            front.admission.leave()


async def respond(request: Request, models: ServedModels, finder: RequestFinder, kind: type[AnyBody]) -> Response:
    """Submit a request, and return its unsent response. Raises ApiError if it is invalid or cannot be served."""
    began_s = runtime.monotonic_s()
    front = models.front
    models.require_any()
    with BodyReader(front.bodies) as reader:
        raw = await reader.read(request)
        await front.admission.turn(len(raw))
        body = front.parse(kind, raw)
        caller = caller_of(request.scope)
        caller.require_model(body.model)
        if body.queries_route and not isinstance(body, EmbeddingBody):
            return await respond_to_query(request, models, body.completion)
        request_id = request_id_of(request, body.id_prefix)
        add_fields(request.scope, request_id=request_id)
        idempotency = idempotency_of(request, raw)
        # Of the models of an alias, a repetition must reach the same one.
        model, name = await models.find(body.model, request_id if idempotency is None else idempotency.key)
        model.group.require_capacity(body.endpoint, caller.tenant)
        replies_early = False
        if isinstance(body, ResponsesBody):
            body = await with_history(body, finder, model.group, caller.tenant)
            replies_early = bool(body.background and not body.stream)
        prepared = await model.prepare(body, request.headers.items(), name, caller)
        add_fields(request.scope, model=body.model)
        run = _Run(request.scope["path"], model, finder, prepared, began_s, body.outlives, replies_early)
    return await run.submit(request_id, idempotency)


async def respond_to_call(request: Request, models: ServedModels, finder: RequestFinder) -> Response:
    """Submit the call of an endpoint, and return its unsent response. Raises ApiError as `respond`."""
    began_s = runtime.monotonic_s()
    models.require_any()
    caller, name = caller_of(request.scope), request.scope["path"].removeprefix(ENDPOINTS_PATH)
    with BodyReader(models.front.bodies) as reader:
        raw = await reader.read(request)
        await models.front.admission.turn(len(raw))
        request_id = request_id_of(request, "call-")
        add_fields(request.scope, request_id=request_id)
        model = await models.find_endpoint(name, caller)
        model.group.require_capacity("endpoints", caller.tenant)
        prepared = await model.prepare_call(name, raw or b"null", request.headers.items(), caller)
        idempotency = idempotency_of(request, raw)
        run = _Run(request.scope["path"], model, finder, [prepared], began_s, outlives=False, replies_early=False)
    return await run.submit(request_id, idempotency)


class _Run(NamedTuple):
    """A prepared request of a client. One with an idempotency key may be submitted again after its response failed.

    Attributes:
        outlives: whether the request outlives its connection.
        replies_early: whether the client gets a response as soon as the request is on the log.
    """

    path: str
    model: LoadedModel
    finder: RequestFinder
    prepared: Sequence[PreparedRequest]
    began_s: float
    outlives: bool
    replies_early: bool

    async def submit(self, request_id: str, idempotency: Idempotency | None) -> Response:
        """Submit the request with a new id, and return its unsent response. Raises ApiError."""
        # Count the request for the limits of its key, with all tokens that it may use.
        key = self.prepared[0].caller.key
        reservation = await self.model.group.front.limits.admit(key, *reserved_tokens(self.prepared))
        try:
            response = await self._submit(request_id, idempotency)
        except BaseException:
            reservation.release()
            raise
        response.reservation = reservation
        return response

    async def _submit(self, request_id: str, idempotency: Idempotency | None) -> OneResponse:
        group, parts = self.model.group, self._submissions(request_id, idempotency)
        fold = self.model.fold(parts[0])
        replay = None if idempotency is None else partial(self._replay, request_id, idempotency)
        recorder = Recorder() if fold.rendering.is_kept else None
        if len(parts) > 1:
            return PartsResponse(group, fold, parts, self.began_s, recorder=recorder, replay=replay)
        (first,) = parts
        recorded = None if recorder is None else RecordedStream(first.reply_key, first.request_id, recorder)
        stream = await group.submit(first, recorded)
        response = BackgroundResponse if self.replies_early else OneResponse
        return response(group, fold, first, stream, self.began_s, recorder=recorder, replay=replay)

    def _submissions(self, request_id: str, idempotency: Idempotency | None) -> list[RequestSubmitted]:
        """Return the events of all parts, with the idempotency key, and with what the body says about their end."""
        parts = self.model.group.submissions(request_id, self.prepared)
        if self.outlives:
            parts = [replace(part, ingress_incarnation="") for part in parts]
        if idempotency is not None:
            parts = idempotency.applied(self.model.group.settings.model_name, parts)
        rendering = parts[0].rendering
        assert rendering is not None, "the first part of a response has its rendering"
        if self.outlives or idempotency is not None:
            parts[0] = replace(parts[0], rendering=replace(rendering, is_kept=True))
        return parts

    async def _replay(self, request_id: str, idempotency: Idempotency, location: RequestLocation) -> Response:
        """Return the response of an earlier request with the same key. If it has failed, submit the request again."""
        try:
            found = await self.finder.at(location, self.prepared[0].caller.tenant)
            idempotency.require_same_body(found.first)
            if found.content is not None and found.content.has_failed:
                again = http_request_id(client_id_of(request_id), runtime.random_int(NUMBER_BYTES))
                return await self.submit(again, idempotency.after_failure(location))
            if self.replies_early:
                return await snapshot(found, REPLAYED)
            return AttachedResponse(found, self.began_s, headers=REPLAYED)
        except (ApiError, LogError) as error:
            return error_response(self.model.group.front, error, self.path)


def _with_limits(send: Send, limits: LimitsOfKeys, key: KeySet) -> Send:
    """Return a function that sends a message, and adds the headers about the limits of a key to the head."""

    async def send_limited(message: Message) -> None:
        if message["type"] == "http.response.start" and (headers := limits.headers(key)):
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return send_limited


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
