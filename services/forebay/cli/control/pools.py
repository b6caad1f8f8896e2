"""`forebay control pools`, `policy`, `canary` and `drain`: show or change how requests are routed to pools and workers.

The ingress validates the values and reports errors.
"""

import json as jsonlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from forebay.cli.common.admin_token import AdminTokenFileOption
from forebay.cli.common.errors import fail
from forebay.cli.common.operator_name import OperatorOption, operator_name
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
from forebay.cli.control.settings import served_model
from forebay.simulate.pool_routing_file import PoolRoutingUnusable, routing_of

if TYPE_CHECKING:
    from rich.table import Table

JsonOption = Annotated[bool, typer.Option("--json", help="Print the pools and their rules as one JSON object.")]
PoolArgument = Annotated[str, typer.Argument(help="Name of the pool.", metavar="POOL")]
UNITS = {"ttft": "TTFT", "itl": "ITL"}


def pools(
    routing: Annotated[
        Path | None, typer.Option(help="TOML file with the new grids of the model. They replace all current grids.")
    ] = None,
    operator: OperatorOption = "",
    url: UrlOption = URL,
    model: ServedOption = "",
    admin_token_file: AdminTokenFileOption = None,
    json: JsonOption = False,
) -> None:
    """Show the pools of the model and how requests are routed to them, or replace the grids."""
    client = client_for(url, admin_token_file, model)
    if routing is None:
        _print(client, client.request("/v1/pools"), json=json)
        return
    name = served_model(client)
    try:
        given = routing_of(routing, name)
    except PoolRoutingUnusable as error:
        fail(str(error))
    grids = msgspec.to_builtins(given.grids)
    body = {"model": name, "grids": grids, "retry": given.retry, "operator": operator_name(operator)}
    _print(client, client.request("/v1/pools/routing", body), json=json)


def policy(
    pool: PoolArgument,
    mode: Annotated[str, typer.Argument(help="Router mode, or path of a class that the router allows.")],
    operator: OperatorOption = "",
    url: UrlOption = URL,
    model: ServedOption = "",
    admin_token_file: AdminTokenFileOption = None,
    json: JsonOption = False,
) -> None:
    """Change the policy that selects the workers of a pool's requests."""
    client = client_for(url, admin_token_file, model)
    name = operator_name(operator)
    body = {"model": served_model(client), "pool": pool, "mode": mode, "operator": name}
    _print(client, client.request("/v1/pools/policy", body), json=json)


def canary(
    pool: PoolArgument,
    base: Annotated[str, typer.Option(help="Pool whose requests the canary gets.")] = "",
    share: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Share of these requests.")] = None,
    end: Annotated[bool, typer.Option("--end", help="End the canary.")] = False,
    operator: OperatorOption = "",
    url: UrlOption = URL,
    model: ServedOption = "",
    admin_token_file: AdminTokenFileOption = None,
    json: JsonOption = False,
) -> None:
    """Route a share of the requests of one pool to another pool, its canary."""
    if end and (base or share is not None):
        fail("--end cannot be combined with --base and --share")
    if not end and (not base or share is None):
        fail("--base and --share are required, or --end to end the canary")
    client = client_for(url, admin_token_file, model)
    name = operator_name(operator)
    body = {"model": served_model(client), "pool": pool, "base": base, "share": share or 0.0, "operator": name}
    _print(client, client.request("/v1/pools/canary", body), json=json)


def drain(
    pool: PoolArgument,
    end: Annotated[bool, typer.Option("--end", help="End the drain: the pool gets requests again.")] = False,
    operator: OperatorOption = "",
    url: UrlOption = URL,
    model: ServedOption = "",
    admin_token_file: AdminTokenFileOption = None,
    json: JsonOption = False,
) -> None:
    """Route no new requests to a pool. Requests that its workers already have finish there."""
    client = client_for(url, admin_token_file, model)
    name = operator_name(operator)
    body = {"model": served_model(client), "pool": pool, "drained": not end, "operator": name}
    _print(client, client.request("/v1/pools/drain", body), json=json)


def _print(client: IngressClient, response: Any, *, json: bool) -> None:
    rules = decode_response(client.url, response, "pools")
    exit_unless_ok(rules, response)
    if json:
        typer.echo(jsonlib.dumps(rules))
        return
    console = results()
    console.print(in_markup(f"model {rules['model']}"))
    console.print(_pool_table(rules["pools"]))
    for grid in rules["grids"]:
        console.print()
        speeds = ", ".join(f"{one['pool']} ({one['priority']})" for one in grid["pools"])
        console.print(in_markup(f"grid of {grid['role']} pools; pools by speed (lower is faster): {speeds}"))
        console.print(_grid_table(grid))
        for one in grid["overrides"]:
            text = f"requests with a priority from {one['min_priority']} to {one['max_priority']} go to {one['pool']}"
            console.print(in_markup(text))
    if rules["retry"]:
        console.print("failed requests move to faster pools")


def _pool_table(listed: list[dict[str, Any]]) -> "Table":
    table = _table("pool", "role", "policy", "block size", "new requests")
    for one in listed:
        share = one["canary"] and f"{one['canary']['share']:.4g} of those for {one['canary']['base']}"
        state = "none, drained" if one["drained"] else share or "yes"
        table.add_row(*map(in_markup, (one["pool"], one["role"], one["policy"], str(one["block_size"]), state)))
    return table


def _grid_table(grid: Mapping[str, Any]) -> "Table":
    """Return the cells of a grid: one row per range of prompt lengths, one column per range of targets."""
    rows = _ranges(grid["isl_min"], grid["isl_max"], len(grid["cells"]))
    columns = _ranges(grid["target_min_ms"], grid["target_max_ms"], len(grid["cells"][0]))
    table = _table("prompt tokens", *(f"{UNITS[grid['target']]} {one} ms" for one in columns))
    for row, cells in zip(rows, grid["cells"], strict=True):
        table.add_row(row, *map(in_markup, cells))
    return table


def _ranges(low: float, high: float, count: int) -> list[str]:
    """Return equal parts of a range as text. The first and the last part have no outer limit."""
    if count == 1:
        return ["any"]
    ends = [f"{low + (high - low) * at / count:g}" for at in range(count + 1)]
    inner = [f"{one} to {other}" for one, other in pairwise(ends[1:-1])]
    return [f"below {ends[1]}", *inner, f"from {ends[-2]}"]


def _table(*columns: str) -> "Table":
    from rich.table import Table  # noqa: PLC0415 - --help does not wait for it

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name)
    return table
