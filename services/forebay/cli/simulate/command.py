"""Commands that simulate, and that read or write files for simulations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from forebay.cli.common.options import Argument, JsonOption, Option
from forebay.cli.common.recording import GroupOption
from forebay.cli.policies.allowed import AllowPolicyOption
from forebay.cli.simulate.options import (
    INT_MAX,
    AgainstOptions,
    AttainOption,
    FleetOptions,
    OptionalWorkloadArgument,
    PoliciesOption,
    ShapeOptions,
    SloOption,
    WorkloadArgument,
)

OutOption = Annotated[Path | None, Option("--out", short="-o", help="Write the profile to this file, not to stdout.")]
ReportOption = Annotated[Path | None, Option("--report", help="Write a self-contained HTML report to this path.")]

PlannerOption = Annotated[
    Path | None,
    Option(help="TOML file of a planner that sizes the pools, as of `forebay planner run`. See docs/scaling.md."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateCommand:
    """Simulate a workload on modelled engines with the live routing code, in virtual time.

    Exits 1 if a request failed, or if a policy misses the SLO attainment given by --attain. With --against, simulates
    a recording and compares the result with the recorded latencies. Then exits 1 if the recording does not verify, or
    if an error exceeds a bound of --fail-above.
    """

    RUN: ClassVar = "simulate.run:run_simulate"
    BASIC: ClassVar = (
        "workers file engine_profile kv_blocks block_size policies slo attain speed duration_s requests "
        "against report seed json"
    )

    fleet: FleetOptions
    shape: ShapeOptions
    recorded: AgainstOptions
    workload: OptionalWorkloadArgument = None
    policies: PoliciesOption = None
    slo: SloOption = None
    attain: AttainOption = None
    planner: PlannerOption = None
    report: ReportOption = None
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCommand:
    """Fit an engine profile to the recorded times of engines.

    The profile is a file for `--engine-profile`. Errors of the fit are printed on stderr and written to the file.
    """

    RUN: ClassVar = "simulate.fit:run_fit"
    REQUIRES: ClassVar = ("fit", "scipy")

    log: Annotated[Path, Argument(help="A recording, or a log file of `forebay up`, which may be in use.")]
    out: OutOption = None
    pool: Annotated[str, Option(help="Fit the engines of this pool. Required if there are several pools.")] = ""
    group: GroupOption = ""
    allow_policy: AllowPolicyOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCommand:
    """Simulate every combination of settings, and mark the Pareto-optimal ones.

    Exits 1 if a run or a request failed, if no combination attains --attain with every seed, or if a capacity search
    found no rate.
    """

    RUN: ClassVar = "simulate.sweep:run_sweep"

    workload: WorkloadArgument
    fleet: FleetOptions
    shape: ShapeOptions
    sets: Annotated[
        list[str] | None,
        Option("--set", metavar="NAME=VALUE,…", help="Try each value of a router setting or an option. Repeatable."),
    ] = None
    policies: PoliciesOption = None
    slo: SloOption = None
    attain: AttainOption = None
    find_capacity: Annotated[
        bool, Option("--find-capacity", help="Find the highest request rate that meets --slo.")
    ] = False
    json: JsonOption = False


SeedOption = Annotated[int, Option(min=0, max=INT_MAX, help="Random seed for sampling.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShowCommand:
    """Show requests, rate, lengths, sessions, and the prefix reuse of an unbounded cache."""

    RUN: ClassVar = "simulate.workload:run_show"

    workload: WorkloadArgument
    shape: ShapeOptions
    seed: SeedOption = 0
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConvertCommand:
    """Write a workload, transformed by the options, to a file in forebay's own format."""

    RUN: ClassVar = "simulate.workload:run_convert"

    workload: WorkloadArgument
    out: Annotated[Path, Option("--out", short="-o", help="Path of the file to write.")]
    shape: ShapeOptions
    seed: SeedOption = 0
