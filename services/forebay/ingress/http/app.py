"""The HTTP routes of an ingress."""

from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.events.names import unknown_name
from forebay.ingress.bodies import EMBEDDING_PATH, KINDS, AnyBody
from forebay.ingress.caller import caller_of
from forebay.ingress.drain import DrainMiddleware
from forebay.ingress.errors import MESSAGES_PATH, ApiError
from forebay.ingress.explainer import Explainer
from forebay.ingress.finder import RequestFinder
from forebay.ingress.front import Front
from forebay.ingress.http.admin import BODIES as ADMIN_BODIES
from forebay.ingress.http.admin import add_admin, token_check
from forebay.ingress.http.answers import add_answers
from forebay.ingress.http.guards import LOOPBACK_NAMES, ApiKeyGuard, Cors, OriginGuard
from forebay.ingress.http.health import add_health
from forebay.ingress.http.openapi import EVENTS, RUNS, body_of, content, describe, errors, streamed
from forebay.ingress.http.pages import add_pages
from forebay.ingress.http.queries import BODIES as TOKENIZATION_BODIES
from forebay.ingress.http.queries import StatusOf, add_explain, add_route_query, add_status, add_tokenization
from forebay.ingress.http.requests import ENDPOINTS_PATH, RunRoutes, error_response
from forebay.ingress.http.responses import add_responses
from forebay.ingress.messages.body import MessagesBody
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.requests import CHAT_PATH, TEXT_PATH, ChatBody, TextBody
from forebay.ingress.responses.body import RESPONSES_PATH, ResponsesBody
from forebay.ingress.served_models import ServedModels
from forebay.replay.status import GroupStatus
from forebay.transport.base import LogError


def build_app(
    models: ServedModels,
    registry: CollectorRegistry,
    explainer: Explainer | None = None,
    hosts: frozenset[str] | None = None,
    status_of: StatusOf | None = None,
) -> "IngressApp":
    """Return the HTTP application of an ingress.

    Args:
        explainer: explains the routing of a request; with None the explain route responds with 501.
        hosts: accepted values of the header `Host`; None accepts every value.
        status_of: returns the status of a model; with None it is derived from the log.
    """
    app = IngressApp(title="forebay", summary="OpenAI-compatible ingress", docs_url=None, redoc_url=None)
    finder = RequestFinder(models)
    app.front = _front(app, models, finder, hosts)
    settings = models.front.settings
    _add_errors(app, models.front)
    add_pages(app, settings.model_name)
    _describe_runs(app)
    _add_models(app, models)
    add_health(app, registry, models.why_not_ready, lambda: models.ready_details)
    add_route_query(app, models)
    add_tokenization(app, models)
    add_answers(app, models.front, finder)
    add_responses(app, models.front, finder)
    explain = explainer or Explainer(None)
    add_explain(app, models, explain, finder)
    add_status(app, models, explain, status_of)
    bodies = (*KINDS.values(), *TOKENIZATION_BODIES)
    if settings.admin_port is not None:
        app.admin = admin = _admin_app(models, hosts)
        add_status(admin, models, explain, status_of, all_tenants=True)
    elif settings.admin_token:
        add_admin(app, models)
        bodies += ADMIN_BODIES
    describe(app, bodies, (GroupStatus,), has_key=settings.requires_key)
    return app


def _admin_app(models: ServedModels, hosts: frozenset[str] | None) -> "IngressApp":
    """Return an application that has only the admin API, and the routes that `forebay control` needs.

    Every route requires the admin token.
    """
    settings, metrics = models.front.settings, models.front.metrics
    app = IngressApp(openapi_url=None, dependencies=[Depends(token_check(settings.admin_token))])
    front = DrainMiddleware(app.serve_route, models.front.drain, metrics.reject)
    app.front = OriginGuard(front, hosts or frozenset(LOOPBACK_NAMES), frozenset(), metrics.reject)
    _add_errors(app, models.front)
    add_admin(app, models)
    _add_models(app, models)
    return app


class IngressApp(FastAPI):
    """FastAPI application behind the ASGI middleware `front`, which can serve a request without FastAPI.

    Middleware that is added to FastAPI itself runs inside of several layers of Starlette.

    Attributes:
        admin: application of the port of the admin API; None if there is no such port.
    """

    front: ASGIApp
    admin: "IngressApp | None" = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)

    async def serve_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)


def _front(app: IngressApp, models: ServedModels, finder: RequestFinder, hosts: frozenset[str] | None) -> ASGIApp:
    """Return the middleware of the application, outermost first: CORS, origin, API key, drain, runs."""
    settings, metrics = models.front.settings, models.front.metrics
    front: ASGIApp = RunRoutes(app.serve_route, models, finder)
    front = DrainMiddleware(front, models.front.drain, metrics.reject)
    front = ApiKeyGuard(front, models.front.keys, metrics.reject)
    front = OriginGuard(front, hosts, settings.cors_origins, metrics.reject)
    return Cors(front, settings.cors_origins) if settings.cors_origins else front


def _describe_runs(app: FastAPI) -> None:
    """Describe the routes that `RunRoutes` serves in the OpenAPI schema, and reject other methods."""

    def add(path: str, kind: type[AnyBody], text: str) -> None:
        responses = {**({} if kind is EmbeddingBody else streamed()), **errors(*RUNS)}

        @app.post(path, name=kind.endpoint, description=text, openapi_extra=body_of(kind), responses=responses)
        async def run() -> Response:
            raise AssertionError("RunRoutes serves these requests")

    events = content(EVENTS, "string", "An event per JSON value of the endpoint, then the event `end` or `error`.")

    @app.post(f"{ENDPOINTS_PATH}{{name}}", name="endpoints", responses={**events, **errors(*RUNS)})
    async def call(name: str) -> Response:
        """Call an endpoint of a component, `namespace.component.endpoint`. The body is its argument, any JSON value."""
        raise AssertionError("RunRoutes serves these requests")

    add(CHAT_PATH, ChatBody, "Create a chat completion.")
    add(TEXT_PATH, TextBody, "Continue a text or a list of token ids.")
    add(EMBEDDING_PATH, EmbeddingBody, "Create embeddings.")
    add(RESPONSES_PATH, ResponsesBody, "Create a response.")
    add(MESSAGES_PATH, MessagesBody, "Create a message, in the format of Anthropic's API.")


def _add_models(app: FastAPI, models: ServedModels) -> None:
    async def allowed(request: Request) -> list[dict[str, Any]]:
        caller = caller_of(request.scope)
        return [card for card in await models.cards() if caller.may_use(card["id"])]

    @app.get("/v1/models", responses=errors())
    async def list_models(request: Request) -> dict[str, Any]:
        """Return the models and their LoRA adapters."""
        return {"object": "list", "data": await allowed(request)}

    @app.get("/v1/models/{name:path}", responses=errors(404))
    async def model(request: Request, name: str) -> dict[str, Any]:
        """Return one model."""
        cards = await allowed(request)
        for card in cards:
            if card["id"] == name:
                return card
        raise ApiError(404, "model_not_found", unknown_name("model", name, [card["id"] for card in cards]), "model")


def _add_errors(app: FastAPI, front: Front) -> None:
    @app.exception_handler(ApiError)
    @app.exception_handler(LogError)
    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(Exception)
    async def api_error(request: Request, error: Exception) -> Response:
        return error_response(front, error, request.url.path)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        respond = partial(error_response, front, path=path)
        if error.status_code == 404:
            return respond(ApiError(404, "not_found", f"unknown path {path}"))
        if error.status_code == 405:
            response = respond(ApiError(405, "method_not_allowed", f"{path} does not support {request.method}"))
            response.headers["allow"] = ", ".join(sorted(_methods_of(app, request)))
            return response
        return respond(ApiError(error.status_code, "http_error", str(error.detail)))


def _methods_of(app: FastAPI, request: Request) -> set[str]:
    found: set[str] = set()
    for route in app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return found | ({"HEAD"} if "GET" in found else set())
