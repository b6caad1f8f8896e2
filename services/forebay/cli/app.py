"""The command line: `forebay up`, its parts as processes, and the tools.

A command's module is imported when the command is run: all of them take seconds, of which most need little.
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


class Command(NamedTuple):
    """A function, or an application of several commands, of a module below `forebay.cli`; and its line in `--help`."""

    module: str
    name: str
    help: str
    settings: dict[str, Any] | None = None


# As their functions say themselves: a test holds the two together.
COMMANDS = {
    "up": Command(
        "processes.up", "up", "Serve an OpenAI-compatible API with a KV-aware router and workers, in one process."
    ),
    "ingress": Command(
        "processes.ingress", "ingress", "Serve the OpenAI API of a distributed system, and its Kafka API."
    ),
    "router": Command(
        "processes.router",
        "router",
        "Run one router of a distributed system: the first owns, others stand by or share the groups.",
    ),
    "worker": Command("processes.worker", "worker", "Run one worker of a distributed system."),
    "serve": Command(
        "processes.serve",
        "serve",
        "Run the workers of a service, each in a process of its own.",
        {"allow_extra_args": True, "ignore_unknown_options": True},
    ),
    "control": Command(
        "control.command",
        "app",
        "Command workers of a running system, or change by what it routes; exit 1 unless that was done.",
    ),
    "produce": Command(
        "produce",
        "produce",
        "Send requests through the Kafka API; with --wait exit 1 unless every one was answered well.",
    ),
    "trace": Command(
        "trace",
        "trace",
        "Play a recorded or invented workload into a running system; exit 1 unless every request was answered.",
    ),
    "shadow": Command(
        "shadow",
        "shadow",
        "Report for every decision of a running system what another policy or configuration would decide.",
    ),
    "simulate": Command(
        "simulate.command",
        "simulate",
        "Play a workload through the live router and modelled engines, in virtual time.",
    ),
    "sweep": Command(
        "simulate.sweep",
        "sweep",
        "Simulate every combination of settings, and mark those that no other is better than.",
    ),
    "fit": Command("simulate.fit", "fit", "Fit an engine profile to the times that are recorded of engines."),
    "profile": Command("simulate.profile", "app", "Engine profiles from other people's measurements."),
    "record": Command(
        "record",
        "record",
        "Record a slice of a log into OUT, including everything needed to derive its decisions again.",
    ),
    "workload": Command("simulate.workload", "app", "Workloads: what they are like, and as files."),
    "replay": Command("replay.command", "app", "Verify, explain and compare recorded decisions."),
    "topics": Command("topics", "app", "Show the records of a log, and manage the topics of a broker."),
    "index": Command("index", "app", "Show the cached blocks of each worker, according to the log."),
}


class Commands(TyperGroup):
    """The commands by what `--help` says of them; the one that is run is loaded."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Which command is meant, and its own arguments."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load(name), rest


def load(name: str) -> Any:
    """The command of this name, as the library that parses the command line has it."""
    command = COMMANDS[name]
    found = getattr(import_module(f"forebay.cli.{command.module}"), command.name)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
        group: Any = typer.main.get_command(alone)
        return group.commands[name]
    alone.command(name, context_settings=command.settings)(found)
    return typer.main.get_command(alone)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forebay {version('forebay')}")
        raise typer.Exit


app = typer.Typer(
    name="forebay",
    cls=Commands,
    help="Event-sourced serving of large language models: every fact and every decision is an event.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options on a narrow terminal
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
    """Run the command line. Results that find no room end it in a line; a reader that leaves ends it quietly."""
    try:
        app()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        sys.stderr.write(f"forebay: results cannot be written ({error.strerror})\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of them goes nowhere
        sys.exit(1)
