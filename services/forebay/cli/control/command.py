"""`forebay control`: send commands to workers and change routing settings of a running system."""

import json as jsonlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from forebay.cli.common.admin_token import AdminTokenFileOption
from forebay.cli.common.errors import fail
from forebay.cli.common.operator_name import OperatorOption, operator_name
from forebay.cli.common.option_groups import spread
from forebay.cli.common.terminal import in_markup, results
from forebay.cli.control.client import (
    URL,
    IngressClient,
    ServedOption,
    UrlOption,
    client_for,
    decode_response,
    exit_unless_ok,
)
from forebay.cli.control.pools import canary, drain, policy, pools
from forebay.cli.control.settings import busy_threshold, disaggregation
from forebay.events.control import Action
from forebay.events.names import unknown_name

if TYPE_CHECKING:
    from rich.table import Table

ACTIONS: dict[Action, str] = {
    "load_lora": "Load an adapter.",
    "unload_lora": "Unload an adapter.",
    "list_loras": "List the adapters that workers have loaded.",
    "clear_kv_blocks": "Clear the KV caches of workers.",
    "sleep": "Free the memory of workers until wake-up.",
    "wake_up": "Wake up sleeping workers.",
    "pause": "Pause workers until resume; requests wait.",
    "resume": "Resume paused workers.",
    "drain": "Drain workers: they get no new requests, finish those they have, and leave.",
}
NAMES: dict[Action, str] = {"drain": "drain-worker"}  # `drain` drains a pool
assert set(ACTIONS) == set(get_args(Action)), "every action has a help text"

LoraOption = Annotated[str, typer.Option("--lora", help="Name of the adapter.")]
PathOption = Annotated[Path, typer.Option("--path", help="Directory of the adapter, as workers see it.")]
LevelOption = Annotated[
    int,
    typer.Option("--level", min=1, max=2, help="Sleep level: 1 keeps the weights in host memory, 2 drops them."),
]

app = typer.Typer(
    help="Send commands to workers or change routing settings. Exits 1 on failure.",
    no_args_is_help=True,
)


@dataclass(frozen=True, slots=True)
class CommandOptions:
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            help="Worker to command. Repeatable. Default: all workers of the model, except for drain-worker.",
        ),
    ] = None
    pool: Annotated[str, typer.Option("--pool", help="Command only workers of this pool.")] = ""
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout-s", min=0.001, max=3_600, help="Seconds within which each worker must execute the command."
        ),
    ] = 60.0
    operator: OperatorOption = ""
    url: UrlOption = URL
    model: ServedOption = ""
    admin_token_file: AdminTokenFileOption = None
    json: Annotated[bool, typer.Option("--json", help="Print the outcomes as one JSON object.")] = False


def _send(action: Action, options: CommandOptions, **fields: str | int) -> None:
    """Send a command with its own fields to workers, and print the outcomes."""
    workers = options.worker or []
    request = {
        "action": action,
        "worker_ids": workers,
        "pool": options.pool,
        "timeout_s": options.timeout_s,
        "operator": operator_name(options.operator),
        **fields,
    }
    client = client_for(options.url, options.admin_token_file, options.model)
    response = client.request("/v1/commands", request, timeout_s=options.timeout_s)
    result = decode_response(options.url, response, "outcomes")
    _suggest(client, result, {"worker": workers, "pool": [options.pool]})
    if options.json:
        typer.echo(jsonlib.dumps(result))
    elif "outcomes" in result:
        results().print(_table(result["outcomes"]))
    exit_unless_ok(result, response)


def _command(action: Action) -> Callable[..., None]:
    """Return the function of a command, which has only the options that the command uses."""
    if action == "load_lora":

        def load_lora(lora: LoraOption, path: PathOption, *, options: CommandOptions) -> None:
            _send(action, options, lora_name=lora, lora_path=str(path.absolute()))

        return load_lora
    if action == "unload_lora":

        def unload_lora(lora: LoraOption, *, options: CommandOptions) -> None:
            _send(action, options, lora_name=lora)

        return unload_lora
    if action == "sleep":

        def sleep(level: LevelOption = 1, *, options: CommandOptions) -> None:
            _send(action, options, level=level)

        return sleep
    if action == "drain":

        def drain_worker(*, options: CommandOptions) -> None:
            if not (options.worker or options.pool):
                fail("--worker or --pool is required, because drained workers end")
            _send(action, options)

        return drain_worker

    def command(*, options: CommandOptions) -> None:
        _send(action, options)

    return command


for _action, _help in ACTIONS.items():
    app.command(NAMES.get(_action, _action.replace("_", "-")), help=_help)(spread(_command(_action)))
app.command("disaggregation")(disaggregation)
app.command("busy-threshold")(busy_threshold)
app.command("pools")(pools)
app.command("policy")(policy)
app.command("canary")(canary)
app.command("drain")(drain)


def _suggest(client: IngressClient, result: Mapping[str, Any], given: Mapping[str, list[str]]) -> None:
    """Suggest similar names in the error for an unknown worker or pool.

    Args:
        client: Client of the ingress, which knows the names.
        result: Response of the ingress. Its error message is replaced.
        given: Names that the command line contains, by `worker` and `pool`.
    """
    kind = str(result.get("error", {}).get("code")).removeprefix("unknown_")
    known = client.known_names().get(kind) if kind in given else None
    unknown = [name for name in given.get(kind, ()) if known and name not in known]
    if known and unknown:
        result["error"]["message"] = unknown_name(kind, unknown[0], known)


def _table(outcomes: list[dict[str, Any]]) -> "Table":
    from rich.table import Table  # noqa: PLC0415 - --help does not wait for it

    table = Table(box=None, pad_edge=False)
    for name in ("worker", "pool", "outcome", "adapters", ""):
        table.add_column(name)
    for outcome in outcomes:
        texts = (
            outcome["worker_id"],
            outcome["pool"],
            outcome["status"].replace("_", " "),
            ", ".join(outcome["loras"]),
            outcome["message"] or "",
        )
        table.add_row(*map(in_markup, texts))
    return table
