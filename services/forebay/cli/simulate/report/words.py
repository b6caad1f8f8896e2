"""Texts of the report: the headline, the findings, the table of metrics and the notes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from forebay.cli.simulate.options import to_json
from forebay.cli.simulate.report.measures import Measured
from forebay.simulate.pareto import metric_at
from forebay.simulate.slo import Slo

TIE = 0.01  # relative difference below which metrics are reported as equal; other seeds change them as much
NAMED = 3  # maximum number of runs to name in a sentence
LESS, MORE = 1, -1  # which direction is better


def duration(ms: float) -> str:
    """Return a duration as text with three significant digits and a unit."""
    if ms < 0.9995:
        return "0 ms" if ms == 0 else f"{ms * 1e3:.3g} µs"
    if ms < 999.5:
        return f"{ms:.3g} ms"
    if ms < 600_000:
        return f"{ms / 1e3:.3g} s"
    return f"{ms / 6e4:.3g} min" if ms < 7_200_000 else f"{ms / 3.6e6:,.1f} h"


class Metric(NamedTuple):
    """A row of the table. `path` is that of the metric in `Measured.metrics`."""

    name: str
    path: str
    text: Callable[[float], str]
    better: int


ATTAINED = Metric("SLO attainment", "attained", "{:.1%}".format, MORE)
TTFT = Metric("TTFT mean", "ttft_ms.mean", duration, LESS)
METRICS = (
    ATTAINED,
    Metric("goodput, requests/s", "goodput_per_s", "{:,.3g}".format, MORE),
    TTFT,
    *(Metric(f"TTFT {of}", f"ttft_ms.{of}", duration, LESS) for of in ("p50", "p90", "p99")),
    *(Metric(f"ITL {of}", f"itl_ms.{of}", duration, LESS) for of in ("mean", "p50", "p90", "p99")),
    *(Metric(f"E2E {of}", f"e2e_ms.{of}", duration, LESS) for of in ("mean", "p50", "p90", "p99")),
    Metric("prefix reuse", "prefix_reuse", "{:.1%}".format, MORE),
    Metric("load, max / mean", "load_max_over_mean", "{:.3f}".format, LESS),
    Metric("output tokens/s", "tokens_per_s", "{:,.0f}".format, MORE),
    Metric("GPU hours", "gpu_hours", "{:,.3g}".format, LESS),
)
NOTES = (
    "TTFT: time from the arrival of a request to its first token. ITL: mean time between the tokens of a response. "
    "E2E: time from arrival to the last token. Latencies are those of completed requests.",
    "Prefix reuse: share of prompt tokens found in the selected worker's cache. Load, max / mean: prompt tokens "
    "computed by the busiest worker, divided by the mean of all workers. Output tokens/s: from the first arrival to "
    "the last response.",
    f"★ marks the best runs. Values that differ by less than {TIE:.0%} are called equal, because another seed may "
    "change them as much.",
)
OF_DISAGGREGATION = (
    "Prefill workers compute prompts for decode workers. Prefix reuse then refers to the cache of the worker that "
    "computed the prompt, and load to the prefill workers. TTFT includes the KV transfer."
)
OF_MOCKER = (
    "Step times of profile mocker are those of Dynamo's mocker and match no hardware. Compare reuse, balance and "
    "order, but do not rely on the milliseconds."
)


def slo_text(slo: Slo) -> str:
    limits = (("TTFT", slo.ttft_ms), ("ITL", slo.itl_ms), ("E2E", slo.e2e_ms))
    return ", ".join(f"{name} ≤ {duration(limit)}" for name, limit in limits if limit is not None)


def headline(runs: Sequence[Measured], slo: Slo | None) -> str:
    """Return a sentence that says which run is best: by SLO attainment, or without an SLO by mean TTFT."""
    answered = [one for one in runs if one.ttft_ms]
    if not answered:
        return "No request completed."
    metric = ATTAINED if slo else TTFT
    best, others = _ranked(answered, metric)
    of = f"SLO attainment ({slo_text(slo)})" if slo else metric.name
    text = f"Best {of}: {_names(best)}, {metric.text(_value(best[0], metric))}"
    return f"{text}; {others[0].label} has {metric.text(_value(others[0], metric))}." if others else f"{text}."


def findings(runs: Sequence[Measured]) -> list[str]:
    """Return what a reader needs to know before comparing latencies: the failed requests."""
    found = []
    for one in runs:
        if failures := one.run.outcome.requests.failures:
            reason = failures[min(failures)]
            found.append(f"{one.label}: {one.failed:,} of {one.requests:,} requests failed; the first reason: {reason}")
    return found


def metric_rows(runs: Sequence[Measured]) -> list[list[str]]:
    """Return the rows of the table: the name of a metric, and its value under each run."""
    rows = []
    for metric in METRICS:
        values = [metric_at(one.metrics, metric.path) for one in runs]
        known = [one for one, value in zip(runs, values, strict=True) if value is not None]
        if known:
            best, others = _ranked(known, metric)
            marked = best if others else []
            cells = [
                "-" if value is None else metric.text(value) + " ★" * (one in marked)
                for one, value in zip(runs, values, strict=True)
            ]
            rows.append([metric.name, *cells])
    return rows


def notes(runs: Sequence[Measured]) -> list[str]:
    """Return sentences that explain the metrics of the report."""
    pools = [pool for one in runs for pool in one.run.settings.pools]
    found = list(NOTES)
    if any(pool.role == "prefill" for pool in pools):
        found.append(OF_DISAGGREGATION)
    if any(group.profile == "mocker" for pool in pools for group in pool.groups):
        found.append(OF_MOCKER)
    return found


def settings_shown(runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the settings of all runs for display. Equal fleets are listed once."""
    found: list[dict[str, Any]] = []
    fleets: dict[bytes, str] = {}
    for one in runs:
        fleet = msgspec.json.encode(one.run.settings)
        fleet_shown: Any = f"as under {fleets[fleet]}" if fleet in fleets else to_json(one.run.settings)
        fleets.setdefault(fleet, one.label)
        found.append({"run": one.label, "router": to_json(one.run.router), "fleet": fleet_shown})
    return found


def _value(one: Measured, metric: Metric) -> float:
    value = metric_at(one.metrics, metric.path)
    assert value is not None, "only runs with this metric are compared"
    return value


def _ranked(runs: Sequence[Measured], metric: Metric) -> tuple[list[Measured], list[Measured]]:
    """Return the best runs, which are equal within `TIE`, and the other runs in order."""
    order = sorted(runs, key=lambda one: metric.better * _value(one, metric))
    top = _value(order[0], metric)
    best = [one for one in order if abs(_value(one, metric) - top) <= TIE * min(top, _value(one, metric))]
    return best, order[len(best) :]


def _names(runs: Sequence[Measured]) -> str:
    labels = [one.label for one in runs]
    if len(labels) > NAMED:
        return f"{', '.join(labels[: NAMED - 1])} and {len(labels) - NAMED + 1} others"
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"
