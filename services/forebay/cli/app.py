"""The command line: `forebay up`, the same services as separate processes, and tools.

The module of a command is imported when that command runs, because importing all modules takes seconds.
"""

import errno
import os
import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer

from forebay.cli.common.command_class import EPILOG, CliCommand, CliGroup, long_name
from forebay.cli.common.config_file import OPTION as CONFIG
from forebay.cli.common.config_file import with_config_file

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
    has_config: bool = False
    services: tuple[str, ...] = ()


# A test compares each help text with the docstring of the function.
COMMANDS = {
    "up": CommandEntry(
        "processes.up",
        "up",
        "Serve an OpenAI-compatible API with a KV-aware router and workers in one process.",
        has_config=True,
    ),
    "ingress": CommandEntry(
        "processes.ingress",
        "ingress",
        "Serve the OpenAI API and the Kafka API of a distributed system.",
        has_config=True,
    ),
    "router": CommandEntry(
        "processes.router",
        "router",
        "Run a router of a distributed system.",
        has_config=True,
    ),
    "worker": CommandEntry(
        "processes.worker_command", "worker", "Run a worker of a distributed system.", has_config=True
    ),
    "serve": CommandEntry(
        "processes.serve_command",
        "serve",
        "Run the workers of a service class, one process per worker.",
        {"allow_extra_args": True, "ignore_unknown_options": True},
        has_config=True,
    ),
    "control": CommandEntry(
        "control.command",
        "app",
        "Send commands to workers or change routing settings.",
    ),
    "planner": CommandEntry(
        "planner.command", "app", "Scale the pools of a distributed system.", services=("run", "supervise")
    ),
    "produce": CommandEntry(
        "produce_command",
        "produce",
        "Send requests through the Kafka API.",
    ),
    "trace": CommandEntry(
        "trace.command",
        "trace",
        "Play a recorded or synthetic workload into a running system.",
    ),
    "shadow": CommandEntry(
        "shadow_command",
        "shadow",
        "Report for every decision of a running system what another policy or configuration would decide.",
        has_config=True,
    ),
    "simulate": CommandEntry(
        "simulate.command",
        "simulate",
        "Simulate a workload on modelled engines with the live routing code, in virtual time.",
    ),
    "sweep": CommandEntry(
        "simulate.sweep_command",
        "sweep",
        "Simulate every combination of settings, and mark the Pareto-optimal ones.",
    ),
    "fit": CommandEntry("simulate.fit_command", "fit", "Fit an engine profile to the recorded times of engines."),
    "profile": CommandEntry("simulate.profile", "app", "Measure a live worker, or create an engine profile."),
    "record": CommandEntry(
        "record_command",
        "record",
        "Record a slice of a log into OUT, including everything needed to derive its decisions again.",
    ),
    "restore": CommandEntry(
        "restore_command",
        "restore",
        "Create a namespace on Kafka with the groups and settings of a recorded log.",
    ),
    "workload": CommandEntry("simulate.workload_command", "app", "Inspect and convert workloads."),
    "replay": CommandEntry("replay.command", "app", "Verify, explain and compare recorded decisions."),
    "status": CommandEntry(
        "status_command", "status", "Show the owner, workers, requests and topics of a running system or a log."
    ),
    "console": CommandEntry(
        "console.command", "console", "Serve a web page that shows a log, live or at any moment of the past."
    ),
    "topics": CommandEntry("topics_command", "app", "Show the records of a log, and manage the topics of a broker."),
    "dead-letters": CommandEntry(
        "dead_letters.command", "app", "List records that did not decode or were rejected, and retry them."
    ),
    "tiers": CommandEntry("tiers.command", "app", "List, verify and purge stored KV blocks."),
    "model": CommandEntry("models.command", "app", "Store and list model cards, and set aliases of models."),
    "index": CommandEntry(
        "index_command",
        "index",
        "Print the cached blocks of each worker at the journal's end, as `kv.blocks_stored` events.",
    ),
    "config": CommandEntry(
        "config",
        "config",
        "Show the options of a command and where their values come from: a flag, a variable, a file or the default.",
        {"allow_extra_args": True, "ignore_unknown_options": True},
    ),
}
# Services, by the name of their table in a file of --config.
SERVICES = {name: (name,) for name, entry in COMMANDS.items() if entry.has_config} | {
    f"{name}-{one}": (name, one) for name, entry in COMMANDS.items() for one in entry.services
}


class Commands(CliGroup):
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
        for one in target.registered_commands:
            one.cls = CliCommand
            if one.name in command.services and one.callback is not None and one.epilog is None:
                one.callback = with_config_file(one.callback, f"{name}-{one.name}", SERVICES, _names_of_services)
                one.epilog = EPILOG
        alone.add_typer(target, name=name, cls=CliGroup)
        group: Any = typer.main.get_command(alone)
        return group.commands[name]
    if command.has_config:
        target = with_config_file(target, name, SERVICES, _names_of_services)
    alone.command(
        name, cls=CliCommand, context_settings=command.settings, epilog=EPILOG if command.has_config else None
    )(target)
    return typer.main.get_command(alone)


def _names_of_services() -> set[str]:
    found = set()
    for name, *rest in SERVICES.values():
        command = load(name)
        found |= {long_name(param) for param in (command.commands[rest[0]] if rest else command).params}
    return found - {"", CONFIG}


def _show_version(wanted: bool) -> None:
    if wanted:
        # Only this option needs these modules, and every command would wait for their import.
        from importlib.metadata import version  # noqa: PLC0415

        from forebay.core.world import CORE_VERSION  # noqa: PLC0415

        typer.echo(f"forebay {version('forebay')}, decision rules {CORE_VERSION}")
        raise typer.Exit


app = typer.Typer(
    name="forebay",
    cls=Commands,
    help="Event-sourced serving of large language models. Every state change and every decision is an event.",
    no_args_is_help=True,
    epilog=EPILOG,
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
            help="Print the version, and that of the decision rules, and exit.",
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
