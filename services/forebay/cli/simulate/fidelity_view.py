"""Terminal output of `forebay simulate --against`."""

from collections.abc import Callable, Sequence
from functools import partial

from rich import box
from rich.console import Console
from rich.table import Table as Grid

from forebay.cli.common.terminal import in_markup, results
from forebay.cli.simulate.fidelity import (
    AS_RECORDED,
    EXACT,
    PLACED,
    STATISTICS,
    FidelityMetric,
    FidelityReport,
    SimulatedRun,
    of_time,
)

NAMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "e2e_ms": "E2E", "prefill_ms": "prefill", "transfer_ms": "transfer"}
STAGES = {
    "place": "{:.1%} of {:,} prompts were prefilled in the same pool in both",
    "prefill": "{:.1%} of {:,} prompts prefilled remotely in both used the same prefill worker",
    "decode": "{:.1%} of these {:,} used the same decode worker",
    "aggregated": "{:.1%} of {:,} prompts prefilled locally in both used the same worker",
}


def show(found: FidelityReport, recording: str) -> None:
    """Print the comparison of a recording with its simulations on stdout."""
    console = results()
    where = f"{found.requests:,} requests in {found.span_s:,.1f} s, {found.workers} worker ranks"
    _print_line(console, "recording", f"{recording}: {where}")
    if found.left_out:
        _print_line(console, "left out", ", ".join(f"{count:,} {why}" for why, count in found.left_out.items()))
    for name in dict.fromkeys(one.name for one in found.simulated):
        _show_runs(console, name, [one for one in found.simulated if one.name == name])
    if found.transfer is not None:
        _print_line(console, "transfers", str(found.transfer))
    for name, hop in found.hops_ms.items():
        _print_line(
            console, "hop", f"{name}: {hop['p50']:.2f} ms p50, {hop['p90']:.2f} ms p90, by wall clocks of two hosts"
        )
    for note in found.notes:
        _print_line(console, "note", note)


def _show_runs(console: Console, name: str, runs: Sequence[SimulatedRun]) -> None:
    """Print the simulations under one policy: the first one, and the range of the repetitions."""
    first = runs[0]
    title = f"observed, and simulated {name}: {first.compared:,} requests"
    grid = Grid(title=in_markup(title), box=box.SIMPLE, padding=(0, 1, 0, 0))
    other = "error" if name in (AS_RECORDED, PLACED) else "difference"
    columns = ["", "observed", "simulated", other]
    for column in columns + (["all simulated", f"{other}s"] if len(runs) > 1 else []):
        grid.add_column(column, justify="right" if column else "left")

    def add(label: str, unit: str, width: str, of: Callable[[SimulatedRun], FidelityMetric]) -> None:
        one, all_ = of(first), [of(run) for run in runs]
        cells = [label, f"{one.observed:{width}}", f"{one.simulated:{width}}", _sized([one], unit)]
        if len(runs) > 1:
            values = [each.simulated for each in all_]
            cells += [f"{min(values):{width}} … {max(values):{width}}", _sized(all_, unit)]
        grid.add_row(*cells)

    for time in first.times:
        for of in STATISTICS if first.times[time] else ():
            add(f"{NAMES[time]} {of}, ms", " %", ",.2f", of_time(time, of))
    if first.stages:
        add("prefilled remotely", " %", ",.0f", lambda run: run.prefilled_remotely or EXACT)
        add("KV transferred, MB", " %", ",.3f", lambda run: _in_mb(run.transferred_bytes or EXACT))
    add("prefix reuse", " points", ".4f", lambda run: run.prefix_reuse)
    for tier in first.tiers:
        name = "computed" if tier == "computed" else f"from {tier}"
        add(name, " points", ".4f", partial(_share, tier))
    add("load, max over mean", " %", ".3f", lambda run: run.load_max_over_mean)
    console.print(grid)
    chance = f"{first.placement.by_chance:.1%} by chance"
    _print_line(
        console, "placement", f"{first.placement.equal:.1%} of the requests ran on the same worker in both; {chance}"
    )
    for stage, agreed in first.stages.items():
        text = STAGES[stage].format(agreed.equal, agreed.compared)
        _print_line(console, "", f"{text}; {agreed.by_chance:.1%} by chance")
    for time, spread in first.single.items():
        off = f"absolute error {spread.percent_p50:.1f} % p50, {spread.percent_p90:.1f} % p90"
        signed = f"simulated minus observed {spread.ms_p10:+.2f} / {spread.ms_p50:+.2f} / {spread.ms_p90:+.2f} ms"
        _print_line(console, "per request", f"{NAMES[time]} {off}; {signed} (p10/p50/p90)")
    if first.failed:
        _print_line(
            console, "failed", f"{first.failed:,} requests that completed in the recording; {first.failures[0]}"
        )


def _share(tier: str, run: SimulatedRun) -> FidelityMetric:
    return run.tiers.get(tier, EXACT)


def _in_mb(moved: FidelityMetric) -> FidelityMetric:
    return FidelityMetric(moved.observed / 1e6, moved.simulated / 1e6, moved.error)


def _sized(found: Sequence[FidelityMetric], unit: str) -> str:
    errors = sorted(one.error for one in found if one.error is not None)
    ends = [errors[0], errors[-1]] if len(errors) > 1 else errors
    return " … ".join(f"{end:+.2f}" for end in ends) + unit if errors else "none observed"


def _print_line(console: Console, name: str, text: str) -> None:
    console.print(f"{name:<12}{in_markup(text)}")
