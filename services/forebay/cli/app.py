"""The command line: `forebay up`, the same services as separate processes, and tools.

The module of a command is imported when that command runs, because importing all modules takes seconds.
"""

import errno
import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CommandEntry(NamedTuple):
    """Entry of the command table.

    Attributes:
        module: Module that implements the command, relative to `forebay.cli`.
        name: Function in that module, or `typer.Typer` application with subcommands.
        help: Line in `forebay --help`. Equals the summary of the command's own help.
        settings: Context settings for the command-line parser.
    """

    module: str
    name: str
    help: str
    settings: dict[str, Any] | None = None


# A test compares each help text with the docstring of the function.
COMMANDS = {
    "up": CommandEntry(
        "processes.up", "up", "Serve an OpenAI-compatible API with a KV-aware router and workers in one process."
    ),
    "ingress": CommandEntry(
        "processes.ingress", "ingress", "Serve the OpenAI API and the Kafka API of a distributed system."
    ),
    "router": CommandEntry(
        "processes.router",
        "router",
        "Run a router of a distributed system.",
    ),
    "worker": CommandEntry("processes.worker", "worker", "Run a worker of a distributed system."),
    "serve": CommandEntry(
        "processes.serve",
        "serve",
        "Run the workers of a service class, one process per worker.",
        {"allow_extra_args": True, "ignore_unknown_options": True},
    ),
    "control": CommandEntry(
        "control.command",
        "app",
        "Send commands to workers or change routing settings.",
    ),
    "produce": CommandEntry(
        "produce",
        "produce",
        "Send requests through the Kafka API.",
    ),
    "trace": CommandEntry(
        "trace",
        "trace",
        "Play a recorded or synthetic workload into a running system.",
    ),
    "shadow": CommandEntry(
        "shadow",
        "shadow",
        "Report for every decision of a running system what another policy or configuration would decide.",
    ),
    "simulate": CommandEntry(
        "simulate.command",
        "simulate",
        "Simulate a workload on modelled engines with the live routing code, in virtual time.",
    ),
    "sweep": CommandEntry(
        "simulate.sweep",
        "sweep",
        "Simulate every combination of settings, and mark the Pareto-optimal ones.",
    ),
    "fit": CommandEntry("simulate.fit", "fit", "Fit an engine profile to the recorded times of engines."),
    "profile": CommandEntry("simulate.profile", "app", "Create engine profiles from published measurements."),
    "record": CommandEntry(
        "record",
        "record",
        "Record a slice of a log into OUT, including everything needed to derive its decisions again.",
    ),
    "workload": CommandEntry("simulate.workload", "app", "Inspect and convert workloads."),
    "replay": CommandEntry("replay.command", "app", "Verify, explain and compare recorded decisions."),
    "topics": CommandEntry("topics", "app", "Show the records of a log, and manage the topics of a broker."),
    "index": CommandEntry("index", "app", "Show the cached blocks of each worker, according to the log."),
}


class Commands(TyperGroup):
    """Group of all commands, which imports only the module of the command that it runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the name of the command, the command itself, and its arguments."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load(name), rest


def load(name: str) -> Any:
    """Import a command and return it as a click command."""
    command = COMMANDS[name]
    target = getattr(import_module(f"forebay.cli.{command.module}"), command.name)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    if isinstance(target, typer.Typer):
        alone.add_typer(target, name=name)
        group: Any = typer.main.get_command(alone)
        return group.commands[name]
    alone.command(name, context_settings=command.settings)(target)
    return typer.main.get_command(alone)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forebay {version('forebay')}")
        raise typer.Exit


app = typer.Typer(
    name="forebay",
    cls=Commands,
    help="Event-sourced serving of large language models. Every state change and every decision is an event.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the tables of rich truncate option names on a narrow terminal
)
for _name, _command in COMMANDS.items():
    app.command(_name, help=_command.help)(lambda: None)


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Event-sourced serving of large language models."""


def main() -> None:
    """Run the command line.

    A full disk ends the process with a one-line error and exit code 1. A closed pipe ends it without a message.
    """
    try:
        app()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        sys.stderr.write(f"forebay: cannot write results: {error.strerror}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard buffered output
        sys.exit(1)
