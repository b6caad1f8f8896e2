"""`forebay record`: copy a slice of a live log or of a file into one self-contained recording."""

import asyncio
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.progress import Progress, TaskID

from forebay.cli.command import RecordCommand
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.tables import counting_bar, print_result
from forebay.cli.common.terminal import own_stdout, printable
from forebay.cli.common.times import span_us, time_us
from forebay.cli.common.unverified import DIVERGED, complaint
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.replay.verify import verification_lines
from forebay.core.routing.policies import CustomPolicies
from forebay.events.names import unknown_name
from forebay.events.topics import GROUPS, SCALING
from forebay.journal.groups import groups_of, pools_of
from forebay.processes.notices import complain
from forebay.replay.anonymize.anonymize import Anonymized, record_anonymized
from forebay.replay.policies import require_allowed
from forebay.replay.record.slice import (
    NothingDecided,
    Slice,
    Window,
    contents_of,
    copy,
    newest_us,
    scaling_of,
    slice_of,
)
from forebay.replay.scaling.reader import has_scaling
from forebay.replay.verify.verify import VerifyReport, include_scaling, verify
from forebay.transport.base import Log
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.sqlite.log import SqliteLog
from forebay.transport.sqlite.recording import Contents, Extent, utc
from forebay.transport.sqlite.recording_writer import RecordingWriter, require_free

OF_NAMESPACE = {GROUPS.name, SCALING.name}  # topics that belong to no group


def _asked(options: RecordCommand) -> dict[str, str]:
    """Return the options that select records, by name. The recording contains them."""
    group, anonymize = ",".join(options.group or ()), "yes" if options.anonymize else ""
    values = {"from": options.start, "to": options.end, "last": options.last, "group": group, "anonymize": anonymize}
    return {name: value for name, value in values.items() if value}


class RecordResult(msgspec.Struct, kw_only=True):
    """A finished recording. `left_out` groups made no decision in the window. Without a check, `verified` is empty."""

    out: Path
    contents: Contents
    left_out: list[str]
    pools: dict[str, list[str]]
    verified: dict[str, VerifyReport]


def run_record(options: RecordCommand) -> None:
    source = options.kafka.recording(options.where, "OUT")
    if options.last and (options.start or options.end):
        fail("--last cannot be combined with --from or --to")
    if options.anonymize and not options.check:
        fail("an anonymised recording is always verified; remove --no-verify")
    window = _window(options)
    with explained(), counting_bar() as progress, own_stdout():
        custom = allowed_policies(options.allow_policy)
        result = asyncio.run(_record(source, Path(options.where[-1]), options, window, progress, custom))
        _show_left_out(result, progress)
        if options.check and not options.anonymize:
            asyncio.run(_verify(result, progress, custom))
    print_result(_plain(result), options.json, lambda: _show(result))
    for report in result.verified.values():
        if not report.diverged and report.failed:
            complain(complaint(report.failed, report.unknown_event))
    if any(report.diverged or report.failed for report in result.verified.values()):
        raise click.exceptions.Exit(DIVERGED)


def _show_left_out(result: RecordResult, progress: Progress) -> None:
    for name in result.left_out:
        progress.console.print(
            f"skipped: {printable(name)} made no decision in the window", markup=False, highlight=False
        )


def _window(options: RecordCommand) -> Window:
    """Return the time window. `--last` is resolved later, because it depends on the log."""
    now_us = time.time_ns() // 1000
    if options.last:
        span_us("--last", options.last)
        return Window()
    from_us = time_us("--from", options.start, now_us) if options.start else None
    to_us = time_us("--to", options.end, now_us) if options.end else None
    if from_us is not None and to_us is not None and from_us >= to_us:
        fail(f"--from {options.start} is not before --to {options.end}")
    if from_us is not None and from_us > now_us:
        fail(f"--from {options.start} is in the future")
    return Window(from_us, to_us)


async def _record(
    source: Recording,
    out: Path,
    options: RecordCommand,
    window: Window,
    progress: Progress,
    custom: CustomPolicies,
) -> RecordResult:
    require_free(out)
    task = progress.add_task("selecting records", total=None)
    left_out: list[str] = []
    async with source.source() as log:
        slices = await _slices(source, log, options, window, left_out)
        if options.anonymize:
            contents = msgspec.structs.replace(await _contents(log, slices, _asked(options)), anonymized=True)
            contents, verified = await _anonymize(log, out, contents, progress, task, custom)
        else:
            scaling = await scaling_of(log, window) if await has_scaling(log) else None
            writer = RecordingWriter.create(out, await _contents(log, slices, _asked(options), scaling))
            contents, verified = await _copy(log, writer, progress, task), {}
        progress.remove_task(task)
    return RecordResult(
        out=out,
        contents=contents,
        left_out=left_out,
        pools=await _pools(out),
        verified=verified,
    )


async def _copy(log: Log, writer: RecordingWriter, progress: Progress, task: TaskID) -> Contents:
    progress.update(task, description="copying records", total=writer.total, completed=writer.done)

    def on_progress(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)

    try:
        await copy(log, writer, on_progress)
        return writer.finish()
    finally:
        writer.close()


async def _anonymize(
    log: Log, out: Path, contents: Contents, progress: Progress, task: TaskID, custom: CustomPolicies
) -> Anonymized:
    for group in contents.groups:
        await require_allowed(log, group.partition, custom)

    def on_step(name: str, done: int, total: int) -> None:
        progress.update(task, description=name, completed=done, total=total)

    return await record_anonymized(log, out, contents, on_step, custom=custom)


async def _slices(
    source: Recording, log: Log, options: RecordCommand, window: Window, left_out: list[str]
) -> list[Slice]:
    """Return one slice per selected group that made decisions."""
    chosen = await _select_groups(source, log, options)
    if options.last:
        newest = [at_us for at_us in [await newest_us(log, partition) for partition in chosen.values()] if at_us]
        window = Window(max(newest) - span_us("--last", options.last) + 1) if newest else window
    slices: list[Slice] = []
    for name, partition in chosen.items():
        try:
            slices.append(await slice_of(log, name, partition, window))
        except NothingDecided:
            if name in (options.group or ()) or len(chosen) == 1:
                raise
            left_out.append(name)
    if not slices:
        fail(f"no selected group made a decision in the window; choose another window (groups: {', '.join(chosen)})")
    return slices


async def _select_groups(source: Recording, log: Log, options: RecordCommand) -> dict[str, int]:
    placed = await groups_of(log)
    for name in options.group or ():
        if name not in placed:
            fail(f"{source.name}: {unknown_name('group', name, placed)}")
    chosen = {name: placed[name] for name in placed if not (options.group or ()) or name in (options.group or ())}
    if not chosen:
        fail(f"no group to record; groups in {source.name}: {', '.join(placed) or 'none'}")
    return chosen


async def _contents(
    log: SqliteLog | KafkaLog, slices: list[Slice], asked: dict[str, str], scaling: Extent | None = None
) -> Contents:
    if isinstance(log, KafkaLog):
        namespace = log.settings.namespace
        return await contents_of(log, slices, namespace=namespace, source="kafka", asked=asked, scaling=scaling)
    return await contents_of(
        log,
        slices,
        namespace=log.namespace,
        source="log" if log.recording is None else "recording",
        asked=asked,
        scaling=scaling,
        anonymized=log.recording is not None and log.recording.anonymized,
    )


async def _pools(out: Path) -> dict[str, list[str]]:
    """Return the pools of each group, read from the recording."""
    with closing(SqliteLog.open(out, readonly=True)) as log:
        groups = await groups_of(log)
        return {
            name: sorted({pool.pool for pool in await pools_of(log, partition)}) for name, partition in groups.items()
        }


async def _verify(result: RecordResult, progress: Progress, custom: CustomPolicies) -> None:
    with closing(SqliteLog.open(result.out, readonly=True)) as log:
        log.check()
        for group in result.contents.groups:
            task = progress.add_task(f"verifying {group.name}", total=group.end)

            def on_progress(done: int, total: int, _decisions: int, task: TaskID = task) -> None:
                progress.update(task, completed=done, total=total)

            await require_allowed(log, group.partition, custom)
            result.verified[group.name] = await verify(log, group.partition, on_progress, custom=custom)
            await include_scaling(log, result.verified[group.name])
            progress.remove_task(task)


def _plain(result: RecordResult) -> dict[str, Any]:
    contents = result.contents
    return {
        "out": str(result.out),
        "bytes": result.out.stat().st_size,
        "digest": contents.content,
        "source": contents.source,
        "from": utc(contents.from_us),
        "to": utc(contents.to_us),
        "anonymized": contents.anonymized,
        "groups": [{**msgspec.to_builtins(one), "pools": result.pools[one.name]} for one in contents.groups],
        "extents": contents.extents,
        "left_out": result.left_out,
        "verified": result.verified,
    }


def _show(result: RecordResult) -> None:
    contents = result.contents
    size_mb = result.out.stat().st_size / 1e6
    click.echo(f"recorded   {result.out}, {size_mb:.1f} MB, digest of all records {contents.content}")
    click.echo(f"window     {utc(contents.from_us)} to {utc(contents.to_us)}")
    if contents.anonymized:
        click.echo("anonymised prompts, texts, keys and headers removed, names and hashes masked")
    for scaling in (one for one in contents.extents if one.topic == SCALING.name):
        click.echo(f"scaling    {scaling.count} records of the planner")
    for verified in [report.scaling for report in result.verified.values() if report.scaling is not None][:1]:
        for line in verification_lines(verified):
            click.echo(printable(line))
    for group in contents.groups:
        pools = ", ".join(result.pools[group.name])
        click.echo(f"group      {group.name}: control partition {group.partition}, pools {pools}")
        held = f"  journal  {group.decisions} decisions at offsets {group.first} to {group.end - 1}"
        since = (
            f", starting at the snapshot at offset {group.start}"
            if group.start
            else ", starting at the log's beginning"
        )
        click.echo(held + since)
        of_group = [
            one for one in contents.extents if one.partition == group.partition and one.topic not in OF_NAMESPACE
        ]
        click.echo("  records  " + ", ".join(f"{one.topic} {one.count}" for one in of_group))
        report = result.verified.get(group.name)
        if report is None:
            click.echo(f"  not verified; run `forebay verify {result.out}`")
        elif report.divergence is None:
            count = f"{report.verified} of {report.decisions} decisions"
            click.echo(f"  verified {count}, digest of the final state {report.digest}")
        else:
            click.echo(f"  DIVERGENCE at journal offset {report.divergence.offset}: {report.divergence.reason}")
            click.echo(f"  recording kept for analysis; run `forebay verify {result.out}`")
