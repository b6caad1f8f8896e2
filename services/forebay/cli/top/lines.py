"""Lines above the tables: state, problems and small charts."""

from collections.abc import Sequence

from forebay.cli.common.terminal import counted
from forebay.cli.top.source import Snapshot
from forebay.cli.top.tables import clock, duration
from forebay.replay.catalog.facts import MetricSeries
from forebay.replay.status import GroupStatus

PROBLEMS_MAX = 3
BEHIND_S = 1.0  # a smaller lag is normal, because the console reads the log in batches
BARS = "▁▂▃▄▅▆▇█"
GAP = "  "


def state_line(snapshot: Snapshot) -> str:
    """Return the state of the group, the most important parts first."""
    status = snapshot.status
    ready = sum(worker.state == "ready" for worker in status.workers)
    count = len(status.workers)
    parts = [
        f"{status.group}: {'ready' if status.ready else 'not ready'}",
        f"{status.requests.in_flight:,} in flight, {status.requests.queued:,} queued",
        counted(count, "worker") if ready == count else f"{ready:,} of {counted(count, 'worker')} ready",
        _owner(status),
    ]
    if status.at_us:
        parts.append(f"newest event {clock(status.at_us)} UTC")
    return GAP.join(parts)


def _owner(status: GroupStatus) -> str:
    if status.owner.epoch < 0:
        return "no owner"
    standbys = "" if status.owner.standbys is None else f", {counted(len(status.owner.standbys), 'standby')}"
    return f"owner {status.owner.owner_id or 'unknown'}, epoch {status.owner.epoch}{standbys}"


def problem_lines(snapshot: Snapshot | None, failures: Sequence[str]) -> list[str]:
    """Return what is wrong, one sentence per line; empty if nothing is.

    Args:
        snapshot: newest values; None before the first ones.
        failures: further problems, which come first.
    """
    found = [*failures]
    if snapshot is not None:
        found += _catalog_problems(snapshot)
        found += snapshot.problems
    if len(found) > PROBLEMS_MAX:
        found = [*found[: PROBLEMS_MAX - 1], f"and {len(found) - PROBLEMS_MAX + 1} more problems"]
    return found


def _catalog_problems(snapshot: Snapshot) -> list[str]:
    state = snapshot.catalog
    if state is None:
        return []
    if state.error:
        return [f"the console does not follow the log: {state.error}"]
    if not state.is_complete:
        total = state.log_end_offset - state.begin_offset
        share = (state.end_offset - state.begin_offset) / total if total > 0 else 0.0
        return [f"the console is reading the log: {share:.0%}"]
    return [f"the console is {state.behind_s:.1f} s behind the log"] if state.behind_s > BEHIND_S else []


def charts_line(series: MetricSeries, width: int) -> str:
    """Return the newest values of two metrics, with small charts of the last minutes.

    Args:
        series: metrics over time.
    """
    rate = series.requests_per_s
    ttft = series.ttft_p50_us
    labels = [f"{rate[-1] if rate else 0:,.1f} requests/s ", f"TTFT p50 {duration(ttft[-1] if ttft else None)} "]
    room = max(0, (width - sum(map(len, labels)) - len(GAP)) // 2)
    return f"{labels[0]}{bars(rate, room)}{GAP}{labels[1]}{bars(ttft, room)}"


def bars(values: Sequence[float | None], width: int) -> str:
    """Return the newest values as bars, from 0 to the largest one. An interval without a value is a space."""
    shown = values[-width:] if width else []
    most = max((value for value in shown if value is not None), default=0.0)
    return "".join(_bar(value, most) for value in shown)


def _bar(value: float | None, most: float) -> str:
    if value is None:
        return " "
    return BARS[0] if not most else BARS[min(len(BARS) - 1, int(value / most * len(BARS)))]
