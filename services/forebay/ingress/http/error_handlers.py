"""Responses to errors of an application that counts none."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from forebay.ingress.errors import ApiError, internal_error, invalid
from forebay.transport.base import LogError


def add_errors(app: FastAPI) -> None:
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
