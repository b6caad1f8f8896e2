"""`forebay config`: show the options of a command with the source of each value."""

import json as jsonlib
from typing import Annotated, Any

import typer

from forebay.cli.common.command_class import MASK, is_secret, long_name, place_of, source_of, without_passwords
from forebay.cli.common.config_file import MODELS, OPTION, model_tables
from forebay.cli.common.errors import fail
from forebay.cli.common.terminal import in_markup, results


def config(
    context: typer.Context,
    command: Annotated[str, typer.Argument(metavar="COMMAND [OPTIONS]", help="Command and its options.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Show the options of a command and where their values come from: a flag, a variable, a file or the default.

    The command does not run. Secrets are masked.
    """
    root = context.find_root().command
    found: Any = root
    parent, name, rest = context.find_root(), "", [command, *context.args]
    while hasattr(found, "commands"):
        if not rest:
            fail(f"config {name}: expected a subcommand: {', '.join(found.commands)}")
        name, found, rest = found.resolve_command(parent, rest)
        if hasattr(found, "commands"):
            parent = typer.Context(found, parent=parent, info_name=name)
    for param in found.params:
        param.required = False
    parsed = found.make_context(name, rest, parent=parent)
    rows = [_row(parsed, param) for param in found.params if long_name(param) and not getattr(param, "hidden", False)]
    if tables := model_tables(parsed):
        rows.append({"option": MODELS, "value": tables, "source": f"file {parsed.params[OPTION]}"})
    if json:
        typer.echo(jsonlib.dumps({row["option"]: {"value": row["value"], "source": row["source"]} for row in rows}))
        return
    from rich.table import Table  # noqa: PLC0415 - --help does not wait for it

    table = Table(box=None, pad_edge=False)
    for heading in ("option", "value", "source"):
        table.add_column(heading)
    for row in rows:
        name = f"[[{MODELS}]]" if row["option"] == MODELS else f"--{row['option']}"
        table.add_row(in_markup(name), in_markup(_text(row["value"])), in_markup(row["source"]))
    results().print(table)


def _row(parsed: Any, param: Any) -> dict[str, Any]:
    """Return name, value and source of an option. The source contains the name of the variable or file."""
    value, name = parsed.params.get(param.name), long_name(param)
    source = source_of(parsed, param)
    if value is None and isinstance(getattr(param, "show_default", None), str):
        value = param.show_default
    if place := place_of(parsed, param):
        source = f"{source} {place}"
    return {"option": name, "value": _masked(name, value), "source": source}


def _masked(name: str, value: Any) -> Any:
    """Return a value for JSON, without secrets: values of secret options, and passwords in URLs."""
    if isinstance(value, list | tuple):
        return [_masked(name, one) for one in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if is_secret(name):
        return MASK
    return without_passwords(str(value))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value in ([], ""):
        return "not set"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
