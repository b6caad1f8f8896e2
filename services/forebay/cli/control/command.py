"""`forebay control`: send commands to workers, and show or change how a running system routes requests.

Values are sent without validation. The ingress validates them and reports errors.
"""

import json as jsonlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import click
import msgspec

from forebay.cli.common.credentials import AdminTokenFileOption
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.operator_name import OperatorOption, operator_name
from forebay.cli.common.options import Argument, JsonOption, Option
from forebay.cli.control.client import URL, IngressClient, ServedOption, UrlOption
from forebay.events.control import Action, BusyThresholds, DisaggConfig
from forebay.events.names import unknown_name
from forebay.simulate.pool_routing_file import routing_of

NONE = "none"  # value of an option that disables a threshold
UNITS = {"ttft": "TTFT", "itl": "ITL"}


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
        list[str] | None, Option("--worker", help="Only this worker. Repeatable. Default: all of the model.")
    ] = None
    pool: Annotated[str, Option("--pool", help="Only workers of this pool.")] = ""
    timeout_s: Annotated[
        float, Option(min=0.001, max=3_600, help="Seconds within which each worker must execute the command.")
    ] = 60.0


# --- commands to workers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersCommand:
    """List the LoRA adapters that workers have loaded, or load or unload one."""

    RUN: ClassVar = "control.command:run_adapters"

    action: Annotated[Literal["list", "load", "unload"], Argument(metavar="ACTION", help="list, load or unload.")] = (
        "list"
    )
    lora: Annotated[
        str, Option(help="Adapter to load as NAME=DIR, as workers see it, or NAME=URI; NAME of the one to unload.")
    ] = ""
    workers: WorkerOptions
    ingress: IngressOptions


def run_adapters(options: AdaptersCommand) -> None:
    if bool(options.lora) != (options.action != "list"):
        fail(f"{options.action} requires --lora" if not options.lora else "--lora requires load or unload")
    name, equals, folder = options.lora.partition("=")
    if bool(equals) != (options.action == "load"):
        fail(f"--lora {options.lora}: expected NAME=DIR or NAME=URI to load an adapter, NAME to unload it")
    if options.action == "list":
        _send("list_loras", options.workers, options.ingress)
    elif options.action == "load":
        place = folder if "://" in folder else str(Path(folder).absolute())
        _send("load_lora", options.workers, options.ingress, lora_name=name, lora_path=place)
    else:
        _send("unload_lora", options.workers, options.ingress, lora_name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCommand:
    """Clear the KV caches of workers."""

    RUN: ClassVar = "control.command:run_cache"

    action: Annotated[Literal["clear"], Argument(metavar="ACTION", help="clear.")]
    workers: WorkerOptions
    ingress: IngressOptions


def run_cache(options: CacheCommand) -> None:
    assert options.action == "clear"
    _send("clear_kv_blocks", options.workers, options.ingress)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerCommand:
    """Let workers sleep and wake up, or pause and resume."""

    RUN: ClassVar = "control.command:run_power"

    action: Annotated[
        Literal["sleep", "wake-up", "pause", "resume"],
        Argument(
            metavar="ACTION",
            help="sleep frees memory until wake-up. Between pause and resume, requests wait.",
        ),
    ]
    level: Annotated[
        int | None,
        Option(min=1, max=2, help="Sleep level: 1, the default, keeps the weights in host memory, 2 drops them."),
    ] = None
    workers: WorkerOptions
    ingress: IngressOptions


def run_power(options: PowerCommand) -> None:
    if options.action == "sleep":
        _send("sleep", options.workers, options.ingress, level=options.level or 1)
        return
    if options.level is not None:
        fail("--level requires sleep")
    actions: dict[str, Action] = {"wake-up": "wake_up", "pause": "pause", "resume": "resume"}
    _send(actions[options.action], options.workers, options.ingress)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainCommand:
    """Route no new requests to a pool, or to workers, which finish the requests that they have.

    The workers of a drained pool continue to run. Drained workers leave, and their processes end.
    """

    RUN: ClassVar = "control.command:run_drain"

    pool: Annotated[str, Argument(metavar="POOL", help="Pool that gets no new requests.")] = ""
    worker: Annotated[list[str] | None, Option("--worker", help="Drain this worker instead of a pool. Repeatable.")] = (
        None
    )
    leave: Annotated[bool, Option("--leave", help="Drain the workers of POOL, which then leave.")] = False
    end: Annotated[bool, Option("--remove", help="End the drain of POOL: it gets requests again.")] = False
    ingress: IngressOptions


def run_drain(options: DrainCommand) -> None:
    if (
        not (options.pool or options.worker)
        or (options.end and (options.leave or options.worker))
        or (options.leave and not options.pool)
    ):
        fail("expected POOL, POOL --remove, POOL --leave or --worker WORKER; drained workers end")
    if options.worker or options.leave:
        _send("drain", WorkerOptions(options.worker, options.pool), options.ingress)
        return
    client = options.ingress.client()
    _show_pools(
        _change_pools(client, options.ingress, "drain", {"pool": options.pool, "drained": not options.end}),
        json=options.ingress.json,
    )


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
        click.echo(jsonlib.dumps(result))
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
        from forebay.cli.common.tables import print_table  # noqa: PLC0415 - --help does not wait for rich

        print_table(("worker", "pool", "outcome", "adapters", ""), rows)
    client.exit_unless_ok(result, response)


# --- routing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsCommand:
    """Show the pools of the model and how requests are routed to them, or change that."""

    RUN: ClassVar = "control.command:run_pools"

    pool_routing: Annotated[
        Path | None, Option(help="TOML file with the new grids of the model. They replace all current grids.")
    ] = None
    pool: Annotated[str, Option("--pool", help="Canary: pool that gets a share of the requests of --base.")] = ""
    base: Annotated[str, Option(help="Pool whose requests the canary gets.")] = ""
    share: Annotated[float | None, Option(min=0.0, max=1.0, help="Share of these requests.")] = None
    end: Annotated[bool, Option("--remove", help="End the canary.")] = False
    ingress: IngressOptions


def run_pools(options: PoolsCommand) -> None:
    if options.end and (options.base or options.share is not None):
        fail("--remove cannot be combined with --base and --share")
    if options.pool and not options.end and (not options.base or options.share is None):
        fail("--base and --share are required, or --remove to end the canary")
    if not options.pool and (options.end or options.base or options.share is not None):
        fail("--base, --share and --remove require --pool POOL")
    if options.pool_routing is not None and options.pool:
        fail("change grids and canaries with two commands, because each is one record on the log")
    client = options.ingress.client()
    rules = None
    if options.pool_routing is not None:
        with explained():
            given = routing_of(options.pool_routing, client.served_model())
        grids = msgspec.to_builtins(given.grids)
        rules = _change_pools(client, options.ingress, "routing", {"grids": grids, "retry": given.retry})
    if options.pool:
        rules = _change_pools(
            client,
            options.ingress,
            "canary",
            {"pool": options.pool, "base": options.base, "share": options.share or 0.0},
        )
    _show_pools(client.call("/v1/pools", "pools") if rules is None else rules, json=options.ingress.json)


GROUPS = {"busy": ("/busy_threshold", BusyThresholds), "disagg": ("/disaggregation", DisaggConfig)}
SETTINGS = [f"{group}.{name}" for group, (_, kind) in GROUPS.items() for name in kind.__struct_fields__]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCommand:
    """Show or change the settings of the router: policies of pools, busy thresholds, disaggregation.

    Without options, shows the busy thresholds, and the settings of disaggregation if the model has a decode pool.
    """

    RUN: ClassVar = "control.command:run_policy"

    pool: Annotated[str, Argument(metavar="POOL", help="Pool whose policy changes.")] = ""
    mode: Annotated[str, Argument(metavar="MODE", help="Router mode, or path of a class that the router allows.")] = ""
    sets: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="PATH=VALUE",
            help="Change a setting, such as busy.active_decode_blocks_threshold=0.9 or disagg.policy=never. The value"
            " none turns a threshold off. Repeatable.",
        ),
    ] = None
    ingress: IngressOptions


def run_policy(options: PolicyCommand) -> None:
    changes = _changes(options.sets or ())
    client = options.ingress.client()
    if options.pool:
        if not options.mode or any(changes.values()):
            fail("expected POOL and MODE without other settings")
        rules = _change_pools(client, options.ingress, "policy", {"pool": options.pool, "mode": options.mode})
        _show_pools(rules, json=options.ingress.json)
        return
    if all(changes.values()):
        fail("change busy thresholds and disaggregation with two commands, because each is one record on the log")
    is_change = any(changes.values())
    if not is_change and all(one["role"] != "decode" for one in client.call("/v1/pools", "pools")["pools"]):
        del changes["/disaggregation"]
    model = client.served_model()
    before: dict[str, Any] = {}
    now: dict[str, Any] = {}
    for path, given in changes.items():
        if given or not is_change:
            found = client.call(path, "model", {"model": model})
            before |= found
            body = {"model": model, "operator": operator_name(options.ingress.operator), **given}
            now |= client.call(path, "model", body) if given else found
    if options.ingress.json:
        click.echo(jsonlib.dumps({"before": before, "now": now}))
        return
    names = [name for name in now if name not in {"model", "pool"}]
    rows = ((name, *(_text(one[name]) for one in ((before, now) if is_change else (now,)))) for name in names)
    from forebay.cli.common.tables import in_markup, print_table, results  # noqa: PLC0415 - as above

    console = results()
    console.print(in_markup(f"model {model}" + (f", pool {now['pool']}" if "pool" in now else "")))
    print_table(("setting", "before", "now") if is_change else ("setting", "now"), rows)


def _changes(sets: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the fields of the request body that changes each group of settings, by its path of the ingress."""
    found: dict[str, dict[str, Any]] = {path: {} for path, _ in GROUPS.values()}
    for text in sets:
        setting, equals, value = text.partition("=")
        if not equals:
            fail(f"--set {text}: expected PATH=VALUE, for example disagg.policy=never")
        if setting not in SETTINGS:
            fail(f"--set {text}: {unknown_name('setting', setting, SETTINGS)}")
        group, _, name = setting.partition(".")
        found[GROUPS[group][0]][name] = _value(value)
    return found


def _value(text: str) -> Any:
    """Parse a value: `none`, a JSON value, or otherwise the text itself."""
    try:
        return None if text == NONE else jsonlib.loads(text)
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
        click.echo(jsonlib.dumps(rules))
        return
    from forebay.cli.common.tables import in_markup, print_table, results  # noqa: PLC0415 - as above

    console = results()
    console.print(in_markup(f"model {rules['model']}"))
    rows = []
    for one in rules["pools"]:
        share = one["canary"] and f"{one['canary']['share']:.4g} of those for {one['canary']['base']}"
        state = "none, drained" if one["drained"] else share or "yes"
        rows.append((one["pool"], one["role"], one["policy"], str(one["block_size"]), state))
    print_table(("pool", "role", "policy", "block size", "new requests"), rows)
    for grid in rules["grids"]:
        console.print()
        speeds = ", ".join(f"{one['pool']} ({one['priority']})" for one in grid["pools"])
        console.print(in_markup(f"grid of {grid['role']} pools; pools by speed (lower is faster): {speeds}"))
        # One row per range of prompt lengths, one column per range of targets.
        lengths = _ranges(grid["isl_min"], grid["isl_max"], len(grid["cells"]))
        targets = _ranges(grid["target_min_ms"], grid["target_max_ms"], len(grid["cells"][0]))
        columns = ("prompt tokens", *(f"{UNITS[grid['target']]} {one} ms" for one in targets))
        cells = ((length, *row) for length, row in zip(lengths, grid["cells"], strict=True))
        print_table(columns, cells)
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
