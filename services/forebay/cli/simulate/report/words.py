"""What a report says in words: the result in one sentence, the figures of each run beside each other."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from forebay.cli.simulate.options import in_full
from forebay.cli.simulate.report.measures import Measured
from forebay.simulate.slo import Slo, goodput

TIE = 0.01  # figures that differ by less are level: other seeds move them as far
NAMED = 3  # of runs that are level, by name

Figure = Callable[[Measured], float]


class Line(msgspec.Struct, frozen=True):
    """A figure on a card: `share` is of the largest of all runs, for a bar; the best are marked."""

    name: str
    value: str
    share: float
    best: bool


class Card(msgspec.Struct, frozen=True):
    """A run: what stands out, and its figures. `failed` says how many have no answer, and why the first has none."""

    label: str
    colour: str
    lead: str
    lead_name: str
    lines: list[Line]
    failed: str


def duration(ms: float) -> str:
    """Three digits and a unit."""
    if ms < 0.9995:
        return "0 ms" if ms == 0 else f"{ms * 1e3:.3g} µs"
    if ms < 999.5:
        return f"{ms:.3g} ms"
    if ms < 600_000:
        return f"{ms / 1e3:.3g} s"
    return f"{ms / 6e4:.3g} min" if ms < 7_200_000 else f"{ms / 3.6e6:,.1f} h"


def slo_text(slo: Slo) -> str:
    """The objectives in one phrase."""
    limits = (("TTFT", slo.ttft_ms), ("ITL", slo.itl_ms), ("E2E", slo.e2e_ms))
    return ", ".join(f"{name} ≤ {duration(limit)}" for name, limit in limits if limit is not None)


def headline(runs: Sequence[Measured], slo: Slo | None) -> str:
    """The result in one sentence, which claims no difference that there is not."""
    answered = [one for one in runs if one.ttft_ms]
    if not answered:
        return "No request was answered." if any(one.requests for one in runs) else "There was no request."
    if len(answered) < len(runs):
        silent = _names([one for one in runs if not one.ttft_ms])
        return f"Under {silent} no request was answered; of the others: {_of_answered(answered, slo)}"
    return _of_answered(runs, slo)


def findings(runs: Sequence[Measured]) -> list[str]:
    """What else a reader must know before comparing times."""
    found = []
    failed = [one for one in runs if one.failed]
    if failed:
        counts = ", ".join(f"{one.failed:,} of {one.requests:,} under {one.label}" for one in failed)
        found.append(f"Without an answer: {counts}. Times are of answered requests; shares are of all.")
    answered = [one for one in runs if one.ttft_ms]
    paced = [one for one in answered if one.itl_ms]
    if len(paced) > 1:
        soonest = min(paced, key=_ttft("mean"))
        least, level, _ = _ranked(paced, _itl_p99)
        if soonest not in level:
            times = (
                f"{duration(_itl_p99(least))} under {least.label}, {duration(_itl_p99(soonest))} under {soonest.label}"
            )
            found.append(f"Later tokens come sooner elsewhere: ITL p99 is {times}.")
    if len(answered) > 1:
        most = max(answered, key=_reuse)
        rest = [_reuse(one) for one in answered if one is not most]
        others = (
            f"{min(rest):.1%}" if f"{min(rest):.1%}" == f"{max(rest):.1%}" else f"{min(rest):.1%} to {max(rest):.1%}"
        )
        found.append(f"Prompt tokens found in a cache: {_reuse(most):.1%} under {most.label}, {others} otherwise.")
    return found


def cards(runs: Sequence[Measured], slo: Slo | None) -> list[Card]:
    """One for each run."""
    kept = [goodput(one.run.outcome, slo) if slo else {} for one in runs]
    figures: list[tuple[str, list[float | None], Callable[[float], str], bool]] = []

    def add(name: str, of: Callable[[Measured], float | None], told: Callable[[float], str], *, low: bool) -> None:
        figures.append((name, [of(one) for one in runs], told, low))

    for name, times in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms")):
        for point in ("p50", "p99"):
            add(f"{name} {point}", partial(_percentile, times, point), duration, low=True)
    add("reuse", lambda one: _reuse(one) if one.ttft_ms else None, "{:.1%}".format, low=False)
    add("busiest / mean", lambda one: one.run.summary["load_max_over_mean"] or None, "{:.3f}".format, low=True)
    add("tokens/s", _tokens_per_s, "{:,.0f}".format, low=False)
    add("GPU hours", lambda one: one.run.outcome.gpu_s / 3_600 or None, "{:,.3g}".format, low=True)
    if slo:
        figures.insert(0, ("SLO attained", [one["attained"] for one in kept], "{:.1%}".format, False))
        figures.insert(1, ("goodput, req/s", [one["goodput_per_s"] for one in kept], "{:,.3g}".format, False))
    lines = [_lines(*figure) for figure in figures]
    return [
        Card(
            label=one.label,
            colour=one.colour,
            lead=duration(one.run.summary["ttft_ms"]["mean"]) if one.ttft_ms else "no answer",
            lead_name="mean time to first token",
            lines=[line for of_all in lines if (line := of_all[at]) is not None],
            failed=_failed(one),
        )
        for at, one in enumerate(runs)
    ]


def table(runs: Sequence[Measured]) -> list[list[str]]:
    """Every percentile that JSON has, a row for each time of each run."""
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
            f"{one.label}: half of the first tokens within {duration(_ttft('p50')(one))}, 99 of 100 within "
            f"{duration(_ttft('p99')(one))}; {_reuse(one):.1%} of the prompt tokens were found in a cache."
        )
    if slo is not None:
        return _by_slo(runs, slo)
    mean, far = _ttft("mean"), _ttft("p99")
    best, level, rest = _ranked(runs, mean)
    if not rest:
        text = f"{_names(level)} are level: mean TTFT {_span(level, mean)}, less than {TIE:.0%} apart"
    else:
        verb = "gives" if len(level) == 1 else "are level and give"
        less = 1 - mean(best) / mean(rest[0])
        time = duration(mean(best)) if len(level) == 1 else _span(level, mean)
        text = f"{_names(level)} {verb} first tokens soonest: {time} on average, {less:.1%} less than {rest[0].label}"
    least, at_p99, _ = _ranked(runs, far)
    if best not in at_p99:
        text += f"; at p99 it is {least.label}: {duration(far(least))} against {duration(far(best))}"
    return text + "."


def _by_slo(runs: Sequence[Measured], slo: Slo) -> str:
    found = {one.label: goodput(one.run.outcome, slo) for one in runs}
    kept = {label: one["attained"] for label, one in found.items()}
    order = sorted(runs, key=lambda one: -kept[one.label])
    most = kept[order[0].label]
    level = [one for one in order if kept[one.label] * (1 + TIE) >= most]
    rest = order[len(level) :]
    told = f"{_names(level)} {'keeps' if len(level) == 1 else 'keep'} {slo_text(slo)} for"
    least, highest = f"{kept[level[-1].label]:.1%}", f"{most:.1%}"
    share = highest if least == highest else f"{least} to {highest}"
    others = f", {rest[0].label} for {kept[rest[0].label]:.1%}" if rest else ": they are level"
    few = "" if most > 0.5 else _missed(order[0].label, found[order[0].label]["attained_each"])
    return f"{told} {share} of all requests{others}.{few}"


def _missed(label: str, each: Mapping[str, float]) -> str:
    """That nobody keeps the objectives for most requests, and which of them is why; `each` is of the best run."""
    if len(each) == 1:
        return " None keeps it for most."
    part = min(each, key=lambda name: each[name])
    return f" None keeps all of it for most; missed most is {part.upper()}, kept for {each[part]:.1%} under {label}."


def _ranked(runs: Sequence[Measured], figure: Figure) -> tuple[Measured, list[Measured], list[Measured]]:
    """The lowest, all that are level with it, and the others in order."""
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


def _lines(name: str, values: Sequence[float | None], told: Callable[[float], str], low: bool) -> list[Line | None]:
    """Nobody is the best where all are level."""
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
        found.append(Line(name, told(value), round(share, 4), best=differ and level))
    return found


def _failed(one: Measured) -> str:
    if not one.failed:
        return ""
    place = min(one.run.outcome.requests.failures)
    return (
        f"{one.failed:,} of {one.requests:,} without an answer; the first: {one.run.outcome.requests.failures[place]}"
    )


def notes(runs: Sequence[Measured]) -> list[str]:
    """What the figures are, for whoever reads nothing else."""
    profiles = sorted({group.profile for one in runs for pool in one.run.settings.pools for group in pool.groups})
    found = [
        "TTFT: from the arrival of a request to its first token. ITL: the mean time between the tokens of its answer. "
        "E2E: from arrival to the last token.",
        "Reuse: prompt tokens found in the chosen worker's cache, of all prompt tokens. Busiest / mean: prompt tokens "
        "that the busiest worker computed, over the mean of all. Tokens/s: output tokens, from first arrival to last "
        "answer.",
        f"Figures less than {TIE:.0%} apart are called level: another seed may move them as far.",
    ]
    if any(pool.role == "prefill" for one in runs for pool in one.run.settings.pools):
        found.append(
            "Prefill workers compute prompts for others. Reuse is of the cache of whoever computed a prompt, busiest / "
            "mean is of prefill workers alone, and the transfer of the KV is a part of TTFT."
        )
    if "mocker" in profiles:
        found.append(
            "Engines of profile mocker take the times of Dynamo's mocker, which are no hardware's: compare reuse, "
            "balance and order, and take milliseconds for no promise."
        )
    return found


def settings_shown(runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """Everything that was set, by run; of equal fleets only the first is told."""
    found: list[dict[str, Any]] = []
    fleets: dict[bytes, str] = {}
    for one in runs:
        fleet = msgspec.json.encode(one.run.settings)
        told: Any = f"as under {fleets[fleet]}" if fleet in fleets else in_full(one.run.settings)
        fleets.setdefault(fleet, one.label)
        found.append({"run": one.label, "router": in_full(one.run.router), "fleet": told})
    return found
