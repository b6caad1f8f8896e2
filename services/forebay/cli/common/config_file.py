"""Option `--config` of services: a TOML file with options of several services.

Keys are names of options. Top-level keys apply to every service that has the option, and the keys of a table to the
service of that name. The table of `forebay planner run` is `planner-run`. Environment variables and the command line
override the file.

`[[models]]` tables list the models of `forebay up`. Their keys are options of one model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from forebay.cli.common.errors import fail
from forebay.cli.common.options import CliOption
from forebay.cli.common.sources import is_secret, long_name
from forebay.events.names import unknown_name
from forebay.runtime.errors import ConfigError
from forebay.runtime.files import read_toml

OPTION = "config"
MODELS = "models"
UP = "up"  # the service that serves the models of `[[models]]` tables
SERVICES = (
    "up", "ingress", "router", "indexer", "ledger", "worker", "serve", "shadow", "planner-run", "planner-supervise",
)  # fmt: skip
MODEL_KEYS = (
    "model", "model-name", "revision", "engine", "engine-args", "engine-profile", "speedup", "workers", "lora",
    "block-size", "kv-blocks", "max-num-seqs", "max-num-batched-tokens", "dp-size",
)  # fmt: skip
META = "forebay.models"  # key of the context


def config_option(table: str) -> CliOption:
    """Return the option `--config` of the service with this table."""

    def read(context: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
        if path is not None:
            _apply(context, table, path)
        return path

    return CliOption(
        [f"--{OPTION}"],
        panel="",
        metavar="PATH",
        help="TOML file with options of this and other services.",
        type=click.Path(path_type=Path),
        callback=read,
        is_eager=True,
    )


def _apply(context: click.Context, table: str, path: Path) -> None:
    """Make the values of a file the defaults of a command. Invalid content ends the command."""
    options = {name: param for param in context.command.params if (name := long_name(param)) not in ("", "help-all")}
    del options[OPTION]
    try:
        content = read_toml(path)
    except ConfigError as error:
        fail(f"--config {error}")
    tables = _model_tables(path, content)
    values = _values(path, content, table, options, context)
    if table == UP:
        if tables and "model" in values:
            fail(f"--config {path}: the key model and [[models]] exclude each other; name all models in tables")
        context.meta[META] = [
            _model_of(path, number, one, options, context) for number, one in enumerate(tables, start=1)
        ]
    context.default_map = {
        options[name].name or "": _given(path, options[name], values[name], context) for name in values
    }


def model_tables(context: click.Context) -> list[dict[str, Any]]:
    """Return the options of each `[[models]]` table; none if the command line or a variable names models instead."""
    source = context.get_parameter_source("model")
    overridden = source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")
    found: list[dict[str, Any]] = context.meta.get(META, [])
    return [] if overridden else found


def _model_tables(path: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Remove the `[[models]]` tables from the content of a file, and return them."""
    tables = content.pop(MODELS, [])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        fail(f"--config {path}: {MODELS}: expected an array of tables, each with the heading [[{MODELS}]]")
    return tables


def _model_of(
    path: Path, number: int, table: Mapping[str, Any], options: Mapping[str, Any], context: click.Context
) -> dict[str, Any]:
    """Return the parsed options of a `[[models]]` table, by the name of their parameter."""
    place = f"[[{MODELS}]] table {number}"
    given = _named(path, place, table)
    if unknown := [name for name in given if name not in MODEL_KEYS]:
        fail(f"--config {path}: {place}: {unknown_name('key', unknown[0], MODEL_KEYS)}")
    if not isinstance(given.get("model", ""), str):
        fail(f"--config {path}: {place}: model: expected a string, got {_text(given['model'])}")
    found = {}
    for name, value in given.items():
        param = options[name]
        found[param.name] = param.process_value(context, _given(path, param, value, context))
    if "model" in found:
        (found["model"],) = found["model"]
    return found


def _values(
    path: Path,
    content: Mapping[str, Any],
    command: str,
    options: Mapping[str, Any],
    context: click.Context,
) -> dict[str, Any]:
    """Return the value of each option of `command` that the content contains. Invalid content ends the command."""
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    if unknown := [name for name in tables if name not in SERVICES]:
        fail(f"--config {path}: {unknown_name('table', unknown[0], SERVICES)}")
    shared = _named(path, "", {name: value for name, value in content.items() if name not in tables})
    own = _named(path, f"[{command}]", tables.get(command, {}))
    if unknown := [name for name in own if name not in options]:
        fail(f"--config {path}: [{command}]: {unknown_name('key', unknown[0], options)}")
    if elsewhere := [name for name in shared if name not in options]:
        known = sorted(_names_of_all(context))
        if unknown := [name for name in elsewhere if name not in known]:
            fail(f"--config {path}: {unknown_name('key', unknown[0], known)}")
    return {name: value for name, value in shared.items() if name in options} | own


def _names_of_all(context: click.Context) -> set[str]:
    """Return the names of the options of all services."""
    root: Any = context.find_root().command
    found = set()
    for service in SERVICES:
        command = root
        for part in service.split("-"):
            command = command.get_command(context, part)
        found |= {long_name(param) for param in command.params}
    return found - {"", OPTION, "help-all"}


def _named(path: Path, table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by option name, which the file may write with underscores."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("_", "-")
        if name in found:
            fail(f"--config {path}: {name} appears twice{f' in {table}' if table else ''}")
        found[name] = value
    return found


def _given(path: Path, param: Any, value: Any, context: click.Context) -> Any:
    """Return a value of the file as the text that the command line would contain. A wrong type ends the command."""
    name = long_name(param)
    shown = "a value that is not shown" if is_secret(name) else _text(value)
    if param.is_flag:
        if not isinstance(value, bool):
            fail(f"--config {path}: {name}: expected true or false, got {shown}")
        return value
    if param.multiple:
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            fail(f"--config {path}: {name}: expected a string or an array of strings, got {shown}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        fail(f"--config {path}: {name}: expected one value, got {shown}")
    try:
        parsed = param.process_value(context, str(value))
    except click.BadParameter as error:
        fail(f"--config {path}: {name}: {error.message}")
    if isinstance(parsed, int | float) != isinstance(value, int | float):
        kind = "a number" if isinstance(parsed, int | float) else "a string"
        fail(f"--config {path}: {name}: expected {kind}, got {shown}")
    return str(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
