"""Routes that send commands to workers. The names of routes and fields are those of vLLM and Dynamo.

Every route runs one command, and responds when every worker has an outcome. The body always contains the outcomes. The
status is that of the worst outcome: 200 if all workers succeeded, 409 if an engine refused the command, 502 if a worker
left, 504 if a worker did not respond in time.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args
from urllib.parse import unquote, urlsplit

import msgspec
from fastapi import FastAPI, Request
from fastapi.params import Depends
from fastapi.responses import Response
from pydantic import Field, model_validator

from forebay.events.control import LORA_CHANGES, Action, Command
from forebay.events.decisions import CommandOutcome
from forebay.events.names import NameInvalid, require_adapter
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.http.body import read_body, request_id_of
from forebay.ingress.http.openapi import COMMANDS, body_of, errors
from forebay.ingress.ingress import Ingress
from forebay.ingress.openai.fields import CheckedBody, Neutral, parse

ACTIONS: tuple[Action, ...] = get_args(Action)
TIMEOUT_S = 60.0  # long enough to read an adapter from a disk
TIMEOUT_S_MAX = 3_600.0
BODY_BYTES_MAX = 1 << 20
WORKERS_MAX = 1_024
WORKERS_SHOWN = 3

Name = Annotated[str, Field(min_length=1, max_length=256)]
Level = Annotated[int, Field(ge=1, le=2)]

# HTTP status and error code of each outcome, the worst first.
STATUSES: tuple[tuple[Literal["timed_out", "left", "refused"], int, str], ...] = (
    ("timed_out", 504, "command_timed_out"),
    ("left", 502, "worker_left"),
    ("refused", 409, "command_refused"),
)


LORA_NEUTRAL: Neutral = {"load_inplace": (None, False)}  # in vLLM it replaces an adapter of the same name
LORA_IGNORED = frozenset({"lora_int_id"})  # vLLM's number of an adapter

# Parts of JSON schemas: the name of an adapter, and two ways to name its directory.
NAMED = {"required": ["lora_name"], "properties": {"lora_name": {"minLength": 1}}}
IN_PATH = {
    "required": ["lora_path"],
    "properties": {"lora_path": {"minLength": 1}, "source": {"type": "null"}},
}
IN_SOURCE = {"required": ["source"], "properties": {"source": {"type": "object"}}}


class CommandBody(CheckedBody):
    """Workers that a command is for, by default all, and the time that they have in seconds."""

    worker_ids: Annotated[tuple[Name, ...], Field(max_length=WORKERS_MAX)] = ()
    pool: Annotated[str, Field(max_length=256)] = ""
    timeout_s: Annotated[float, Field(gt=0.0, le=TIMEOUT_S_MAX, allow_inf_nan=False)] = TIMEOUT_S

    def command(self, action: Action) -> Command:
        """Return the command. Raises ApiError if a field is missing."""
        return Command(action=action)


class SleepBody(CommandBody):
    """Body of POST /sleep. Level 1 keeps the weights in host memory, level 2 drops them."""

    level: Level = 1

    def command(self, action: Action) -> Command:
        """Return the command."""
        return Command(action=action, level=self.level)


class LoraSource(CheckedBody):
    """Directory of an adapter in the format of Dynamo's API."""

    path = "source."

    uri: Annotated[str, Field(json_schema_extra={"pattern": "^file:///"})]

    @model_validator(mode="after")
    def _check(self) -> "LoraSource":
        _path_of(self)
        return self


class LoraBody(CommandBody):
    """An adapter and its directory on the workers: vLLM's `lora_path` or Dynamo's `source.uri`."""

    neutral = LORA_NEUTRAL
    ignored = LORA_IGNORED

    lora_name: Annotated[str, Field(max_length=256)] = ""
    lora_path: Annotated[str, Field(max_length=4_096)] = ""
    source: LoraSource | None = None

    def command(self, action: Action) -> Command:
        """Return the command. Raises ApiError if a field is missing."""
        if not self.lora_name:
            raise invalid("lora_name is missing; give the name of the adapter", "lora_name")
        if action == "unload_lora":
            return Command(action=action, lora_name=self.lora_name)
        path = _path_of(self.source) if self.source is not None else self.lora_path
        if not path:
            raise invalid("lora_path is missing; give the directory of the adapter", "lora_path")
        return Command(action=action, lora_name=self.lora_name, lora_path=path)


class LoadBody(LoraBody):
    """Body of a request that loads an adapter."""

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        """Add that the name and the directory are required."""
        schema["allOf"] = [NAMED, {"anyOf": [IN_PATH, IN_SOURCE]}]


class UnloadBody(LoraBody):
    """Body of a request that unloads an adapter."""

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        """Add that the name is required."""
        schema["allOf"] = [NAMED]


class AnyCommandBody(LoraBody):
    """Body of POST /v1/commands."""

    action: str
    level: Level = 1

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        """Add the actions and the fields that each requires."""
        others = [action for action in ACTIONS if action not in LORA_CHANGES]
        loads = {"allOf": [{"properties": {"action": {"const": "load_lora"}}}, NAMED, {"anyOf": [IN_PATH, IN_SOURCE]}]}
        unloads = {"allOf": [{"properties": {"action": {"const": "unload_lora"}}}, NAMED]}
        schema["anyOf"] = [{"properties": {"action": {"enum": others}}}, loads, unloads]

    def named(self) -> Command:
        """Return the command. Raises ApiError if the action is unknown or a field is missing."""
        action = next((one for one in ACTIONS if one == self.action), None)
        if action is None:
            known = ", ".join(ACTIONS)
            raise invalid(f"unknown command {self.action!r}; commands are: {known}", "action", "unknown_command")
        return self.command(action) if action in LORA_CHANGES else Command(action=action, level=self.level)


COMMAND_BODIES = (AnyCommandBody, CommandBody, LoadBody, SleepBody, UnloadBody)

BodyT = TypeVar("BodyT", bound=CommandBody)


def add_commands(app: FastAPI, ingress: Ingress, dependencies: Sequence[Depends]) -> None:
    """Add the routes.

    Args:
        app: the application.
        ingress: the ingress.
        dependencies: FastAPI dependencies of each route.
    """

    @app.post(
        "/v1/commands", dependencies=dependencies, openapi_extra=body_of(AnyCommandBody), responses=errors(*COMMANDS)
    )
    async def any_command(request: Request) -> Response:
        """Run the command that `action` names."""
        body = await _body(AnyCommandBody, request)
        return await _run(request, ingress, body, body.named())

    @app.get("/v1/loras", dependencies=dependencies, responses=errors(*COMMANDS))
    async def list_loras(request: Request) -> Response:
        """Return the adapters that workers have loaded, by name and by worker."""
        body = await _body(CommandBody, request)
        return await _run(request, ingress, body, body.command("list_loras"))

    @app.delete(
        "/v1/loras/{lora_name:path}",
        dependencies=dependencies,
        openapi_extra=body_of(CommandBody, required=False),
        responses=errors(*COMMANDS),
    )
    async def delete_lora(request: Request, lora_name: str) -> Response:
        """Unload an adapter."""
        body = await _body(LoraBody, request, {"lora_name": lora_name})
        return await _run(request, ingress, body, body.command("unload_lora"))

    def add(path: str, action: Action, kind: type[CommandBody], text: str) -> None:
        @app.post(
            path,
            name=action,
            description=text,
            dependencies=dependencies,
            openapi_extra=body_of(kind, required=issubclass(kind, LoraBody)),
            responses=errors(*COMMANDS),
        )
        async def route(request: Request) -> Response:
            body = await _body(kind, request)
            return await _run(request, ingress, body, body.command(action))

    add("/v1/loras", "load_lora", LoadBody, "Load an adapter.")
    add("/v1/load_lora_adapter", "load_lora", LoadBody, "Load an adapter.")
    add("/v1/unload_lora_adapter", "unload_lora", UnloadBody, "Unload an adapter.")
    add("/clear_kv_blocks", "clear_kv_blocks", CommandBody, "Clear the KV caches.")
    add("/reset_prefix_cache", "clear_kv_blocks", CommandBody, "Clear the KV caches.")
    add("/sleep", "sleep", SleepBody, "Free the memory of engines until they wake up.")
    add("/wake_up", "wake_up", CommandBody, "Wake up engines.")
    add("/pause", "pause", CommandBody, "Stop computing until `/resume`; requests wait.")
    add("/resume", "resume", CommandBody, "Continue after `/pause`.")


async def _run(request: Request, ingress: Ingress, body: CommandBody, command: Command) -> Response:
    status = "error"
    try:
        if command.action == "load_lora":  # an adapter that is already loaded can be unloaded under any name
            _require_adapter(command.lora_name, ingress.settings.model_name)
        command_id = request_id_of(request, "command-")
        result = await ingress.commands.run(
            command,
            timeout_s=body.timeout_s,
            command_id=command_id,
            pool=body.pool,
            worker_ids=body.worker_ids,
        )
        error = _error_of(command.action, result.outcomes)
        status = "success" if error is None else "error"
    finally:
        ingress.metrics.ended("command", stream=False, status=status)
    content: dict[str, Any] = {
        "command_id": command_id,
        "action": command.action,
        "outcomes": [_plain(outcome) for outcome in result.outcomes],
    }
    if command.action == "list_loras":
        content["loras"] = _by_name(result.outcomes)
    if error is not None:
        ingress.metrics.errors.labels(error.code).inc()
        content |= error.body()
    return Response(
        msgspec.json.encode(content),
        200 if error is None else error.status,
        {"x-request-id": command_id},
        "application/json",
    )


def _require_adapter(name: str, model: str) -> None:
    try:
        require_adapter(name, model)
    except NameInvalid as error:
        raise invalid(str(error), "lora_name", "invalid_lora_name") from error


async def _body(kind: type[BodyT], request: Request, path: Mapping[str, Any] | None = None) -> BodyT:
    """Return the body, which may be empty, merged with the query and the fields of the path. Raises ApiError."""
    raw = await read_body(request, BODY_BYTES_MAX)
    fields: dict[str, Any] = _query(request)
    if raw.strip():
        try:
            given = msgspec.json.decode(raw)
        except (msgspec.MsgspecError, RecursionError):
            given = None
        if not isinstance(given, dict):
            return parse(kind, raw)  # raises the error of an invalid body
        fields |= given
    return parse(kind, msgspec.json.encode({**fields, **(path or {})}))


def _query(request: Request) -> dict[str, Any]:
    """Return the fields of the query, where vLLM expects some of them. Raises ApiError."""
    fields: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        if name == "worker_id":
            fields.setdefault("worker_ids", []).append(text)
        elif name in ("level", "timeout_s"):
            try:
                fields[name] = int(text) if name == "level" else float(text)
            except ValueError as error:
                raise invalid(f"{name} is {text!r}; it must be a number", name) from error
        else:
            fields[name] = text
    return fields


def _path_of(source: LoraSource) -> str:
    """Return the directory of a `file:` URI. Raises ApiError for others: workers download nothing."""
    try:
        parts = urlsplit(source.uri)
    except ValueError as error:
        raise invalid(f"source.uri: {error}", "source.uri") from error
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path:
        raise invalid("source.uri must be file:///..., a directory that workers can read", "source.uri")
    return unquote(parts.path)


def _error_of(action: Action, outcomes: Sequence[CommandOutcome]) -> ApiError | None:
    """Return the error of the worst outcome, None if all workers succeeded."""
    failed = [outcome for outcome in outcomes if outcome.status != "done"]
    for kind, status, code in STATUSES:
        if any(outcome.status == kind for outcome in failed):
            shown = "; ".join(f"{one.worker_id}: {one.message}" for one in failed[:WORKERS_SHOWN])
            more = "; …" if len(failed) > WORKERS_SHOWN else ""
            text = f"{len(failed)} of {len(outcomes)} workers did not {action}: {shown}{more}"
            return ApiError(status, code, text)
    return None


def _plain(outcome: CommandOutcome) -> dict[str, Any]:
    return {
        "worker_id": outcome.worker_id,
        "pool": outcome.pool,
        "status": outcome.status,
        "loras": list(outcome.loras),
        "message": outcome.message or None,
    }


def _by_name(outcomes: Sequence[CommandOutcome]) -> dict[str, list[str]]:
    """Return the ids of the workers that have loaded each adapter."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        for name in outcome.loras:
            found.setdefault(name, []).append(outcome.worker_id)
    return dict(sorted(found.items()))
