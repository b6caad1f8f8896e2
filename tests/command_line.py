"""Parse command lines of `forebay` without running them, and walk through all its commands."""

from collections.abc import Iterator
from typing import Any

import click

from forebay.cli.app import app


def commands(group: click.Group = app, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command below a group with its words, without the groups themselves."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def options(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option) and param.expose_value]


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parse a `forebay` command line without running it and return the value of each option."""
    command: click.Command = app
    while isinstance(command, click.Group):
        name, *arguments = arguments
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"forebay has no command {name}"
        command = found
    return command.make_context(command.name, arguments).params
