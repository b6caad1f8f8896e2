"""Options of `forebay planner`. The code is imported when a command runs, so that --help does not wait for it."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.cluster_options import KafkaOptions, ServiceOptions
from forebay.cli.common.logs import LoggingOptions
from forebay.cli.common.operator_name import OperatorOption
from forebay.cli.common.option_groups import spread
from forebay.cli.common.recording import KafkaSource, LogArgument
from forebay.cli.common.times import TIMES_HELP

LATEST = "latest"
LIMIT = 32
SIZE_MAX = 10_000
TIMEOUT_S = 60.0

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
TimeoutOption = Annotated[
    float, typer.Option(min=0.1, max=86_400, help="Seconds to wait for the effect, after which the command exits 1.")
]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the effect.")]

app = typer.Typer(help="Scale the pools of a distributed system.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Scale the pools of a distributed system."""


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
def status(source: KafkaSource, log: LogArgument = None, json: JsonOption = False) -> None:
    """Show the planner, its pools, and the newest decision about each pool.

    Exits 1 if no planner is active, or if a decision has waited too long for its reply.
    """
    from forebay.cli.planner.decisions import run_status  # noqa: PLC0415

    run_status(source=source, log=log, json=json)


@app.command("history")
@spread
def history(
    source: KafkaSource,
    log: LogArgument = None,
    pool: Annotated[str, typer.Option("--pool", help="Show only decisions about this pool, as GROUP/POOL.")] = "",
    since: Annotated[str, typer.Option(help=f"Show only decisions from this time on: {TIMES_HELP}.")] = "",
    changes: Annotated[bool, typer.Option("--changes", help="Show only decisions that change a size.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Show at most the N newest decisions.")] = LIMIT,
    verify: Annotated[bool, typer.Option("--verify", help="Exit 1 if a decision is not derived again equal.")] = False,
    json: JsonOption = False,
) -> None:
    """Show the newest decisions, their outcome, and whether deriving them again gives the same result."""
    from forebay.cli.planner.decisions import run_history  # noqa: PLC0415

    run_history(source=source, log=log, pool=pool, since=since, changes=changes, limit=limit, verify=verify, json=json)


@app.command("explain")
@spread
def explain(
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="[LOG] DECISION",
            help="LOG: log file or recording; omit with --kafka. DECISION: its offset, its time, or latest.",
        ),
    ],
    source: KafkaSource,
    json: JsonOption = False,
) -> None:
    """Show how a decision follows from its inputs, what became of it, and whether deriving it again gives the same.

    Exits 1 if the decision does not follow from the records before it.
    """
    from forebay.cli.planner.decisions import run_explain  # noqa: PLC0415

    run_explain(where=where, source=source, json=json)


@app.command("pause")
@spread
def pause(
    kafka: KafkaOptions, operator: OperatorOption = "", timeout_s: TimeoutOption = TIMEOUT_S, wait: WaitOption = True
) -> None:
    """Pause the planner: it observes, but keeps all sizes that no operator sets.

    Exits 1 if the effect was not seen.
    """
    from forebay.cli.planner.operator import run_pause  # noqa: PLC0415

    run_pause(kafka=kafka, operator=operator, timeout_s=timeout_s, wait=wait)


@app.command("resume")
@spread
def resume(
    kafka: KafkaOptions, operator: OperatorOption = "", timeout_s: TimeoutOption = TIMEOUT_S, wait: WaitOption = True
) -> None:
    """Resume a paused planner. Exits 1 if the effect was not seen."""
    from forebay.cli.planner.operator import run_resume  # noqa: PLC0415

    run_resume(kafka=kafka, operator=operator, timeout_s=timeout_s, wait=wait)


@app.command("set-size")
@spread
def set_size(
    pool: Annotated[str, typer.Argument(metavar="GROUP/POOL", help="The pool.")],
    kafka: KafkaOptions,
    size: Annotated[int | None, typer.Argument(metavar="N", min=0, max=SIZE_MAX, help="Number of workers.")] = None,
    release: Annotated[bool, typer.Option("--release", help="Let the planner determine the size again.")] = False,
    operator: OperatorOption = "",
    timeout_s: TimeoutOption = TIMEOUT_S,
    wait: WaitOption = True,
) -> None:
    """Set the size of a pool until it is released, or release it. It comes before limits and the GPU budget.

    Exits 1 if the effect was not seen.
    """
    from forebay.cli.planner.operator import run_set_size  # noqa: PLC0415

    run_set_size(pool=pool, kafka=kafka, size=size, release=release, operator=operator, timeout_s=timeout_s, wait=wait)
