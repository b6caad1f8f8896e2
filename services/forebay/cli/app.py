"""The command line: `forebay up`, its parts as processes, and the tools."""

from importlib.metadata import version
from typing import Annotated

import typer

from forebay.cli import (
    control,
    index,
    ingress,
    produce,
    record,
    replay,
    router,
    serve,
    shadow,
    simulate,
    topics,
    trace,
    up,
    worker,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forebay {version('forebay')}")
        raise typer.Exit


app = typer.Typer(
    name="forebay",
    help="Event-sourced serving of large language models: every fact and every decision is an event.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options on a narrow terminal
)
app.command("up")(up.up)
app.command("ingress")(ingress.ingress)
app.command("router")(router.router)
app.command("worker")(worker.worker)
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve.serve)
app.command("control")(control.control)
app.command("produce")(produce.produce)
app.command("trace")(trace.trace)
app.command("shadow")(shadow.shadow)
app.command("simulate")(simulate.simulate)
app.command("record")(record.record)
app.add_typer(replay.app, name="replay")
app.add_typer(topics.app, name="topics")
app.add_typer(index.app, name="index")


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
    """Run the command line."""
    app()
