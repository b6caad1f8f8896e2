"""`forebay sweep`: simulate one workload on every combination of settings, and mark the Pareto-optimal runs."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import product
from math import prod
from typing import Any

import click
import msgspec
from rich.console import Console

from forebay.analysis.runs import Job, capacity_metrics, simulate_metrics
from forebay.cli.common.errors import explained
from forebay.cli.common.options import CliOption, Number, parameters_of
from forebay.cli.common.survey import print_survey
from forebay.cli.common.tables import in_markup, print_result, results, table
from forebay.cli.common.terminal import printable
from forebay.cli.simulate.command import SweepCommand
from forebay.cli.simulate.options import (
    AS_CONFIGURED,
    TIERS,
    FleetOptions,
    ShapeOptions,
    policies_of,
    require_disaggregation,
    require_routers,
    require_servable,
    router_of,
    settings_json,
    settings_of,
    slo_of,
    to_json,
    workload_options,
)
from forebay.cli.simulate.simulations import Work, reason, run_all
from forebay.core.routing.policies import BUILT_IN
from forebay.events.control import RouterConfig
from forebay.events.names import unknown_name
from forebay.processes.notices import complain
from forebay.runtime.errors import ConfigError, prefixed
from forebay.simulate.pareto import costs, optimal
from forebay.simulate.reading import open_workload
from forebay.simulate.settings import ROUTER_SETTINGS, Settings
from forebay.simulate.slo import Slo
from forebay.simulate.workload import Survey, Workload, WorkloadOptions

RUNS_MAX = 1_000
# Settings that only affect the cost function have no effect on modes that ignore costs.
COST_SETTINGS = (
    "selection_policy", "overlap_score_credit", "overlap_score_credit_decay", "prefill_load_scale", "temperature",
    "host_cache_hit_weight", "disk_cache_hit_weight", "shared_cache_hit_weight", "tier_credit",
    "decode_active_request_weight", "eviction_weight",
)  # fmt: skip
BLIND_MODES = frozenset(BUILT_IN) - {"kv"}


def _scalars(group: type[Any]) -> dict[str, CliOption]:
    """Return the options of a group that are a single number or word, by the name of their field."""
    found = (one for one in parameters_of(group) if isinstance(one, CliOption))
    return {one.name or "": one for one in found if not one.multiple and not one.is_flag and one.type.name != "path"}


OF_FLEET = _scalars(FleetOptions)
OF_SHAPE = _scalars(ShapeOptions)
TIER_SIZES = {f"kv_{tier}_size": tier for tier in TIERS}  # sizes of `--kv-tier`
KNOWN = sorted({*ROUTER_SETTINGS, *OF_FLEET, *TIER_SIZES, *OF_SHAPE})


@dataclass(frozen=True, slots=True)
class Axis:
    """One `--set` option of a sweep: settings that vary together, and points with one value per setting, as text.

    Names are those of the router's configuration, and those of the options of `forebay simulate` with underscores.
    `A:B=1:4,2:2` varies two settings together.
    """

    names: tuple[str, ...]
    points: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Combination:
    """One run of a sweep. Its router, fleet and shape include `varied`, the settings that apply to its policy."""

    policy: str
    varied: Mapping[str, str]
    router: RouterConfig
    fleet: Settings
    shape: ShapeOptions
    seed: int

    @property
    def name(self) -> str:
        return ", ".join([self.policy, *(f"{name}={value}" for name, value in self.varied.items())])


@dataclass(slots=True)
class _Parts:
    """Components of a combination while it is assembled."""

    fleet: FleetOptions
    shape: ShapeOptions
    router: list[str] = field(default_factory=list)


def axes_of(sets: Sequence[str]) -> list[Axis]:
    """Parse the `--set` options. Raises ConfigError if one is malformed, or a name or value is duplicate."""
    axes: list[Axis] = []
    seen: set[str] = set()
    for text in sets:
        left, equals, right = text.partition("=")
        names = tuple(name.strip() for name in left.split(":"))
        points = tuple(tuple(value.strip() for value in point.split(":", len(names) - 1)) for point in right.split(","))
        if not equals or not all(names) or not all(all(point) for point in points):
            raise ConfigError(f"--set {text}: expected NAME=VALUE,VALUE")
        if any(len(point) != len(names) for point in points):
            raise ConfigError(
                f"--set {text}: {len(names)} names need {len(names)} values per point (between commas), as in 2:6,4:4"
            )
        if len(set(points)) < len(points):
            raise ConfigError(f"--set {text}: duplicate value")
        for name in names:
            if name not in KNOWN:
                raise ConfigError(f"--set {text}: {unknown_name('setting', name, KNOWN)}")
            if name in seen:
                raise ConfigError(f"--set {text}: {name} is varied twice; use one --set for it")
            seen.add(name)
        axes.append(Axis(names, points))
    return axes


def combinations(
    policies: Sequence[str], axes: Sequence[Axis], fleet: FleetOptions, shape: ShapeOptions
) -> list[Combination]:
    """Return every combination of a policy and one point per axis, sorted in this order. Equal ones occur once.

    Raises ConfigError if there are too many combinations, or one is invalid.
    """
    runs = len(policies) * prod(len(axis.points) for axis in axes)
    if runs > RUNS_MAX:
        raise ConfigError(f"the sweep would have {runs} runs; the maximum is {RUNS_MAX}: use fewer values or policies")
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Combination] = {}
    for text in policies:
        mode = router_of(text).mode
        for point in product(*(axis.points for axis in axes)):
            varied = {
                name: value
                for axis, values in zip(axes, point, strict=True)
                for name, value in zip(axis.names, values, strict=True)
                if mode not in BLIND_MODES or name not in COST_SETTINGS
            }
            key = (text, tuple(varied.items()))
            if key not in found:
                found[key] = _combination(text, varied, fleet, shape)
    return list(found.values())


def _combination(text: str, varied: Mapping[str, str], fleet: FleetOptions, shape: ShapeOptions) -> Combination:
    parts = _Parts(fleet, shape)
    for name, value in varied.items():
        _vary(parts, name, value)
    router = _router(text, parts.router)
    return Combination(text, varied, router, settings_of(parts.fleet), parts.shape, parts.fleet.seed)


def _router(text: str, more: Sequence[str]) -> RouterConfig:
    mode, _, given = text.partition(":")
    settings = [*(given.split(",") if given else ()), *more]
    names = [one.partition("=")[0] for one in settings]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} is in both --policy {text} and --set; remove one")
    if mode == AS_CONFIGURED and more:
        raise ConfigError(f"--set {names[0]}: has no effect, because every pool has its own router")
    return router_of(f"{mode}:{','.join(settings)}" if settings else mode)


def _vary(parts: _Parts, name: str, value: str) -> None:
    if name in ROUTER_SETTINGS:
        parts.router.append(f"{name}={value}")
    elif name in OF_FLEET:
        parts.fleet = replace(parts.fleet, **{name: _converted(name, value, OF_FLEET[name])})
    elif name in TIER_SIZES:
        more = f"{TIER_SIZES[name]}:size={value}"
        parts.fleet = replace(parts.fleet, kv_tier=[*(parts.fleet.kv_tier or ()), more])
    else:
        parts.shape = replace(parts.shape, **{name: _converted(name, value, OF_SHAPE[name])})


def _converted(name: str, text: str, option: CliOption) -> Any:
    if not isinstance(option.type, Number):
        return text
    try:
        return option.type.convert(text, None, None)
    except click.BadParameter as error:
        raise ConfigError(f"--set {name}={text}: {error.message}; separate values by commas") from None


STEPS_EXPECTED = 10  # simulations per capacity search, for progress
ATTAIN = 0.99
COSTS = ("failed", "gpu_hours", "ttft_ms.p90", "itl_ms.p90")
CAPACITY_COSTS = ("gpus", "capacity_per_s")

Metrics = dict[str, Any]
TIMES = {"TTFT": ("ttft_ms", ".0f"), "ITL": ("itl_ms", ".1f")}
SHOWN = ("p50", "p90", "p99")
STEPS_SHOWN_MAX = 20  # searches whose steps are printed; --json contains all


def run_sweep(options: SweepCommand) -> None:
    with explained():
        objectives_slo = slo_of(options.slo, options.attain)
        if options.find_capacity and objectives_slo is None:
            raise ConfigError("--find-capacity requires --slo")
        wanted = CAPACITY_COSTS if options.find_capacity else (*COSTS, *(("goodput_per_s",) if objectives_slo else ()))
        settings = settings_of(options.fleet)
        todo = combinations(
            policies_of(options.policies, settings), axes_of(options.sets or ()), options.fleet, options.shape
        )
        require_routers([one.router for one in todo], settings.pools)
        for combination in todo:
            require_disaggregation(combination.name, combination.router, combination.fleet.pools)
        jobs, survey, name = _jobs(options.workload, todo, options.find_capacity)
        base = settings_json(
            settings, workload_options(options.shape, options.fleet.seed, models=settings.models), name
        )
    began_s = time.monotonic()
    ended = run_all(
        [
            _work(job, objectives_slo, ATTAIN if options.attain is None else options.attain, options.find_capacity)
            for job in jobs
        ]
    )
    runs, dead = _runs(todo, jobs, ended, wanted)
    result = {
        "runs": runs,
        "dead": dead,
        "objectives": wanted,
        "digest": sha256("".join(one["digest"] for one in runs).encode()).hexdigest(),
        "skipped": survey.skipped,
        "notes": survey.notes,
        "settings": {**base, "slo": to_json(objectives_slo), "attain": options.attain},
    }
    print_result(result, options.json, lambda: show(name, result))
    print_survey(survey)
    for failed in dead:
        complain(f"{failed['name']}: {failed['error']}")
    Console(stderr=True).print(f"{len(todo)} runs in {time.monotonic() - began_s:.1f} s", highlight=False)
    if dead or not _succeeded(runs, options.attain, options.find_capacity):
        raise click.exceptions.Exit(1)


def _jobs(workload: str, todo: Sequence[Combination], find_capacity: bool) -> tuple[list[Job], Survey, str]:
    """Check every combination, and return the jobs, the survey of the first workload, and its name."""
    surveys: dict[WorkloadOptions, Survey] = {}
    possible: set[object] = set()
    jobs: list[Job] = []
    for one in todo:
        options = workload_options(one.shape, one.seed, models=one.fleet.models)
        opened = open_workload(workload, options)
        shape = msgspec.structs.replace(options, speed=1.0)  # the speed changes only arrival times
        if shape not in surveys:
            surveys[shape] = opened.survey()
            if find_capacity:
                surveys[shape].notes += _scalable(opened)
        groups = [(pool.model, group.engine) for pool in one.fleet.pools for group in pool.groups]
        fleet = tuple((model, engine.block_size, engine.kv_blocks_total) for model, engine in groups)
        if (shape, fleet) not in possible:
            with prefixed(one.name):
                require_servable(opened, one.fleet)
            possible.add((shape, fleet))
        requests = surveys[shape].requests
        jobs.append(Job(one.name, one.fleet, one.router, workload, options, requests))
    return jobs, next(iter(surveys.values())), opened.name


def _scalable(workload: Workload) -> list[str]:
    """Return notes on playing a workload at other speeds. Raises ConfigError if the speed does not change its rate."""
    times: set[int] = set()
    after = 0
    for turn in workload.turns():
        if turn.after:
            after += 1
        elif len(times) < 2:
            times.add(turn.at_us)
    if len(times) < 2:
        raise ConfigError(
            f"--find-capacity: all requests of {workload.name} with a fixed time arrive at one time, "
            "so the speed does not change the request rate"
        )
    if not after:
        return []
    return [f"{after} requests depend on responses: the speed changes when sessions start, not the think times"]


def _work(job: Job, slo: Slo | None, attain: float, find_capacity: bool) -> Work[Metrics]:
    if not find_capacity:
        return Work(job.requests, partial(simulate_metrics, job, slo))
    assert slo is not None
    return Work(job.requests * STEPS_EXPECTED, partial(capacity_metrics, job, slo, attain))


def _runs(
    todo: Sequence[Combination], jobs: Sequence[Job], ended: Sequence[Metrics | Exception], objectives: Sequence[str]
) -> tuple[list[Metrics], list[Metrics]]:
    """Return the completed runs, sorted by cost, and the failed runs."""
    runs: list[Metrics] = []
    dead: list[Metrics] = []
    for one, job, found in zip(todo, jobs, ended, strict=True):
        identity = {"name": one.name, "policy": one.policy, "set": dict(one.varied), "speed": job.options.speed}
        if isinstance(found, Exception):
            dead.append({**identity, "error": reason(found)})
            continue
        groups = [group for pool in job.settings.pools for group in pool.groups]
        size = {"workers": job.settings.workers, "gpus": sum(group.count * group.gpus for group in groups)}
        metrics = {name: value for name, value in found.items() if name != "workers"}  # `size` has their number
        runs.append({**identity, **size, **metrics})
    points = [costs(run, objectives) for run in runs]
    for run, best in zip(runs, optimal(points), strict=True):
        run["pareto"] = best
    order = sorted(range(len(runs)), key=lambda at: (points[at], at))
    return [runs[at] for at in order], dead


def _succeeded(runs: Sequence[Metrics], attain: float | None, find_capacity: bool) -> bool:
    """Return whether the sweep succeeded, so that the command exits 0."""
    if find_capacity:
        return all(run["capacity"]["answer"] != "never" for run in runs)
    if attain is not None and not attaining(runs, (), attain):
        return False
    return not any(run["failed"] for run in runs)


def show(name: str, result: Metrics) -> None:
    """Print the table of runs, the cheapest run or the steps of the capacity searches, and the digest."""
    runs: Sequence[Metrics] = result["runs"]
    searched = any("capacity" in run for run in runs)
    objectives_slo = result["settings"]["slo"] is not None
    varied = list(dict.fromkeys(setting for run in runs for setting in run["set"]))
    title = f"{name}; * is Pareto-optimal in {', '.join(result['objectives'])}; milliseconds as {'/'.join(SHOWN)}"
    columns = ["", "policy", *varied]
    columns += ["requests/s", "speed"] if searched else []
    has_tiers = any("tiers" in run for run in runs)
    columns += ["GPU-h", "failed", "reuse", *(["host/disk/store"] if has_tiers else []), "max/mean", *TIMES]
    columns += ["attained", "goodput/s"] if objectives_slo else []
    shown = table(title, columns, left=2, no_wrap=True)
    for run in runs:
        cells = ["*" if run["pareto"] else "", run["policy"], *(run["set"].get(setting, "-") for setting in varied)]
        cells += _rate(run["capacity"]) if searched else []
        cells += [f"{run['gpu_hours']:.4g}", str(run["failed"])]
        cells += [f"{run['prefix_reuse']:.4f}", *([_loaded(run)] if has_tiers else [])]
        cells += [f"{run['load_max_over_mean']:.3f}"]
        cells += ["/".join(f"{run[key][of]:{width}}" for of in SHOWN if run[key]) for key, width in TIMES.values()]
        cells += [f"{run['attained']:.2%}", f"{run['goodput_per_s']:.3f}"] if objectives_slo else []
        shown.add_row(*map(in_markup, cells))
    results().print(shown)
    for line in _summary_lines(result, searched):
        click.echo(printable(line))
    click.echo(f"digest of all decisions, equal for equal runs: {result['digest']}")


def attaining(runs: Sequence[Metrics], dead: Sequence[Metrics], attain: float) -> dict[str, list[Metrics]]:
    """Return the combinations without a failed run that attain the SLO with every seed: runs by unseeded name."""
    found: dict[str, list[Metrics]] = {}
    for run in runs:
        found.setdefault(_unseeded(run), []).append(run)
    broken = {_unseeded(run) for run in dead}
    return {
        name: of for name, of in found.items() if name not in broken and all(run["attained"] >= attain for run in of)
    }


def _unseeded(run: Metrics) -> str:
    return ", ".join([run["policy"], *(f"{name}={value}" for name, value in run["set"].items() if name != "seed")])


def _rate(capacity: Metrics) -> tuple[str, str]:
    step = capacity["step"]
    if step is None:
        return "none", "-"
    at_least = ">= " if capacity["answer"] == "always" else ""
    return f"{at_least}{step['requests_per_s']:.4g}", f"{step['speed']:.4g}"


def _loaded(run: Metrics) -> str:
    """Return the shares of the prompt tokens that were loaded from each tier."""
    shares = run["tiers"]["shares"] if "tiers" in run else {}
    return "/".join(f"{shares.get(tier, 0.0):.3f}" for tier in ("host", "disk", "store"))


def _limit_lines(run: Metrics) -> Iterator[str]:
    """Yield why the search found no rate, or no limit; nothing if it found the highest rate."""
    capacity = run["capacity"]
    if capacity["answer"] == "always":
        speed = f"{capacity['step']['speed']:.4g} times its pace"
        yield f"{run['name']}: no limit found: the SLO is met with the workload at {speed}, the end of the search;"
        yield "  use a workload with more requests, because this one may end before queues grow"
    if capacity["answer"] == "never":
        (idle,) = capacity["steps"]
        rate = f"{idle['requests_per_s']:.3g} requests/s, {idle['attained']:.2%} of the requests meet the SLO"
        each = ", ".join(f"{name} {share:.2%}" for name, share in run["attained_each"].items())
        yield f"{run['name']}: no rate meets the SLO: at nearly zero load, {rate}, and {capacity['attain']:.2%} must"
        yield f"  requests that meet each limit: {each}; {run['failed']} failed; equal arrival times always overlap"


def _summary_lines(result: Metrics, searched: bool) -> Iterator[str]:
    runs: Sequence[Metrics] = result["runs"]
    attain = result["settings"]["attain"]
    if searched:
        yield "the search assumes that SLO attainment falls monotonically with the request rate"
        for run in runs[:STEPS_SHOWN_MAX]:
            tried = ", ".join(
                f"{step['requests_per_s']:.4g}/s {step['attained']:.2%}{'' if step['holds'] else ' (missed)'}"
                for step in run["capacity"]["steps"]
            )
            odd = "" if run["capacity"]["monotone"] else "; attainment was higher at a higher rate than at a lower one"
            yield f"{run['name']}: tried {tried}{odd}"
            yield from _limit_lines(run)
    elif attain is not None:
        seeded = any("seed" in run["set"] for run in runs)
        attained = attaining(runs, result["dead"], attain)
        if attained:
            # Seeds are not a choice, so compare settings by their worst seed.
            cheapest = min(attained, key=lambda name: max(costs(run, ["gpu_hours"]) for run in attained[name]))
            seeds = len(attained[cheapest])
            worst = f", with each of {seeds} seeds" if seeds > 1 else ""
            yield f"cheapest run with SLO attainment of at least {attain:.2%}{worst}: {cheapest}"
        else:
            yield f"no run has an SLO attainment of at least {attain:.2%}{' with every seed' if seeded else ''}"
