"""Parse command lines of `forebay` without running them."""

from typing import Any

from typer.core import TyperGroup

from forebay.cli.app import COMMANDS, load


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parse a `forebay` command line without running it and return the value of each option."""
    name, *arguments = arguments
    assert name in COMMANDS, f"forebay has no command {name}"
    command: Any = load(name)
    while isinstance(command, TyperGroup):
        name, *arguments = arguments
        assert name in command.commands, f"forebay has no command {name}"
        command = command.commands[name]
    params: dict[str, Any] = command.make_context(command.name, arguments).params
    return params
