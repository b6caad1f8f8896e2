"""`forebay simulate --against`: simulate a recording on its own fleet, and compare the latencies."""

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import click

from forebay.analysis.comparison import COUNTS, NAMES, TRANSFER, compared
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.tables import in_markup, print_result, results, table
from forebay.cli.common.terminal import own_stdout
from forebay.cli.common.unverified import DIVERGED, tell_unverified
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.replay.verify import shown_progress
from forebay.cli.simulate.options import AgainstOptions, FleetOptions, ShapeOptions, settings_of
from forebay.cli.simulate.simulations import Work, run_all
from forebay.core.routing.policies import CustomPolicies
from forebay.events.names import unknown_name
from forebay.processes.notices import complain
from forebay.replay.observed_history import ObservedHistory, observe_history
from forebay.runtime.errors import ConfigError
from forebay.simulate.pareto import metric_at
from forebay.transport.sqlite.log import SqliteLog

OWN = (*TRANSFER, "engine_profile", "delays", "kv_tier")  # not in a recording
MOVED = ("prefilled_remotely", "transferred_bytes")
BOUNDED = {
    "ttft": ("ttft_ms.p50", "ttft_ms.p90"),
    "itl": ("itl_ms.p50", "itl_ms.p90"),
    "e2e": ("e2e_ms.p50", "e2e_ms.p90"),
    "reuse": ("prefix_reuse",),
    "load": ("load_max_over_mean",),
}
BOUND = re.compile(r"(?P<name>\w+)=(?P<most>\d+(\.\d+)?)")
ABOVE = 1  # exit code if an error exceeds its bound


def compare_with_recording(
    options: AgainstOptions, fleet: FleetOptions, shape: ShapeOptions, others: Mapping[str, bool], *, json: bool
) -> None:
    """Simulate a recording, and print the error. Exits 1 if an error exceeds its bound.

    `others` has the names of the options that conflict with --against, and whether they were given.
    """
    assert options.against is not None
    source = Recording(log=options.against)
    with explained():
        _require_nothing_else(fleet, shape, others)
        bounds = bounds_of(options.fail_above)
        settings = settings_of(fleet)
        custom = allowed_policies(options.allow_policy)
        with own_stdout():
            history = observed_history(source, custom)
        given = {name: value for name in TRANSFER if (value := getattr(fleet, name)) is not None}
        simulate = partial(compared, history, settings, given, options.speedup, custom)
        (result,) = run_all([Work(len(history.requests), simulate)])
        if isinstance(result, Exception):
            raise result
    above = list(_above(result, bounds))
    output = {"recording": source.name, **result, "above": above}
    print_result(output, json, lambda: _show(source.name, history, result))
    for text in above:
        complain(f"--fail-above: {text}")
    tell_unverified(history.unverified)
    if above:
        raise click.exceptions.Exit(ABOVE)


def _require_nothing_else(fleet: FleetOptions, shape: ShapeOptions, others: Mapping[str, bool]) -> None:
    given = [name for name, there in others.items() if there]
    for group in (fleet, shape):
        changed = (one.name for one in fields(group) if getattr(group, one.name) != one.default)
        given += [f"--{name.replace('_', '-')}" for name in changed if name not in OWN]
    if given:
        options = " and ".join(given)
        raise ConfigError(f"{options} cannot be combined with --against: the recording determines fleet and requests")


def bounds_of(text: str | None) -> dict[str, float]:
    """Parse `--fail-above` into the maximum error per metric. Raises ConfigError if a name or a number is invalid."""
    bounds: dict[str, float] = {}
    for one in text.split(",") if text is not None else ():
        match = BOUND.fullmatch(one)
        if match is None:
            names = ", ".join(BOUNDED)
            raise ConfigError(f"--fail-above {text}: got {one!r}, expected NAME=NUMBER with NAME one of {names}")
        if match["name"] not in BOUNDED:
            raise ConfigError(f"--fail-above {text}: {unknown_name('metric', match['name'], BOUNDED)}")
        bounds[match["name"]] = float(match["most"])
    return bounds


def observed_history(source: Recording, custom: CustomPolicies) -> ObservedHistory:
    """Read the recorded history. If a decision is derived differently from the journal, the command ends."""

    async def read() -> ObservedHistory:
        async with source.opened(custom) as (log, partition):
            if isinstance(log, SqliteLog):
                log.check()
            return await observe_history(log, partition, on_progress, custom)

    with shown_progress() as on_progress:
        history = asyncio.run(read())
    if (found := history.divergence) is not None:
        where = f"{source.name}: history diverges at journal offset {found.offset}: {found.reason}"
        fail(f"{where}; `forebay verify` shows the details", DIVERGED)
    return history


def _above(result: Mapping[str, Any], bounds: Mapping[str, float]) -> Iterable[str]:
    for name, most in bounds.items():
        for path in BOUNDED[name]:
            error = result["errors"].get(path, 0.0)
            if error is None or abs(error) > most:
                unit = "points" if path == "prefix_reuse" else "%"
                size = "undefined, because the observed value is 0" if error is None else f"{error:+.2f} {unit}"
                yield f"error of {path.replace('.', ' ')} is {size}; the bound is {most:g}"


def _show(name: str, history: ObservedHistory, result: Mapping[str, Any]) -> None:
    observed, simulated = result["observed"], result["simulated"]
    console = results()
    errors = table(f"{observed['requests']:,} requests", ("", "observed", "simulated", "error"))
    for path, error in result["errors"].items():
        latency, _, of = path.partition(".")
        label = f"{NAMES[latency]} {of}, ms" if of else COUNTS.get(path, path.replace("_", " "))
        width = ",.2f" if of else ",.0f" if path in MOVED else ".4f"
        unit = "%" if of or path in COUNTS else "points"
        off = "none observed" if error is None else f"{error:+.2f} {unit}"
        values = [f"{metric_at(side, path):{width}}" for side in (observed, simulated)]
        errors.add_row(label, *values, off)
    seconds = (history.end_us - history.begin_us) / 1e6
    lines = [
        ("recording", f"{name}: {result['requests']:,} requests in {seconds:,.1f} s, {result['workers']} worker ranks")
    ]
    lines += [("left out", ", ".join(f"{count:,} {why}" for why, count in result["left_out"].items()))]
    lines += [("placement", f"{result['same_worker']:.1%} of the requests ran on the same worker in both")]
    if result["failed"]:
        lines += [("failed", f"{result['failed']:,} requests that completed in the recording; {result['failures'][0]}")]
    if (transfer := result["transfer"]) is not None:
        bandwidth = transfer["kv_transfer_bandwidth"]
        rate = f"{bandwidth:.4g} GB/s" if bandwidth else "unlimited bandwidth"
        text = f"{transfer['kv_transfer_latency_us']:,} us latency and {rate}"
        lines += [("transfers", f"{text}, {transfer['kv_bytes_per_token']:,} bytes per token")]
    console.print(errors)
    for title, text in (*lines, *(("note", note) for note in result["notes"])):
        if text:
            console.print(f"{title:<12}{in_markup(text)}")
