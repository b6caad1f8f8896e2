"""`forebay replay planner`: the sizes that a planner with other settings would have decided."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import typer

from forebay.cli.common import page_file
from forebay.cli.common.errors import complain, explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.terminal import printable, results
from forebay.cli.common.unverified import DIVERGED
from forebay.cli.planner.planner_file import read_planner_file
from forebay.cli.planner.source import scaling_log, shown_reading
from forebay.cli.replay.at_view import titled_table
from forebay.cli.status_view import recent_time
from forebay.core.scaling.virtual_planner import Forecast
from forebay.events.names import unknown_name
from forebay.events.scaling import PlannerSettings
from forebay.planner.predictors import PredictorUnusable, predictor
from forebay.replay.scaling.counterfactual import (
    PlannerReplay,
    Sizing,
    recorded_settings,
    replay_observations,
    replay_requests,
    with_settings,
)
from forebay.replay.scaling.journal import OnProgress
from forebay.transport.base import Log

SETTABLE = tuple(name for name in PlannerSettings.__struct_fields__ if name != "pools")
ROWS_MAX = 32
TITLE = "forebay replay planner"  # of each report


def run_planner_replay(
    *, recording: Recording, changes: list[str] | None, file: Path | None, report: Path | None, json: bool
) -> None:
    """Run `forebay replay planner`. command.py documents its options."""
    recording.require_one_source()
    if report is not None:
        page_file.require_writable("--report", report, TITLE)
    with explained():
        given = None if file is None else read_planner_file(file).settings

    async def read(on_progress: OnProgress) -> PlannerReplay:
        async with scaling_log(recording, recording.log) as log:
            known = await recorded_settings(log)
            settings = _settings(known if given is None else given, changes or ())
            if known is not None:
                return await replay_observations(log, settings, _usable, on_progress)
        async with _group(recording, settings) as (log, partition):
            return await replay_requests(log, partition, settings, _usable, on_progress)

    with explained(), shown_reading() as on_progress:
        found = asyncio.run(read(on_progress))
    if json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        _show(found)
    if report is not None:
        from forebay.cli.replay.planner_page import page  # noqa: PLC0415 - plotly is an extra

        page_file.write("--report", report, lambda: page(found))
    if found.forecasts.different:
        complain(f"{found.forecasts.different} forecasts differ from the recorded ones")
        raise typer.Exit(DIVERGED)


@asynccontextmanager
async def _group(recording: Recording, settings: PlannerSettings) -> AsyncIterator[tuple[Log, int]]:
    """Open the group of the planner's pools."""
    groups = sorted({pool.group for pool in settings.pools})
    if len(groups) > 1:
        fail(f"--planner: expected pools of one model, because the log has no planner; got {', '.join(groups)}")
    async with replace(recording, group=recording.group or groups[0]).opened() as opened:
        yield opened


def _settings(settings: PlannerSettings | None, changes: Sequence[str]) -> PlannerSettings:
    """Return the settings of the replayed planner. An invalid one ends the command."""
    if settings is None:
        fail("the log has no planner; name the pools and settings with --planner FILE")
    values: dict[str, str] = {}
    for one in changes:
        key, equals, value = one.partition("=")
        if key not in SETTABLE:
            fail(f"--set {one}: {unknown_name('setting', key, SETTABLE)}")
        if not equals:
            fail(f"--set {one}: expected KEY=VALUE")
        values[key] = value
    try:
        made = with_settings(settings, values)
        predictor(made.predictor)
    except msgspec.ValidationError as error:
        fail(f"--set: {error}")
    except PredictorUnusable as error:
        fail(f"predictor: {error}")
    if made.method == "simulate":
        fail("method simulate cannot be replayed; use --set method=throughput, load or both")
    return made


def _usable(name: str) -> Forecast | None:
    try:
        return predictor(name)
    except PredictorUnusable:
        return None


def _show(found: PlannerReplay) -> None:
    console = results(soft_wrap=True)
    console.print(titled_table("planner", ("", "GPU hours", "changes", "reversals"), [
        _row("recorded", found.recorded), _row("replayed", found.replayed)
    ], {""}, "none"))  # fmt: skip
    different = [
        (interval.at_us, pool)
        for interval in found.intervals
        for pool in interval.pools
        if pool.recorded != pool.replayed
    ]
    if different:
        rows = [
            (recent_time(at_us), pool.pool, _size(pool.recorded), _size(pool.replayed), pool.reason)
            for at_us, pool in different[:ROWS_MAX]
        ]
        columns = ("time", "pool", "recorded", "replayed", "reason")
        console.print(
            titled_table("different sizes", columns, rows, {"time", "pool", "reason"}, "none", rows_max=ROWS_MAX)
        )
    console.print(printable(
        f"{len(different):,} of {sum(len(one.pools) for one in found.intervals):,} sizes differ, from {found.source}"
    ), markup=False)  # fmt: skip
    if found.attained is not None:
        console.print(printable(
            f"recorded means met a TTFT of {found.settings.ttft_ms:g} ms and an ITL of {found.settings.itl_ms:g} ms in"
            f" {found.attained:.1%} of the intervals with requests"
        ), markup=False)  # fmt: skip
    check = found.forecasts
    console.print(printable(
        f"{check.checked - check.different:,} of {check.checked:,} forecasts computed again: equal within"
        f" {check.tolerance:g}; highest difference {check.difference_max:.2g}; {check.unavailable:,} not computed"
    ), markup=False)  # fmt: skip


def _row(name: str, sizing: Sizing) -> tuple[str, ...]:
    return name, f"{sizing.gpu_hours:.4g}", f"{sizing.changes:,}", f"{sizing.reversals:,}"


def _size(size: int | None) -> str:
    return "-" if size is None else str(size)
