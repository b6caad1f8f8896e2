"""Options of `forebay planner`. The code is imported when a command runs, so that --help does not wait for it."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.cluster_options import KafkaOptions, ServiceOptions
from forebay.cli.common.errors import fail
from forebay.cli.common.logs import LoggingOptions
from forebay.cli.common.operator_name import OperatorOption
from forebay.cli.common.option_groups import spread
from forebay.cli.common.recording import KafkaSource, LogArgument
from forebay.cli.common.times import TIMES_HELP

AUTO = "auto"
LIMIT = 32
SIZE_MAX = 10_000

app = typer.Typer(help="Scale the pools of a distributed system.", no_args_is_help=True)


@app.command("run")
@spread
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML file: settings and pools. See docs/scaling.md.")],
    kafka: KafkaOptions,
    planner_id: Annotated[str, typer.Option(help="Name of the planner. Default: host name and process id.")] = "",
    *,
    service: ServiceOptions,
    logs: LoggingOptions,
) -> None:
    """Decide the sizes of pools, each interval. Further planners stand by.

    Decisions have an effect only with an actuator, see `forebay planner supervise`.
    """
    from forebay.cli.planner.run import run_planner  # noqa: PLC0415

    run_planner(file=file, kafka=kafka, planner_id=planner_id, service=service, logs=logs)


@app.command("supervise")
@spread
def supervise(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML file: actuator and pools. See docs/scaling.md.")],
    kafka: KafkaOptions,
    *,
    service: ServiceOptions,
    logs: LoggingOptions,
) -> None:
    """Start and drain the workers that the planner decides, as processes of this machine or with Kubernetes.

    Workers continue when this command ends. It finds them again when it is started again.
    """
    from forebay.cli.planner.supervise import run_supervise  # noqa: PLC0415

    run_supervise(file=file, kafka=kafka, service=service, logs=logs)


@app.command("status")
@spread
def status(
    source: KafkaSource,
    log: LogArgument = None,
    decision: Annotated[
        str,
        typer.Option(metavar="DECISION", help="Explain this decision: its number in the history, its time, or latest."),
    ] = "",
    history: Annotated[bool, typer.Option("--history", help="Show the newest decisions and their outcome.")] = False,
    pool: Annotated[str, typer.Option("--pool", help="With --history: only of this pool, as GROUP/POOL.")] = "",
    since: Annotated[str, typer.Option(help=f"With --history: only from this time on: {TIMES_HELP}.")] = "",
    changes: Annotated[bool, typer.Option("--changes", help="With --history: only those that change a size.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="With --history: at most the N newest.")] = LIMIT,
    verify: Annotated[
        bool, typer.Option("--verify", help="With --history: exit 1 unless all are derived again equal.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Show the planner, its pools and the newest decision about each pool, or earlier decisions, or one of them.

    Exits 1 if no planner is active, if a decision has waited too long for its reply, or if the decision to explain does
    not follow from the records before it.
    """
    if not history and (pool or since or changes or verify or limit != LIMIT):
        fail("--pool, --since, --changes, --limit and --verify require --history")
    if history and decision:
        fail("--history and --decision exclude each other")
    from forebay.cli.planner.decisions import run_explain, run_history, run_status  # noqa: PLC0415

    if decision:
        run_explain(source, log, decision, json=json)
    elif history:
        run_history(source, log, pool, since, limit, changes=changes, verify=verify, json=json)
    else:
        run_status(source, log, json=json)


@app.command("set")
@spread
def set_size(
    kafka: KafkaOptions,
    pool: Annotated[str, typer.Argument(metavar="GROUP/POOL", help="The pool.")] = "",
    size: Annotated[
        str, typer.Argument(metavar="N", help=f"Number of workers, or {AUTO}: the planner determines it again.")
    ] = "",
    pause: Annotated[
        bool | None, typer.Option("--pause/--resume", help="Let the planner observe only, and keep all other sizes.")
    ] = None,
    operator: OperatorOption = "",
    timeout_s: Annotated[
        float,
        typer.Option(min=0.1, max=86_400, help="Seconds to wait for the effect, after which the command exits 1."),
    ] = 60.0,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the effect.")] = True,
) -> None:
    """Set the size of a pool, which then precedes its limits and the GPU budget, or pause or resume the planner.

    Exits 1 if the effect was not seen.
    """
    if bool(pool) == (pause is not None) or bool(pool) != bool(size):
        fail("expected GROUP/POOL and its size, --pause or --resume")
    is_number = size.isdecimal() and size.isascii() and len(size) <= len(str(SIZE_MAX))
    if size not in ("", AUTO) and not (is_number and int(size) <= SIZE_MAX):
        fail(f"N: expected {AUTO} or a number from 0 to {SIZE_MAX}, got {size}")
    from forebay.cli.planner.operator import execute  # noqa: PLC0415

    count = int(size) if size not in ("", AUTO) else None
    execute(kafka, operator, pool=pool, size=count, is_pause=bool(pause), timeout_s=timeout_s if wait else None)
