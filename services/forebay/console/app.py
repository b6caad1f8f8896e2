"""The HTTP application of a console: its page, and the endpoints that the page uses."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from forebay.console.actions import add_actions
from forebay.console.console import Console
from forebay.console.pages import PageHeaders, add_pages
from forebay.console.routes_catalog import add_catalog_routes
from forebay.console.routes_derived import add_derived_routes
from forebay.console.routes_what_if import add_what_if_routes
from forebay.ingress.errors import ApiError, internal_error, invalid
from forebay.ingress.http.api_key import ApiKeyGuard
from forebay.ingress.http.origin_guard import OriginGuard
from forebay.transport.base import LogError


def build_console_app(console: Console, hosts: frozenset[str] | None) -> FastAPI:
    """Return the HTTP application of a console.

    Args:
        hosts: accepted values of the header `Host`; None accepts every value.
    """
    app = FastAPI(title="forebay console", summary="The fleet, any request, any moment", docs_url=None, redoc_url=None)
    app.add_middleware(ApiKeyGuard, keys=[console.settings.token], on_rejected=_ignore)
    app.add_middleware(OriginGuard, hosts=hosts, origins=frozenset(), on_rejected=_ignore)
    app.add_middleware(PageHeaders)
    _add_errors(app)
    add_catalog_routes(app, console)
    add_derived_routes(app, console)
    add_what_if_routes(app, console)
    settings = console.settings
    add_actions(app, settings.ingress_url, settings.source.kafka, settings.group)
    add_pages(app)
    return app


def _ignore(_: str) -> None:
    """Count no rejections, because a console has no metrics."""


def _add_errors(app: FastAPI) -> None:
    def respond(error: ApiError) -> Response:
        return Response(error.encoded(), error.status, error.headers(), "application/json")

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return respond(error)

    @app.exception_handler(RequestValidationError)
    async def invalid_parameter(_: Request, error: RequestValidationError) -> Response:
        first: dict[str, Any] = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:])
        return respond(invalid(f"{name} is {str(first.get('input'))[:256]!r}: {first['msg']}", name))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return respond(ApiError(404, "not_found", f"unknown path {request.url.path}"))
        return respond(ApiError(error.status_code, "http_error", str(error.detail)))

    @app.exception_handler(LogError)
    async def log_failed(_: Request, error: LogError) -> Response:
        return respond(ApiError(503, "log_unavailable", str(error)))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, __: Exception) -> Response:
        return respond(internal_error())
