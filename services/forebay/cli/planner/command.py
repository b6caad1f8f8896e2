"""`forebay planner`: the planner of a namespace, and the actuators that execute its decisions."""

import typer

from forebay.cli.planner.decisions import explain, history, status
from forebay.cli.planner.operator import pause, resume, set_size
from forebay.cli.planner.run import run
from forebay.cli.planner.supervise import supervise

app = typer.Typer(help="Scale the pools of a distributed system.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Scale the pools of a distributed system."""


app.command("run")(run)
app.command("supervise")(supervise)
app.command("status")(status)
app.command("history")(history)
app.command("explain")(explain)
app.command("pause")(pause)
app.command("resume")(resume)
app.command("set-size")(set_size)
