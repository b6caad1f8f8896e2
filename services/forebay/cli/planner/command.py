"""Commands that decide the sizes of pools, and start and stop workers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from forebay.cli.common.cluster_options import KafkaOptions, ServiceOptions
from forebay.cli.common.logs import LoggingOptions
from forebay.cli.common.operator_name import OperatorOption
from forebay.cli.common.options import Argument, JsonOption, Option
from forebay.cli.common.recording import Source
from forebay.cli.common.times import TIMES_HELP

AUTO = "auto"
LIMIT = 32
SIZE_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerRunCommand:
    """Decide the sizes of pools, each interval. Further planners stand by.

    Decisions have an effect only with an actuator, see `forebay planner supervise`.
    """

    RUN: ClassVar = "planner.services:run_planner"

    file: Annotated[Path, Argument(metavar="FILE", help="TOML file: settings and pools. See docs/scaling.md.")]
    kafka: KafkaOptions
    planner_id: Annotated[str, Option("--id", help="Name of the planner. Default: host name and process id.")] = ""
    service: ServiceOptions
    logs: LoggingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSuperviseCommand:
    """Start and drain the workers that the planner decides, as processes of this machine or with Kubernetes.

    Workers continue when this command ends. It finds them again when it is started again.
    """

    RUN: ClassVar = "planner.services:run_supervise"

    file: Annotated[Path, Argument(metavar="FILE", help="TOML file: actuator and pools. See docs/scaling.md.")]
    kafka: KafkaOptions
    service: ServiceOptions
    logs: LoggingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerStatusCommand:
    """Show the planner, its pools and the newest decision about each pool, or earlier decisions, or one of them.

    Exits 1 if no planner is active, if a decision has waited too long for its reply, or if the decision to explain does
    not follow from the records before it.
    """

    RUN: ClassVar = "planner.decisions:run_status"

    source: Source
    decision: Annotated[
        str, Option(metavar="DECISION", help="Explain this decision: its number in the history, its time, or latest.")
    ] = ""
    history: Annotated[bool, Option("--history", help="Show the newest decisions and their outcome.")] = False
    pool: Annotated[str, Option("--pool", help="With --history: only of this pool, as GROUP/POOL.")] = ""
    start: Annotated[
        str, Option("--from", metavar="TIME", help=f"With --history: only from this time on: {TIMES_HELP}.")
    ] = ""
    changes: Annotated[bool, Option(help="With --history: only those that change a size.")] = False
    limit: Annotated[int, Option(short="-n", min=1, max=100_000, help="With --history: at most the N newest.")] = LIMIT
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSetCommand:
    """Set the size of a pool, which then precedes its limits and the GPU budget, or pause or resume the planner.

    Exits 1 if the effect was not seen.
    """

    RUN: ClassVar = "planner.services:run_set"

    kafka: KafkaOptions
    pool: Annotated[str, Argument(metavar="GROUP/POOL", help="The pool.")] = ""
    size: Annotated[
        str, Argument(metavar="N", help=f"Number of workers, or {AUTO}: the planner determines it again.")
    ] = ""
    pause: Annotated[
        bool | None, Option("--pause/--resume", help="Let the planner observe only, and keep all other sizes.")
    ] = None
    operator: OperatorOption = ""
    timeout_s: Annotated[
        float, Option(min=0.1, max=86_400, help="Seconds to wait for the effect, after which the command exits 1.")
    ] = 60.0
    wait: Annotated[bool, Option("--wait", help="Wait for the effect.")] = True
