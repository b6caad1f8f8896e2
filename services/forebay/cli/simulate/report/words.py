"""Texts of the report: the headline, the findings, and the metrics of each run."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from forebay.cli.simulate.options import to_json
from forebay.cli.simulate.report.measures import Measured
from forebay.simulate.slo import Slo, goodput

TIE = 0.01  # relative difference below which metrics are reported as equal; other seeds change them as much
NAMED = 3  # maximum number of runs to name in a sentence

Figure = Callable[[Measured], float]


class Line(msgspec.Struct, frozen=True):
    """One metric of a run on its card in the report.

    Attributes:
        share: value relative to the largest value of all runs, 0 to 1, for the length of a bar.
    """

    name: str
    value: str
    share: float
    best: bool


class Card(msgspec.Struct, frozen=True):
    """Summary of one run in the report.

    Attributes:
        lead: highlighted value, formatted.
        failed: number of failed requests and the first reason; empty for none.
    """

    label: str
    colour: str
    lead: str
    lead_name: str
    lines: list[Line]
    failed: str


def duration(ms: float) -> str:
    """Return a duration as text with three significant digits and a unit."""
    if ms < 0.9995:
        return "0 ms" if ms == 0 else f"{ms * 1e3:.3g} µs"
    if ms < 999.5:
        return f"{ms:.3g} ms"
    if ms < 600_000:
        return f"{ms / 1e3:.3g} s"
    return f"{ms / 6e4:.3g} min" if ms < 7_200_000 else f"{ms / 3.6e6:,.1f} h"


def slo_text(slo: Slo) -> str:
    limits = (("TTFT", slo.ttft_ms), ("ITL", slo.itl_ms), ("E2E", slo.e2e_ms))
    return ", ".join(f"{name} ≤ {duration(limit)}" for name, limit in limits if limit is not None)


def headline(runs: Sequence[Measured], slo: Slo | None) -> str:
    """Return one sentence that says which run is best. Differences below `TIE` count as equal."""
    answered = [one for one in runs if one.ttft_ms]
    if not answered:
        return "No request completed." if any(one.requests for one in runs) else "The workload contains no requests."
    if len(answered) < len(runs):
        silent = _names([one for one in runs if not one.ttft_ms])
        return f"No request completed under {silent}. The other policies: {_of_answered(answered, slo)}"
    return _of_answered(runs, slo)


def findings(runs: Sequence[Measured]) -> list[str]:
    """Return sentences with facts that a reader needs before comparing latencies, such as failed requests."""
    found = []
    failed = [one for one in runs if one.failed]
    if failed:
        counts = ", ".join(f"{one.failed:,} of {one.requests:,} under {one.label}" for one in failed)
        found.append(f"Failed requests: {counts}. Latencies are those of completed requests; shares are of all.")
    answered = [one for one in runs if one.ttft_ms]
    paced = [one for one in answered if one.itl_ms]
    if len(paced) > 1:
        soonest = min(paced, key=_ttft("mean"))
        least, level, _ = _ranked(paced, _itl_p99)
        if soonest not in level:
            times = (
                f"{duration(_itl_p99(least))} under {least.label}, {duration(_itl_p99(soonest))} under {soonest.label}"
            )
            found.append(f"Another policy has a lower p99 ITL: {times}.")
    if len(answered) > 1:
        most = max(answered, key=_reuse)
        rest = [_reuse(one) for one in answered if one is not most]
        others = (
            f"{min(rest):.1%}" if f"{min(rest):.1%}" == f"{max(rest):.1%}" else f"{min(rest):.1%} to {max(rest):.1%}"
        )
        found.append(f"Prefix reuse: {_reuse(most):.1%} of prompt tokens under {most.label}, otherwise {others}.")
    return found


def cards(runs: Sequence[Measured], slo: Slo | None) -> list[Card]:
    kept = [goodput(one.run.outcome, slo) if slo else {} for one in runs]
    figures: list[tuple[str, list[float | None], Callable[[float], str], bool]] = []

    def add(name: str, of: Callable[[Measured], float | None], formatted: Callable[[float], str], *, low: bool) -> None:
        figures.append((name, [of(one) for one in runs], formatted, low))

    for name, times in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms")):
        for point in ("p50", "p99"):
            add(f"{name} {point}", partial(_percentile, times, point), duration, low=True)
    add("prefix reuse", lambda one: _reuse(one) if one.ttft_ms else None, "{:.1%}".format, low=False)
    add("load, max / mean", lambda one: one.run.summary["load_max_over_mean"] or None, "{:.3f}".format, low=True)
    add("tokens/s", _tokens_per_s, "{:,.0f}".format, low=False)
    add("GPU hours", lambda one: one.run.outcome.gpu_s / 3_600 or None, "{:,.3g}".format, low=True)
    if slo:
        figures.insert(0, ("SLO attainment", [one["attained"] for one in kept], "{:.1%}".format, False))
        figures.insert(1, ("goodput, req/s", [one["goodput_per_s"] for one in kept], "{:,.3g}".format, False))
    lines = [_lines(*figure) for figure in figures]
    return [
        Card(
            label=one.label,
            colour=one.colour,
            lead=duration(one.run.summary["ttft_ms"]["mean"]) if one.ttft_ms else "none completed",
            lead_name="mean TTFT",
            lines=[line for of_all in lines if (line := of_all[at]) is not None],
            failed=_failed(one),
        )
        for at, one in enumerate(runs)
    ]


def table(runs: Sequence[Measured]) -> list[list[str]]:
    """Return all percentiles of the JSON output, one row per latency of each run."""
    rows = []
    for one in runs:
        for name, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms")):
            times = one.run.summary[key]
            rows.append(
                [one.label, name, *(f"{times[of]:,.2f}" if times else "-" for of in ("mean", "p50", "p90", "p99"))]
            )
    return rows


def _of_answered(runs: Sequence[Measured], slo: Slo | None) -> str:
    if len(runs) == 1:
        (one,) = runs
        return (
            f"{one.label}: TTFT p50 {duration(_ttft('p50')(one))}, p99 {duration(_ttft('p99')(one))}; "
            f"prefix reuse {_reuse(one):.1%} of prompt tokens."
        )
    if slo is not None:
        return _by_slo(runs, slo)
    mean, far = _ttft("mean"), _ttft("p99")
    best, level, rest = _ranked(runs, mean)
    if not rest:
        text = f"{_names(level)} are equal: mean TTFT {_span(level, mean)}, a difference of less than {TIE:.0%}"
    else:
        verb = "has" if len(level) == 1 else "are equal and have"
        less = 1 - mean(best) / mean(rest[0])
        time = duration(mean(best)) if len(level) == 1 else _span(level, mean)
        text = f"{_names(level)} {verb} the lowest mean TTFT: {time}, {less:.1%} less than {rest[0].label}"
    least, at_p99, _ = _ranked(runs, far)
    if best not in at_p99:
        text += f"; the lowest p99 is that of {least.label}: {duration(far(least))} against {duration(far(best))}"
    return text + "."


def _by_slo(runs: Sequence[Measured], slo: Slo) -> str:
    found = {one.label: goodput(one.run.outcome, slo) for one in runs}
    kept = {label: one["attained"] for label, one in found.items()}
    order = sorted(runs, key=lambda one: -kept[one.label])
    most = kept[order[0].label]
    level = [one for one in order if kept[one.label] * (1 + TIE) >= most]
    rest = order[len(level) :]
    text = f"{_names(level)} {'meets' if len(level) == 1 else 'meet'} {slo_text(slo)} for"
    least, highest = f"{kept[level[-1].label]:.1%}", f"{most:.1%}"
    share = highest if least == highest else f"{least} to {highest}"
    others = f", {rest[0].label} for {kept[rest[0].label]:.1%}" if rest else "; they differ by less than 1%"
    few = "" if most > 0.5 else _missed(order[0].label, found[order[0].label]["attained_each"])
    return f"{text} {share} of all requests{others}.{few}"


def _missed(label: str, each: Mapping[str, float]) -> str:
    """Return a note that no run meets the objectives for most requests, and the objective that the best run misses."""
    if len(each) == 1:
        return " No run meets it for most requests."
    part = min(each, key=lambda name: each[name])
    worst = f"{part.upper()} is missed most often, met for {each[part]:.1%} under {label}"
    return f" No run meets all objectives for most requests; {worst}."


def _ranked(runs: Sequence[Measured], figure: Figure) -> tuple[Measured, list[Measured], list[Measured]]:
    """Return the lowest run, all runs equal to it within `TIE`, and the other runs in order."""
    order = sorted(runs, key=figure)
    bound = figure(order[0]) * (1 + TIE)
    level = [one for one in order if figure(one) <= bound]
    return order[0], level, order[len(level) :]


def _ttft(of: str) -> Figure:
    return lambda one: float(one.run.summary["ttft_ms"][of])


def _percentile(times: str, point: str, one: Measured) -> float | None:
    found: float | None = one.run.summary[times].get(point)
    return found


def _itl_p99(one: Measured) -> float:
    return float(one.run.summary["itl_ms"]["p99"])


def _reuse(one: Measured) -> float:
    return float(one.run.summary["prefix_reuse"])


def _tokens_per_s(one: Measured) -> float | None:
    return one.run.summary["output_tokens"] / one.span_s if one.span_s and one.ttft_ms else None


def _span(runs: Sequence[Measured], figure: Figure) -> str:
    low, high = min(map(figure, runs)), max(map(figure, runs))
    return duration(low) if duration(low) == duration(high) else f"{duration(low)} to {duration(high)}"


def _names(runs: Sequence[Measured]) -> str:
    labels = [one.label for one in runs]
    if len(labels) > NAMED:
        return f"{', '.join(labels[: NAMED - 1])} and {len(labels) - NAMED + 1} others"
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _lines(
    name: str, values: Sequence[float | None], formatted: Callable[[float], str], low: bool
) -> list[Line | None]:
    """Return the line of each run. If all values are equal within `TIE`, none is marked as best."""
    known = [value for value in values if value is not None]
    if not known:
        return [None] * len(values)
    largest, top = max(known), min(known) if low else max(known)
    differ = largest > min(known) * (1 + TIE)
    found: list[Line | None] = []
    for value in values:
        if value is None:
            found.append(Line(name, "-", 0.0, best=False))
            continue
        level = value <= top * (1 + TIE) if low else value * (1 + TIE) >= top
        share = value / largest if largest else 0.0
        found.append(Line(name, formatted(value), round(share, 4), best=differ and level))
    return found


def _failed(one: Measured) -> str:
    if not one.failed:
        return ""
    place = min(one.run.outcome.requests.failures)
    reason = one.run.outcome.requests.failures[place]
    return f"{one.failed:,} of {one.requests:,} requests failed; the first reason: {reason}"


def notes(runs: Sequence[Measured]) -> list[str]:
    """Return sentences that explain the metrics of the report."""
    profiles = sorted({group.profile for one in runs for pool in one.run.settings.pools for group in pool.groups})
    found = [
        "TTFT: time from the arrival of a request to its first token. ITL: mean time between the tokens of a response. "
        "E2E: time from arrival to the last token.",
        "Prefix reuse: share of prompt tokens found in the selected worker's cache. Load, max / mean: prompt tokens "
        "computed by the busiest worker, divided by the mean of all workers. Tokens/s: output tokens per second, from "
        "the first arrival to the last response.",
        f"Values that differ by less than {TIE:.0%} are called equal, because another seed may change them as much.",
    ]
    if any(pool.role == "prefill" for one in runs for pool in one.run.settings.pools):
        found.append(
            "Prefill workers compute prompts for decode workers. Prefix reuse then refers to the cache of the worker "
            "that computed the prompt, and load to the prefill workers. TTFT includes the KV transfer.",
        )
    if "mocker" in profiles:
        found.append(
            "Step times of profile mocker are those of Dynamo's mocker and match no hardware. Compare reuse, balance "
            "and order, but do not rely on the milliseconds.",
        )
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
