"""What `forebay simulate --against` shows on a terminal."""

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Grid

from forebay.cli.common.terminal import in_markup, results
from forebay.cli.simulate.fidelity import AS_RECORDED, EXACT, OF, PLACED, Compared, Fidelity, Simulated, of_time

NAMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "e2e_ms": "E2E", "prefill_ms": "prefill", "transfer_ms": "transfer"}
STAGES = {
    "place": "{:.1%} of {:,} prompts were computed in the same pool both times",
    "prefill": "{:.1%} of {:,} computed by the prefill pool both times were so by the same worker",
    "decode": "{:.1%} of these {:,} were answered by the same decode worker",
    "aggregated": "{:.1%} of {:,} computed where they were answered both times were so by the same worker",
}


def show(found: Fidelity, recording: str) -> None:
    """It on stdout."""
    console = results()
    where = f"{found.requests:,} requests in {found.span_s:,.1f} s, {found.workers} worker ranks"
    _say(console, "recording", f"{recording}: {where}")
    if found.left_out:
        _say(console, "left out", ", ".join(f"{count:,} {why}" for why, count in found.left_out.items()))
    for name in dict.fromkeys(one.name for one in found.simulated):
        _show_runs(console, name, [one for one in found.simulated if one.name == name])
    if found.transfer is not None:
        _say(console, "transfers", str(found.transfer))
    for name, hop in found.hops_ms.items():
        _say(console, "hop", f"{name}: {hop['p50']:.2f} ms p50, {hop['p90']:.2f} ms p90, by wall clocks")
    for note in found.notes:
        _say(console, "note", note)


def _show_runs(console: Console, name: str, runs: Sequence[Simulated]) -> None:
    """The simulations under one policy: the first, and how the others differ."""
    first = runs[0]
    title = f"lived, and simulated {name}: {first.compared:,} requests"
    grid = Grid(title=in_markup(title), box=box.SIMPLE, padding=(0, 1, 0, 0))
    other = "error" if name in (AS_RECORDED, PLACED) else "difference"
    columns = ["", "lived", "simulated", other]
    for column in columns + (["all simulated", f"{other}s"] if len(runs) > 1 else []):
        grid.add_column(column, justify="right" if column else "left")

    def add(label: str, unit: str, width: str, of: Callable[[Simulated], Compared]) -> None:
        one, all_ = of(first), [of(run) for run in runs]
        cells = [label, f"{one.lived:{width}}", f"{one.simulated:{width}}", _sized([one], unit)]
        if len(runs) > 1:
            values = [each.simulated for each in all_]
            cells += [f"{min(values):{width}} … {max(values):{width}}", _sized(all_, unit)]
        grid.add_row(*cells)

    for time in first.times:
        for of in OF if first.times[time] else ():
            add(f"{NAMES[time]} {of}, ms", " %", ",.2f", of_time(time, of))
    if first.stages:
        add("prefilled remotely", " %", ",.0f", lambda run: run.prefilled_remotely or EXACT)
        add("KV moved, MB", " %", ",.3f", lambda run: _in_mb(run.transferred_bytes or EXACT))
    add("prefix reuse", " points", ".4f", lambda run: run.prefix_reuse)
    add("load, max over mean", " %", ".3f", lambda run: run.load_max_over_mean)
    console.print(grid)
    chance = f"{first.placement.by_chance:.1%} by chance"
    _say(console, "placement", f"{first.placement.equal:.1%} of them went to the same worker both times; {chance}")
    for stage, agreed in first.stages.items():
        told = STAGES[stage].format(agreed.equal, agreed.compared)
        _say(console, "", f"{told}; {agreed.by_chance:.1%} by chance")
    for time, spread in first.single.items():
        off = f"off by {spread.percent_p50:.1f} % p50, {spread.percent_p90:.1f} % p90"
        signed = f"simulated minus lived {spread.ms_p10:+.2f} / {spread.ms_p50:+.2f} / {spread.ms_p90:+.2f} ms"
        _say(console, "each", f"{NAMES[time]} {off}; {signed} (p10/p50/p90)")
    if first.failed:
        _say(console, "failed", f"{first.failed:,} that history answered; {first.failures[0]}")


def _in_mb(moved: Compared) -> Compared:
    return Compared(moved.lived / 1e6, moved.simulated / 1e6, moved.error)


def _sized(found: Sequence[Compared], unit: str) -> str:
    """The errors, from the lowest to the highest."""
    errors = sorted(one.error for one in found if one.error is not None)
    ends = [errors[0], errors[-1]] if len(errors) > 1 else errors
    return " … ".join(f"{end:+.2f}" for end in ends) + unit if errors else "none lived"


def _say(console: Console, name: str, text: str) -> None:
    console.print(f"{name:<11}{in_markup(text)}")
