"""`forebay config`: show the options of a command with the source of each value."""

import json as jsonlib
from typing import Any

import click

from forebay.cli.command import ConfigCommand
from forebay.cli.common.config_file import MODELS, OPTION, model_tables
from forebay.cli.common.errors import fail
from forebay.cli.common.sources import long_name, masked, place_of, source_of
from forebay.cli.common.tables import print_table


def run_config(options: ConfigCommand) -> None:
    context = _parsed(options.command, options.options or [])
    params = [one for one in context.command.params if isinstance(one, click.Option) and one.expose_value]
    rows = [_row(context, param) for param in params if not param.hidden]
    if tables := model_tables(context):
        rows.append({"option": MODELS, "value": tables, "source": f"file {context.params[OPTION]}"})
    if options.json:
        click.echo(jsonlib.dumps({row["option"]: {"value": row["value"], "source": row["source"]} for row in rows}))
        return
    names = (f"[[{MODELS}]]" if row["option"] == MODELS else f"--{row['option']}" for row in rows)
    cells = ((name, _text(row["value"]), row["source"]) for name, row in zip(names, rows, strict=True))
    print_table(("option", "value", "source"), cells)


def _parsed(name: str, rest: list[str]) -> click.Context:
    """Parse a command line without running it. Required values may be missing."""
    parent = click.get_current_context().find_root()
    found = parent.command
    rest = [name, *rest]
    while isinstance(found, click.Group):
        if not rest:
            fail(f"config {parent.info_name}: expected a subcommand: {', '.join(found.list_commands(parent))}")
        called, command, rest = found.resolve_command(parent, rest)
        assert called is not None and command is not None
        name, found = called, command
        if isinstance(found, click.Group):
            parent = click.Context(found, parent=parent, info_name=name)
    for param in found.params:
        param.required = False
    return found.make_context(name, rest, parent=parent)


def _row(context: click.Context, param: click.Option) -> dict[str, Any]:
    """Return name, value and source of an option. The source contains the name of the variable or file."""
    value, name = context.params.get(param.name or ""), long_name(param)
    source = source_of(context, param)
    if value is None and isinstance(param.show_default, str):
        value = param.show_default
    if place := place_of(context, param):
        source = f"{source} {place}"
    return {"option": name, "value": masked(name, value), "source": source}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value in ([], ""):
        return "not set"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
