"""`forebay fit`: an engine profile from what the engines of a recording did."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TextColumn, TimeElapsedColumn

from forebay.cli.common.cluster import NAMESPACE
from forebay.cli.common.errors import complain, explained, fail
from forebay.cli.common.recording import GroupOption, Recording
from forebay.cli.common.terminal import bar
from forebay.cli.replay.verify import shown_progress
from forebay.cli.simulate.engine_runs import EngineRuns, engine_runs
from forebay.ingress.errors import Unusable
from forebay.replay.verify.verify import OnProgress
from forebay.simulate.profiles.profile import Profile, Sizes, write_linear
from forebay.transport.sqlite.log import SqliteLog

if TYPE_CHECKING:
    from forebay.simulate.profiles.fitting import Error, Fit

OF = {
    "step": "a step",
    "prefill_token": "a prompt token",
    "attended_pair": "a pair of prompt tokens",
    "decode_step": "a step that decodes",
    "decode_sequence": "a sequence that decodes",
    "context_token": "a token of its context",
    "work": "to the engine and back",
}


def fit(
    log: Annotated[Path, typer.Argument(help="A log file of `forebay up`, which may be in use, or a recording.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", dir_okay=False, help="Write the profile; on stdout when left out.")
    ] = None,
    pool: Annotated[str, typer.Option(help="The pool in question, if there are several.")] = "",
    group: GroupOption = "",
) -> None:
    """Fit an engine profile to the times that are recorded of engines.

    The profile is a file for `--engine` of `forebay simulate`. How well it fits is told on stderr and in the file.
    """
    for package in ("numpy", "scipy"):
        if find_spec(package) is None:
            fail(f"forebay fit needs the package {package}: pip install 'forebay[fit]'")
    if out is not None and out.exists() and log.exists() and out.samefile(log):
        fail(f"{out}: is the recording itself; choose another name")
    with explained():
        with shown_progress() as on_progress:
            told = asyncio.run(_read(Recording(log, None, NAMESPACE, None, group), pool, on_progress))
        found = _fitted(told)
    notes = _notes(told, found, log.name)
    profile = write_linear(_profile(told, found, log), notes)
    complain(notes)
    if out is None:
        typer.echo(profile, nl=False)
        return
    try:
        out.write_text(profile, encoding="utf-8")
    except OSError as error:
        fail(f"{out}: {error.strerror}")


async def _read(recording: Recording, pool: str, on_progress: OnProgress) -> EngineRuns:
    async with recording.opened() as (log, partition):
        if isinstance(log, SqliteLog):
            log.check()
        return await engine_runs(log, partition, pool, on_progress)


def _fitted(told: EngineRuns) -> "Fit":
    """Raises Unusable."""
    from forebay.simulate.profiles import fitting  # noqa: PLC0415 - an extra, and a second to load

    with bar(TextColumn("running the engines: {task.completed} times"), TimeElapsedColumn()) as progress:
        task = progress.add_task("", total=None)
        try:
            return fitting.fit(told.runs, lambda done: progress.update(task, completed=done))
        except fitting.FitImpossible as error:
            raise Unusable(f"{error}{_why_left_out(told)}") from None


def _why_left_out(told: EngineRuns) -> str:
    reasons = [one.left_out for run in told.runs for one in run.requests if one.left_out]
    counted = "; ".join(f"{reasons.count(reason)}: {reason}" for reason in dict.fromkeys(reasons))
    return f" (left out: {counted})" if counted else ""


def _profile(told: EngineRuns, found: "Fit", log: Path) -> Profile:
    config = told.runs[0].config
    return Profile(
        timing=found.timing,
        sizes=Sizes(
            block_size=config.block_size,
            blocks=config.kv_blocks_total,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        ),
        name=f"{told.engine}, fitted",
        source=f"fitted to {log.name}",
        work_us=found.work_us,
    )


def _notes(told: EngineRuns, found: "Fit", name: str) -> str:
    """What came of it, for people."""
    lines = [f"fitted to {found.fitted} requests of {name}, on {len(told.runs)} ranks of {told.engine}"]
    lines += [f"  {one.value:14.6g} us  +- {one.error:<10.3g}  {OF[one.name]} ({one.name})" for one in found.estimates]
    lines += [_told("TTFT", found.ttft)]
    if found.itl is not None:
        lines += [_told("ITL", found.itl)]
    lines += [f"left out: {count} requests: {reason}" for reason, count in found.left_out.items()]
    if told.lost:
        lines += [f"{told.lost} workers were lost meanwhile: what they had under way is left out"]
    if told.clocks_differ:
        lines += ["the workers' clocks are not the owner's: times are those at which the owner heard of something"]
    return "\n".join([*lines, *(f"warning: {one}" for one in found.warnings)])


def _told(name: str, error: "Error") -> str:
    recorded, modelled = (f"{times[0]:.2f} / {times[1]:.2f}" for times in (error.recorded_ms, error.modelled_ms))
    return (
        f"{name} p50 / p90 of the {error.requests} later requests, which it was not fitted to: recorded {recorded} ms, "
        f"modelled {modelled} ms; errors of single ones {error.p50:.1%} / {error.p90:.1%}"
    )
