"""`forebay control`: send commands to workers, and show or change how a running system routes requests.

Values are sent without validation. The ingress validates them and reports errors.
"""

import json as jsonlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
import typer

from forebay.cli.common.admin_token import AdminTokenFileOption
from forebay.cli.common.errors import fail
from forebay.cli.common.operator_name import OperatorOption, operator_name
from forebay.cli.common.option_groups import spread
from forebay.cli.common.terminal import in_markup, results
from forebay.cli.control.client import URL, IngressClient, ServedOption, UrlOption
from forebay.events.control import Action, DisaggPolicy
from forebay.simulate.pool_routing_file import PoolRoutingUnusable, routing_of

if TYPE_CHECKING:
    from rich.table import Table

NONE = "none"  # value of an option that disables a threshold
UNITS = {"ttft": "TTFT", "itl": "ITL"}

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]

app = typer.Typer(
    help="Send commands to workers or change routing settings. Exits 1 on failure.",
    no_args_is_help=True,
)


@dataclass(frozen=True, slots=True)
class IngressOptions:
    operator: OperatorOption = ""
    url: UrlOption = URL
    model: ServedOption = ""
    admin_token_file: AdminTokenFileOption = None
    json: JsonOption = False

    def client(self) -> IngressClient:
        return IngressClient.of(self.url, self.admin_token_file, self.model)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Workers that execute a command, and the time for it."""

    worker: Annotated[
        list[str] | None, typer.Option("--worker", help="Only this worker. Repeatable. Default: all of the model.")
    ] = None
    pool: Annotated[str, typer.Option("--pool", help="Only workers of this pool.")] = ""
    timeout_s: Annotated[
        float, typer.Option(min=0.001, max=3_600, help="Seconds within which each worker must execute the command.")
    ] = 60.0


# --- commands to workers ----------------------------------------------------------------------------------------------


@app.command("adapters")
@spread
def adapters(
    action: Annotated[
        Literal["list", "load", "unload"], typer.Argument(metavar="ACTION", help="list, load or unload.")
    ] = "list",
    lora: Annotated[str, typer.Option("--lora", help="Name of the adapter to load or unload.")] = "",
    path: Annotated[
        Path | None, typer.Option("--path", help="Directory of the adapter to load, as workers see it.")
    ] = None,
    *,
    workers: WorkerOptions,
    ingress: IngressOptions,
) -> None:
    """List the LoRA adapters that workers have loaded, or load or unload one."""
    if bool(lora) != (action != "list"):
        fail(f"{action} requires --lora" if not lora else "--lora requires load or unload")
    if (path is not None) != (action == "load"):
        fail("load requires --path" if path is None else "--path requires load")
    if action == "list":
        _send("list_loras", workers, ingress)
    elif path is not None:
        _send("load_lora", workers, ingress, lora_name=lora, lora_path=str(path.absolute()))
    else:
        _send("unload_lora", workers, ingress, lora_name=lora)


@app.command("cache")
@spread
def cache(
    action: Annotated[Literal["clear"], typer.Argument(metavar="ACTION", help="clear.")],
    *,
    workers: WorkerOptions,
    ingress: IngressOptions,
) -> None:
    """Clear the KV caches of workers."""
    assert action == "clear"
    _send("clear_kv_blocks", workers, ingress)


@app.command("power")
@spread
def power(
    action: Annotated[
        Literal["sleep", "wake-up", "pause", "resume"],
        typer.Argument(
            metavar="ACTION",
            help="sleep frees memory until wake-up. Between pause and resume, requests wait.",
        ),
    ],
    level: Annotated[
        int | None,
        typer.Option(min=1, max=2, help="Sleep level: 1, the default, keeps the weights in host memory, 2 drops them."),
    ] = None,
    *,
    workers: WorkerOptions,
    ingress: IngressOptions,
) -> None:
    """Let workers sleep and wake up, or pause and resume."""
    if action == "sleep":
        _send("sleep", workers, ingress, level=level or 1)
        return
    if level is not None:
        fail("--level requires sleep")
    actions: dict[str, Action] = {"wake-up": "wake_up", "pause": "pause", "resume": "resume"}
    _send(actions[action], workers, ingress)


@app.command("drain")
@spread
def drain(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="Pool that gets no new requests.")] = "",
    worker: Annotated[
        list[str] | None, typer.Option("--worker", help="Drain this worker instead of a pool. Repeatable.")
    ] = None,
    leave: Annotated[bool, typer.Option("--leave", help="Drain the workers of POOL, which then leave.")] = False,
    end: Annotated[bool, typer.Option("--end", help="End the drain of POOL: it gets requests again.")] = False,
    *,
    ingress: IngressOptions,
) -> None:
    """Route no new requests to a pool, or to workers, which finish the requests that they have.

    The workers of a drained pool continue to run. Drained workers leave, and their processes end.
    """
    if not (pool or worker) or (end and (leave or worker)) or (leave and not pool):
        fail("expected POOL, POOL --end, POOL --leave or --worker WORKER; drained workers end")
    if worker or leave:
        _send("drain", WorkerOptions(worker, pool), ingress)
        return
    client = ingress.client()
    _show_pools(_change_pools(client, ingress, "drain", {"pool": pool, "drained": not end}), json=ingress.json)


def _send(action: Action, workers: WorkerOptions, ingress: IngressOptions, **fields: str | int) -> None:
    """Send a command with its own fields to workers, and print the outcomes."""
    names = workers.worker or []
    request = {
        "action": action,
        "worker_ids": names,
        "pool": workers.pool,
        "timeout_s": workers.timeout_s,
        "operator": operator_name(ingress.operator),
        **fields,
    }
    client = ingress.client()
    response = client.request("/v1/commands", request, timeout_s=workers.timeout_s)
    result = client.decode(response, "outcomes")
    client.suggest_names(result, {"worker": names, "pool": [workers.pool]})
    if ingress.json:
        typer.echo(jsonlib.dumps(result))
    elif "outcomes" in result:
        rows = (
            (
                one["worker_id"],
                one["pool"],
                one["status"].replace("_", " "),
                ", ".join(one["loras"]),
                one["message"] or "",
            )
            for one in result["outcomes"]
        )
        results().print(_table(("worker", "pool", "outcome", "adapters", ""), rows))
    client.exit_unless_ok(result, response)


# --- routing ----------------------------------------------------------------------------------------------------------


@app.command("pools")
@spread
def pools(
    routing: Annotated[
        Path | None, typer.Option(help="TOML file with the new grids of the model. They replace all current grids.")
    ] = None,
    pool: Annotated[str, typer.Option("--pool", help="Canary: pool that gets a share of the requests of --base.")] = "",
    base: Annotated[str, typer.Option(help="Pool whose requests the canary gets.")] = "",
    share: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Share of these requests.")] = None,
    end: Annotated[bool, typer.Option("--end", help="End the canary.")] = False,
    *,
    ingress: IngressOptions,
) -> None:
    """Show the pools of the model and how requests are routed to them, or change that."""
    if end and (base or share is not None):
        fail("--end cannot be combined with --base and --share")
    if pool and not end and (not base or share is None):
        fail("--base and --share are required, or --end to end the canary")
    if not pool and (end or base or share is not None):
        fail("--base, --share and --end require --pool POOL")
    if routing is not None and pool:
        fail("change grids and canaries with two commands, because each is one record on the log")
    client = ingress.client()
    rules = None
    if routing is not None:
        try:
            given = routing_of(routing, client.served_model())
        except PoolRoutingUnusable as error:
            fail(str(error))
        grids = msgspec.to_builtins(given.grids)
        rules = _change_pools(client, ingress, "routing", {"grids": grids, "retry": given.retry})
    if pool:
        rules = _change_pools(client, ingress, "canary", {"pool": pool, "base": base, "share": share or 0.0})
    _show_pools(client.call("/v1/pools", "pools") if rules is None else rules, json=ingress.json)


@dataclass(frozen=True, slots=True)
class BusyOptions:
    PATH = "/busy_threshold"

    active_decode_blocks_threshold: Annotated[
        str | None, typer.Option(help="Fraction of a rank's KV blocks in use above which the rank is busy, or none.")
    ] = None
    active_prefill_tokens_threshold: Annotated[
        str | None, typer.Option(help="Queued prefill tokens above which a rank is busy, or none.")
    ] = None
    active_prefill_tokens_threshold_frac: Annotated[
        str | None, typer.Option(help="Queued engine steps of prefill above which a rank is busy, or none.")
    ] = None


@dataclass(frozen=True, slots=True)
class DisaggOptions:
    PATH = "/disaggregation"

    disagg_policy: Annotated[
        str | None,
        typer.Option(help=f"Policy that decides which prompts are remote: {', '.join(get_args(DisaggPolicy))}."),
    ] = None
    max_local_prefill_length: Annotated[
        str | None, typer.Option(help="Maximum tokens of a local prefill; for classic.")
    ] = None
    max_prefill_queue_size: Annotated[
        str | None, typer.Option(help="Maximum requests waiting for prefill; for classic.")
    ] = None
    eff_isl_threshold: Annotated[
        str | None, typer.Option(help="Tokens from which prefill is remote; for isl_bounding.")
    ] = None
    eff_isl_ratio_threshold: Annotated[
        str | None, typer.Option(help="Uncached fraction of a prompt from which prefill is remote; for isl_bounding.")
    ] = None
    prefill_busy_threshold: Annotated[
        str | None,
        typer.Option(
            help="Engine steps of prompt tokens above which prefill workers are busy, or none; for prefill_load."
        ),
    ] = None
    decode_busy_threshold: Annotated[
        str | None, typer.Option(help="Fraction of a decode worker's KV blocks above which prefill is remote, or none.")
    ] = None
    enforce_disagg: Annotated[
        bool | None,
        typer.Option(
            "--enforce-disagg/--no-enforce-disagg", help="Reject a request if no prefill worker can compute its prompt."
        ),
    ] = None


FIELDS = {"disagg_policy": "policy", "enforce_disagg": "enforce"}  # options that differ from the field of the body


@app.command("policy")
@spread
def policy(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="Pool whose policy changes.")] = "",
    mode: Annotated[
        str, typer.Argument(metavar="MODE", help="Router mode, or path of a class that the router allows.")
    ] = "",
    *,
    busy: BusyOptions,
    disagg: DisaggOptions,
    ingress: IngressOptions,
) -> None:
    """Show or change the settings of the router: policies of pools, busy thresholds, disaggregation.

    Without options, shows the busy thresholds, and the settings of disaggregation if the model has a decode pool.
    """
    changes = {one.PATH: _changes(one) for one in (busy, disagg)}
    client = ingress.client()
    if pool:
        if not mode or any(changes.values()):
            fail("expected POOL and MODE without other settings")
        rules = _change_pools(client, ingress, "policy", {"pool": pool, "mode": mode})
        _show_pools(rules, json=ingress.json)
        return
    if all(changes.values()):
        fail("change busy thresholds and disaggregation with two commands, because each is one record on the log")
    is_change = any(changes.values())
    if not is_change and all(one["role"] != "decode" for one in client.call("/v1/pools", "pools")["pools"]):
        del changes[disagg.PATH]
    model = client.served_model()
    before: dict[str, Any] = {}
    now: dict[str, Any] = {}
    for path, given in changes.items():
        if given or not is_change:
            found = client.call(path, "model", {"model": model})
            before |= found
            body = {"model": model, "operator": operator_name(ingress.operator), **given}
            now |= client.call(path, "model", body) if given else found
    if ingress.json:
        typer.echo(jsonlib.dumps({"before": before, "now": now}))
        return
    names = [name for name in now if name not in {"model", "pool"}]
    rows = ((name, *(_text(one[name]) for one in ((before, now) if is_change else (now,)))) for name in names)
    console = results()
    console.print(in_markup(f"model {model}" + (f", pool {now['pool']}" if "pool" in now else "")))
    console.print(_table(("setting", "before", "now") if is_change else ("setting", "now"), rows))


def _changes(options: BusyOptions | DisaggOptions) -> dict[str, Any]:
    """Return the fields of a request body that change these settings."""
    given = ((name, getattr(options, name)) for name in options.__slots__)
    return {FIELDS.get(name, name): _value(value) for name, value in given if value is not None}


def _value(text: str | bool) -> Any:
    """Parse the value of an option: a boolean, `none`, a JSON value, or otherwise the text itself."""
    if isinstance(text, bool) or text == NONE:
        return None if text == NONE else text
    try:
        return jsonlib.loads(text)
    except ValueError:
        return text


def _text(value: Any) -> str:
    return NONE if value is None else value if isinstance(value, str) else jsonlib.dumps(value)


def _change_pools(client: IngressClient, ingress: IngressOptions, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Change rules of pools, and return all rules of the model."""
    request = {"operator": operator_name(ingress.operator), "model": client.served_model(), **body}
    return client.call(f"/v1/pools/{path}", "pools", request)


def _show_pools(rules: dict[str, Any], *, json: bool) -> None:
    if json:
        typer.echo(jsonlib.dumps(rules))
        return
    console = results()
    console.print(in_markup(f"model {rules['model']}"))
    rows = []
    for one in rules["pools"]:
        share = one["canary"] and f"{one['canary']['share']:.4g} of those for {one['canary']['base']}"
        state = "none, drained" if one["drained"] else share or "yes"
        rows.append((one["pool"], one["role"], one["policy"], str(one["block_size"]), state))
    console.print(_table(("pool", "role", "policy", "block size", "new requests"), rows))
    for grid in rules["grids"]:
        console.print()
        speeds = ", ".join(f"{one['pool']} ({one['priority']})" for one in grid["pools"])
        console.print(in_markup(f"grid of {grid['role']} pools; pools by speed (lower is faster): {speeds}"))
        # One row per range of prompt lengths, one column per range of targets.
        lengths = _ranges(grid["isl_min"], grid["isl_max"], len(grid["cells"]))
        targets = _ranges(grid["target_min_ms"], grid["target_max_ms"], len(grid["cells"][0]))
        columns = ("prompt tokens", *(f"{UNITS[grid['target']]} {one} ms" for one in targets))
        cells = ((length, *row) for length, row in zip(lengths, grid["cells"], strict=True))
        console.print(_table(columns, cells))
        for one in grid["overrides"]:
            text = f"requests with a priority from {one['min_priority']} to {one['max_priority']} go to {one['pool']}"
            console.print(in_markup(text))
    if rules["retry"]:
        console.print("failed requests move to faster pools")


def _ranges(low: float, high: float, count: int) -> list[str]:
    """Return equal parts of a range as text. The first and the last part have no outer limit."""
    if count == 1:
        return ["any"]
    ends = [f"{low + (high - low) * at / count:g}" for at in range(count + 1)]
    inner = [f"{one} to {other}" for one, other in pairwise(ends[1:-1])]
    return [f"below {ends[1]}", *inner, f"from {ends[-2]}"]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
    from rich.table import Table  # noqa: PLC0415 - --help does not wait for it

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(in_markup, row))
    return table
