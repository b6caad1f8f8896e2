"""Where the value of an option comes from: the command line, its environment variable, the file, or the default."""

from typing import Any

import click

from forebay.processes.passwords import MASK, SECRETS, without_passwords

PREFIX = "FOREBAY_"
SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "variable", "DEFAULT_MAP": "file"}


def long_name(param: click.Parameter) -> str:
    """Return the name of an option without dashes at its start. Empty if `param` has no long name."""
    if not isinstance(param, click.Option):
        return ""
    return next((name.removeprefix("--") for name in param.opts if name.startswith("--")), "")


def is_secret(name: str) -> bool:
    """Return whether no output may contain the value of the option with this name."""
    return name.rpartition("-")[2] in SECRETS


def variable(name: str) -> str:
    """Return the environment variable of an option, for example FOREBAY_KV_EVENTS for `kv-events`."""
    return PREFIX + name.upper().replace("-", "_")


def source_of(context: click.Context, param: click.Parameter) -> str:
    """Return where the value of a parameter comes from: `flag`, `variable`, `file` or `default`."""
    found = context.get_parameter_source(param.name or "")
    return SOURCES.get(found.name if found is not None else "", "default")


def place_of(context: click.Context, param: click.Parameter) -> str:
    """Return the variable, or the key and the file, that sets an option. Empty if none of them does."""
    source = source_of(context, param)
    if source == "variable":
        return str(param.envvar)
    return f"{long_name(param)} in {context.params.get('config')}" if source == "file" else ""


def masked(name: str, value: Any) -> Any:
    """Return the value of the option `name` for JSON. Values of secret options and passwords in URLs are masked."""
    if isinstance(value, list | tuple):
        return [masked(name, one) for one in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return MASK if is_secret(name) else without_passwords(str(value))
