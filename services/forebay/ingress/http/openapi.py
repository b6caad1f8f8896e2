"""/openapi.json: request bodies from the models that parse them, and every status that a route can answer with.

Bodies are parsed by this package and not by FastAPI, so FastAPI knows neither their schemas nor their errors. The
schemas are made at the first request for the document, because that takes longer than all else that an ingress does at
its start.
"""

import functools
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from forebay.ingress.openai.fields import Body

REFERENCE = "#/components/schemas/{model}"
TEXT = "text/plain"
EVENTS = "text/event-stream"
JSON = "application/json"

Responses = dict[int | str, dict[str, Any]]

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string", "enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"], "description": "The parameter that is wrong."},
                "code": {"type": "string", "description": "Stable name of the error."},
            },
        }
    },
}
MEANINGS = {
    400: "The request is wrong in itself.",
    401: "The admin token is missing.",
    403: "The request comes from a page of another origin, names an unknown host, or has another admin token.",
    404: "There is no such model, worker, pool, request or path.",
    405: "The path does not take this method; `Allow` has those that it takes.",
    408: "The request did not arrive in time.",
    409: "The id is in use, or an engine refused the command.",
    413: "The body is too large.",
    415: "The body is not declared as application/json.",
    429: "There are too many requests; try again after `Retry-After`.",
    431: "The headers are too large.",
    499: "The client closed the connection.",
    500: "An internal error.",
    501: "This service, or the engine, does not support it.",
    502: "A worker failed or left.",
    503: "No worker, router or log is available; try again after `Retry-After`.",
    504: "There was no answer in time.",
    529: "The queue is full; try again after `Retry-After`.",
}
EVERYWHERE = (403, 405, 408, 431, 500, 503)  # of the server, the guard and the log
BODY_ERRORS = (400, 413, 415, 499)
RUNS = (*BODY_ERRORS, 404, 409, 429, 501, 502, 504, 529)  # what a request that workers run can end with
QUERIES = (*BODY_ERRORS, 404, 409, 429, 501, 504, 529)
COMMANDS = (*BODY_ERRORS, 401, 404, 409, 501, 502, 504)
SETTINGS = (*BODY_ERRORS, 401, 404, 409)


def errors(*statuses: int) -> Responses:
    """Return the error responses of a route, those of every route among them."""
    return {status: _error(MEANINGS[status]) for status in sorted({*EVERYWHERE, *statuses})}


def streamed() -> Responses:
    """Return the successful response of a completion: JSON, or a stream of events."""
    content = {JSON: {"schema": {"type": "object"}}, EVENTS: {"schema": {"type": "string"}}}
    return {200: {"description": "The completion; a stream of events if `stream` is true.", "content": content}}


def text(description: str) -> Responses:
    """Return a successful response of plain text."""
    return {200: {"description": description, "content": {TEXT: {"schema": {"type": "string"}}}}}


def body_of(*kinds: type[Body], required: bool = True) -> dict[str, Any]:
    """Return what describes the body of a route: one of these models."""
    schemas = [{"$ref": REFERENCE.format(model=kind.__name__)} for kind in kinds]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": required, "content": {JSON: {"schema": schema}}}}


def describe(app: FastAPI, bodies: Sequence[type[Body]]) -> None:
    """Have `app` describe these bodies and OpenAI's errors in its OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas |= {"Error": ERROR, **_schemas(tuple(bodies))}
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)  # FastAPI's: here it is 400
        return app.openapi_schema or generate()

    app.openapi = openapi  # type: ignore[method-assign]


@functools.cache  # the same for every application of a process
def _schemas(bodies: tuple[type[Body], ...]) -> dict[str, Any]:
    _, whole = models_json_schema([(kind, "validation") for kind in bodies], by_alias=True, ref_template=REFERENCE)
    definitions: dict[str, Any] = whole["$defs"]
    assert all(kind.__name__ in definitions for kind in bodies), "two bodies have the same name"
    return definitions


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": {"$ref": REFERENCE.format(model="Error")}}}}
