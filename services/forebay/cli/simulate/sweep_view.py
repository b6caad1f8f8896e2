"""Output of a sweep: a table on the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from forebay.cli.common.tables import in_markup, results, table
from forebay.cli.common.terminal import printable
from forebay.simulate.pareto import costs

TIMES = {"TTFT": ("ttft_ms", ".0f"), "ITL": ("itl_ms", ".1f")}
SHOWN = ("p50", "p90", "p99")
STEPS_SHOWN_MAX = 20  # searches whose steps are printed; --json contains all

Metrics = Mapping[str, Any]


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
