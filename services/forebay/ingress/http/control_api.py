"""Routes that send commands to workers. The names of routes and fields are those of vLLM and Dynamo.

Every route runs one command, and responds when every worker that got it has an outcome. The status is that of the worst
outcome: 200 if all succeeded, 409 if an engine refused, 502 if a worker left, 504 if one did not respond in time.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import AfterValidator, Field, model_validator

from forebay import runtime
from forebay.events.control import LORA_CHANGES, Action, Command
from forebay.events.decisions import CommandOutcome
from forebay.events.names import NAME_CHARS_MAX, NameInvalid, require_adapter, unknown_name
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.http.body import client_id, read_body
from forebay.ingress.http.openapi import COMMANDS, body_of, errors
from forebay.ingress.http.queries import group_of
from forebay.ingress.openai.fields import CheckedBody, Neutral, parse
from forebay.ingress.served_models import ServedModels


def _require_printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"it has the unprintable characters {name[:64]!r}; use printable characters only")
    return name


OperatorField = Annotated[
    str,
    Field(
        max_length=NAME_CHARS_MAX,
        description="Name of the operator, for the log.",
        json_schema_extra={"pattern": "^[ -~]*$"},
    ),
    AfterValidator(_require_printable),
]


ACTIONS: tuple[Action, ...] = get_args(Action)
URI_SCHEMES = ("file://", "hf://", "s3://")  # that workers can load an adapter from
TIMEOUT_S = 60.0  # long enough to read an adapter from a disk
TIMEOUT_S_MAX = 3_600.0
BODY_BYTES_MAX = 1 << 20
WORKERS_MAX = 1_024
WORKERS_SHOWN = 3

Name = Annotated[str, Field(min_length=1, max_length=256)]
Level = Annotated[int, Field(ge=1, le=2)]
LoraPath = Annotated[str, Field(max_length=4_096)]

# HTTP status and error code of each outcome, the worst first.
STATUSES: tuple[tuple[Literal["timed_out", "left", "refused"], int, str], ...] = (
    ("timed_out", 504, "command_timed_out"),
    ("left", 502, "worker_left"),
    ("refused", 409, "command_refused"),
)


class CommandBody(CheckedBody):
    """Fields that all commands share.

    Attributes:
        worker_ids: workers that run the command; empty for all workers.
        pool: pool whose workers run the command; empty for all pools.
        timeout_s: seconds to wait for the outcomes of the workers.
    """

    worker_ids: Annotated[tuple[Name, ...], Field(max_length=WORKERS_MAX)] = ()
    pool: Annotated[str, Field(max_length=256)] = ""
    timeout_s: Annotated[float, Field(gt=0.0, le=TIMEOUT_S_MAX, allow_inf_nan=False)] = TIMEOUT_S
    operator: OperatorField = ""

    def command(self, action: Action) -> Command:
        """Return the command for workers. Raises ApiError (400) if a field that the command requires is missing."""
        return Command(action=action)


class SleepBody(CommandBody):
    """Body of POST /sleep. With level 1 engines keep their weights in host memory, with level 2 they drop them."""

    level: Level = 1

    def command(self, action: Action) -> Command:
        return Command(action=action, level=self.level)


class LoraSource(CheckedBody):
    """Field `source` of a body that loads a LoRA adapter, as in Dynamo's API: its URI."""

    path = "source."

    uri: Annotated[LoraPath, Field(json_schema_extra={"pattern": "^(file|hf|s3)://"})]

    @model_validator(mode="after")
    def _check(self) -> "LoraSource":
        _require_uri("source.uri", self.uri)
        return self


class LoraBody(CommandBody):
    """Request body with the name of a LoRA adapter and its place, which each worker must be able to read.

    The place is a directory or a URI, given as `lora_path`, as in vLLM, or a URI as `source.uri`, as in Dynamo. It is
    not needed to unload. If `lora_digest` is given, the files at the URI must have this digest. With the `placement`
    `auto`, the owner loads the adapter where requests need it.
    """

    # If `load_inplace` is true, vLLM replaces a loaded adapter of the same name.
    neutral: ClassVar[Neutral] = {"load_inplace": (None, False)}
    ignored = frozenset({"lora_int_id"})  # vLLM's number of an adapter

    lora_name: Annotated[str, Field(max_length=256)] = ""
    lora_path: LoraPath = ""
    lora_digest: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    source: LoraSource | None = None
    placement: Literal["workers", "auto"] = "workers"

    def command(self, action: Action) -> Command:
        if not self.lora_name:
            raise invalid("lora_name is missing; give the name of the adapter", "lora_name")
        if action == "unload_lora":
            return Command(action=action, lora_name=self.lora_name)
        path = self.source.uri if self.source is not None else self.lora_path
        if not path:
            raise invalid("lora_path is missing; give the directory or the URI of the adapter", "lora_path")
        if "://" in path:
            _require_uri("lora_path", path)
        if self.placement == "auto" and (self.worker_ids or self.pool):
            raise invalid("with placement 'auto' the owner selects workers; omit worker_ids and pool", "placement")
        return Command(
            action=action,
            lora_name=self.lora_name,
            lora_path=path,
            lora_digest=self.lora_digest,
            placement=self.placement,
        )


class AnyCommandBody(LoraBody):
    """Body of POST /v1/commands: `action` names the command, the other fields are its parameters."""

    action: Annotated[str, Field(json_schema_extra={"enum": [*ACTIONS]})]
    level: Level = 1

    def named(self) -> Command:
        """Return the command that `action` names. Raises ApiError (400) if it is unknown or a field is missing."""
        action = next((one for one in ACTIONS if one == self.action), None)
        if action is None:
            raise invalid(unknown_name("action", self.action, ACTIONS), "action", "unknown_command")
        if action == "drain" and not (self.worker_ids or self.pool):  # because a drained worker ends
            raise invalid("worker_ids is missing; name the workers to drain, or a pool", "worker_ids")
        return self.command(action) if action in LORA_CHANGES else Command(action=action, level=self.level)


COMMAND_BODIES = (AnyCommandBody, CommandBody, LoraBody, SleepBody)

BodyT = TypeVar("BodyT", bound=CommandBody)


def add_commands(router: APIRouter, models: ServedModels) -> None:
    @router.post("/v1/commands", openapi_extra=body_of(AnyCommandBody), responses=errors(*COMMANDS))
    async def any_command(request: Request) -> Response:
        """Run the command that `action` names."""
        body = await _body(AnyCommandBody, request)
        return await _run(request, models, body, body.named())

    @router.get("/v1/loras", responses=errors(*COMMANDS))
    async def list_loras(request: Request) -> Response:
        """Return the LoRA adapters that workers have loaded, by name and by worker."""
        body = await _body(CommandBody, request)
        return await _run(request, models, body, body.command("list_loras"))

    @router.delete(
        "/v1/loras/{lora_name:path}", openapi_extra=body_of(CommandBody, required=False), responses=errors(*COMMANDS)
    )
    async def delete_lora(request: Request, lora_name: str) -> Response:
        """Unload a LoRA adapter."""
        body = await _body(LoraBody, request, {"lora_name": lora_name})
        return await _run(request, models, body, body.command("unload_lora"))

    def add(path: str, action: Action, kind: type[CommandBody], text: str) -> None:
        @router.post(
            path,
            name=action,
            description=text,
            openapi_extra=body_of(kind, required=issubclass(kind, LoraBody)),
            responses=errors(*COMMANDS),
        )
        async def route(request: Request) -> Response:
            body = await _body(kind, request)
            return await _run(request, models, body, body.command(action))

    add("/v1/loras", "load_lora", LoraBody, "Load an adapter.")
    add("/v1/load_lora_adapter", "load_lora", LoraBody, "Load an adapter.")
    add("/v1/unload_lora_adapter", "unload_lora", LoraBody, "Unload an adapter.")
    add("/clear_kv_blocks", "clear_kv_blocks", CommandBody, "Clear the KV caches.")
    add("/reset_prefix_cache", "clear_kv_blocks", CommandBody, "Clear the KV caches.")
    add("/sleep", "sleep", SleepBody, "Free the memory of engines until they wake up.")
    add("/wake_up", "wake_up", CommandBody, "Wake up engines.")
    add("/pause", "pause", CommandBody, "Stop computing until `/resume`; requests wait.")
    add("/resume", "resume", CommandBody, "Continue after `/pause`.")


async def _run(request: Request, models: ServedModels, body: CommandBody, command: Command) -> Response:
    group, status = group_of(request, models), "error"
    try:
        if command.action == "load_lora":  # only for loading: a loaded adapter can be unloaded whatever its name is
            _require_adapter(command.lora_name, group.settings.model_name)
        command_id = client_id(request) or f"command-{runtime.random_id()}"
        result = await group.commands.run(
            command,
            timeout_s=body.timeout_s,
            command_id=command_id,
            pool=body.pool,
            worker_ids=body.worker_ids,
            operator=body.operator,
        )
        error = _error_of(command.action, result.outcomes)
        status = "success" if error is None else "error"
    finally:
        group.metrics.ended("command", stream=False, status=status)
    content: dict[str, Any] = {
        "command_id": command_id,
        "action": command.action,
        "outcomes": [_plain(outcome) for outcome in result.outcomes],
    }
    if command.action == "list_loras":
        content["loras"] = _by_name(result.outcomes)
        content["placed"] = result.placed
    if error is not None:
        group.metrics.reject(error.code)
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
    """Return the parsed body, which may be empty. Its fields override the query string; `path` overrides both."""
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
    """Return the fields of the query string; vLLM expects `level` there. Raises ApiError if a number is invalid."""
    fields: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        if name == "worker_id":
            fields.setdefault("worker_ids", []).append(text)
        elif name in ("level", "timeout_s"):
            try:
                fields[name] = int(text) if name == "level" else float(text)
            except ValueError as error:
                raise invalid(f"{name} is {text!r}; it must be a number", name) from error
        elif name != "model":  # the admin API has checked it
            fields[name] = text
    return fields


def _require_uri(field: str, uri: str) -> None:
    """Raise ApiError if workers cannot load an adapter from a URI."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise invalid(f"{field}: {error}", field) from error
    is_here = parts.netloc in ("", "localhost") and parts.path
    if not uri.startswith(URI_SCHEMES) or not (is_here if parts.scheme == "file" else parts.netloc):
        raise invalid(
            f"{field} is {uri[:64]!r}; expected file:///DIRECTORY, hf://ORG/NAME or s3://BUCKET/PREFIX", field
        )


def _error_of(action: Action, outcomes: Sequence[CommandOutcome]) -> ApiError | None:
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
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        for name in outcome.loras:
            found.setdefault(name, []).append(outcome.worker_id)
    return dict(sorted(found.items()))
