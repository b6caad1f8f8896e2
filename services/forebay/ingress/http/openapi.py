"""Describe request bodies and responses in /openapi.json.

This package parses and encodes the bodies, not FastAPI, so FastAPI knows neither their schemas nor their errors. The
schemas are generated at the first request for the document, because that takes longer than the start of an ingress.
"""

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from forebay.events.descriptions import split_description
from forebay.ingress.errors import is_of_messages
from forebay.ingress.http.guards import requires_api_key
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
                "param": {"type": ["string", "null"], "description": "Path of the invalid parameter."},
                "code": {"type": "string", "description": "Stable name of the error."},
            },
        }
    },
}
MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message", "details"]},
        "request_id": {"type": ["string", "null"]},
    },
}
API_KEY = {"type": "http", "scheme": "bearer", "description": "A key in --api-key, FOREBAY_API_KEY or --api-key-file."}
MEANINGS = {
    400: "The request is invalid.",
    401: "The API key is missing, wrong, revoked or expired, or the admin token is missing.",
    403: "The request comes from a web page of another origin, has an unknown `Host`, or the wrong admin token.",
    404: "The model, worker, pool, policy, request or path is unknown.",
    405: "The path does not support this method; `Allow` lists the supported methods.",
    408: "The request did not arrive in time.",
    409: "The id or the idempotency key is in use, an engine refused the command, or the model is not disaggregated.",
    410: "Retention, a client or an operator removed what is needed.",
    413: "The body is too large.",
    415: "The body is not declared as application/json, or has an unsupported Content-Encoding.",
    421: "Another process has the group; the message has its address.",
    422: "The workers have stored no usable model card, so a text cannot be tokenized.",
    429: "There are too many requests; try again after `Retry-After`.",
    431: "The headers are too large.",
    499: "The client closed the connection.",
    500: "Internal error.",
    501: "The ingress or the engine does not support the request.",
    502: "A worker failed or left.",
    503: "No worker, router or log is available; try again after `Retry-After`.",
    504: "There was no response in time.",
    529: "The queue is full; try again after `Retry-After`.",
}
EVERYWHERE = (403, 405, 408, 431, 500, 503)  # every route may return these: errors of server, origin guard and log
BODY_ERRORS = (400, 413, 415, 499)
RUNS = (*BODY_ERRORS, 404, 409, 410, 429, 501, 502, 504, 529)  # errors of requests that workers run
QUERIES = (*BODY_ERRORS, 404, 429, 501, 504, 529)
COMMANDS = (*BODY_ERRORS, 401, 404, 409, 501, 502, 504)
SETTINGS = (*BODY_ERRORS, 401, 404, 409)


def errors(*statuses: int) -> Responses:
    """Return the descriptions of the error responses of a route. `EVERYWHERE` is added to `statuses`."""
    return {status: _error(MEANINGS[status]) for status in sorted({*EVERYWHERE, *statuses})}


def streamed() -> Responses:
    content = {JSON: {"schema": {"type": "object"}}, EVENTS: {"schema": {"type": "string"}}}
    return {200: {"description": "The completion; a stream of events if `stream` is true.", "content": content}}


def json_of(kind: type[msgspec.Struct]) -> Responses:
    schema = {"$ref": REFERENCE.format(model=kind.__name__)}
    return {200: {"description": split_description(kind.__doc__)[0], "content": {JSON: {"schema": schema}}}}


def content(kind: str, schema: str, description: str) -> Responses:
    return {200: {"description": description, "content": {kind: {"schema": {"type": schema}}}}}


def text(description: str) -> Responses:
    return content(TEXT, "string", description)


def body_of(*kinds: type[Body], required: bool = True) -> dict[str, Any]:
    """Return the description of a request body, which must match one of `kinds`."""
    schemas = [{"$ref": REFERENCE.format(model=kind.__name__)} for kind in kinds]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": required, "content": {JSON: {"schema": schema}}}}


def describe(
    app: FastAPI, bodies: Sequence[type[Body]], results: Sequence[type[msgspec.Struct]], *, has_key: bool = False
) -> None:
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas |= {
                "Error": ERROR,
                "MessagesError": MESSAGES_ERROR,
                **_schemas(tuple(bodies)),
                **_result_schemas(tuple(results)),
            }
            if has_key:
                document["components"].setdefault("securitySchemes", {})["ApiKey"] = API_KEY
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    if operation["responses"].get("422", {}).get("description") == "Validation Error":
                        del operation["responses"]["422"]  # FastAPI's; invalid parameters get 400 instead
                    if has_key and requires_api_key(path):
                        operation["security"] = [{"ApiKey": []}]
                        operation["responses"]["401"] = _error(MEANINGS[401])
                    for status, response in operation["responses"].items():
                        if is_of_messages(path) and int(status) >= 400:
                            reference = {"$ref": REFERENCE.format(model="MessagesError")}
                            response["content"] = {JSON: {"schema": reference}}
        return app.openapi_schema or generate()

    app.openapi = openapi  # type: ignore[method-assign]


@functools.cache  # the same for every application of a process
def _schemas(bodies: tuple[type[Body], ...]) -> dict[str, Any]:
    _, whole = models_json_schema([(kind, "validation") for kind in bodies], by_alias=True, ref_template=REFERENCE)
    definitions: dict[str, Any] = whole["$defs"]
    assert all(kind.__name__ in definitions for kind in bodies), "two bodies have the same name"
    return definitions


@functools.cache
def _result_schemas(results: tuple[type[msgspec.Struct], ...]) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(results, ref_template=REFERENCE.format(model="{name}"))
    for schema in schemas.values():
        schema["description"], meanings = split_description(schema.get("description", ""))
        for name, field in schema["properties"].items():
            if name in meanings:
                field["description"] = meanings[name]
    return schemas


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": {"$ref": REFERENCE.format(model="Error")}}}}
