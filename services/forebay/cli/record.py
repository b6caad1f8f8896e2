"""`forebay record`: a slice of a live log, or of a file, into one recording that stands alone."""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from xxhash import xxh3_64_hexdigest

from forebay.cli.common.cluster import NAMESPACE, KafkaSource, NamespaceOption, PropertiesOption
from forebay.cli.common.errors import complain, explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.terminal import bar, own_stdout, printable
from forebay.cli.common.times import TIMES_HELP, span_us, time_us
from forebay.cli.common.unverified import DIVERGED, complaint
from forebay.cli.policies.recorded import require_policies
from forebay.replay.anonymize.anonymize import Anonymized, record_anonymized
from forebay.replay.record.slice import NothingDecided, Slice, Window, contents_of, copy, newest_us, slice_of
from forebay.replay.verify.verify import Report, verify
from forebay.transport.base import Log
from forebay.transport.history.groups import groups_of, pools_of
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.recording.manifest import Contents, utc
from forebay.transport.recording.writer import RecordingWriter, require_free
from forebay.transport.sqlite.log import SqliteLog


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What of a log is to be recorded, as the command says it; empty for all."""

    start: str
    end: str
    last: str
    groups: tuple[str, ...]
    pools: tuple[str, ...]
    anonymize: bool

    def asked(self, source: Recording) -> dict[str, str]:
        """All of it by option, to tell this command from another; of the source only what tells it from others."""
        place = source.name if source.log is None else str(source.log.resolve())
        options = {
            "from": self.start,
            "to": self.end,
            "last": self.last,
            "group": ",".join(self.groups),
            "pools": ",".join(self.pools),
        }
        told = {name: value for name, value in options.items() if value}
        if self.anonymize:  # it is never gone on with, and where it came from is nobody's business
            return {**told, "anonymize": "yes"}
        return {"source": f"{'kafka' if source.log is None else 'log'} {xxh3_64_hexdigest(place.encode())}", **told}


class Made(msgspec.Struct, kw_only=True):
    """A recording that was made, and what its verification found.

    `left_out` are groups that decided nothing, `seeds_kept` requests of an anonymised one that keep their tie seed.
    """

    out: Path
    contents: Contents
    left_out: list[str]
    pools: dict[str, list[str]]
    verified: dict[str, Report]
    seeds_kept: int = 0


def record(
    where: Annotated[
        list[str], typer.Argument(metavar="[LOG] OUT", help="A log file or a recording, unless --kafka; the new file.")
    ],
    kafka: KafkaSource = None,
    namespace: NamespaceOption = NAMESPACE,
    kafka_config: PropertiesOption = None,
    start: Annotated[str, typer.Option("--from", help=f"Decisions from this time on: {TIMES_HELP}.")] = "",
    end: Annotated[str, typer.Option("--to", help="Decisions before this time.")] = "",
    last: Annotated[
        str, typer.Option("--last", help="The last so long of the log, as 90s, 5m or 2h, up to its newest decision.")
    ] = "",
    group: Annotated[list[str] | None, typer.Option(help="A model; may be repeated. Without, all there are.")] = None,
    pools: Annotated[
        str, typer.Option(help="The models that have these pools, with commas. A model's pools are recorded together.")
    ] = "",
    check: Annotated[bool, typer.Option("--verify/--no-verify", help="Derive its decisions again at once.")] = True,
    anonymize: Annotated[
        bool, typer.Option("--anonymize", help="Leave out what clients wrote; every decision stays what it was.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Record a slice of a log into OUT: all it takes to derive its decisions, from the snapshot before it on.

    What ended early is gone on with by the same command; an anonymised one is begun again. Exit 1 when a decision
    cannot be derived again; the recording is kept, to find out why.
    """
    if len(where) != (1 if kafka else 2):
        fail("give LOG and OUT, or OUT and --kafka")
    if last and (start or end):
        fail("give --last, or --from and --to")
    if anonymize and not check:
        fail("an anonymised recording is always verified: leave --no-verify out")
    source = Recording(None if kafka else Path(where[0]), kafka, namespace, kafka_config, "")
    wanted = Wanted(
        start=start, end=end, last=last, groups=tuple(group or ()), pools=_names(pools), anonymize=anonymize
    )
    window = _window(wanted)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with explained(), bar(*columns) as progress, own_stdout():
        made = asyncio.run(_make(source, Path(where[-1]), wanted, window, progress))
        for name in made.left_out:
            progress.console.print(
                f"left out: {printable(name)}, which decided nothing in the window", markup=False, highlight=False
            )
        if check and not anonymize:
            asyncio.run(_verify(made, progress))
    if json:
        typer.echo(msgspec.json.encode(_plain(made)).decode())
    else:
        _show(made)
    for report in made.verified.values():
        if report.divergence is None and report.failed:
            complain(complaint(report.failed, report.unknown_event))
    if any(report.divergence is not None or report.failed for report in made.verified.values()):
        raise typer.Exit(DIVERGED)


def _names(text: str) -> tuple[str, ...]:
    return tuple(sorted({name.strip() for name in text.split(",")} - {""}))


def _window(wanted: Wanted) -> Window:
    """The window, but for `--last`, which depends on the log."""
    now_us = time.time_ns() // 1000
    if wanted.last:
        span_us("--last", wanted.last)
        return Window()
    from_us = time_us("--from", wanted.start, now_us) if wanted.start else None
    to_us = time_us("--to", wanted.end, now_us) if wanted.end else None
    if from_us is not None and to_us is not None and from_us >= to_us:
        fail(f"--from {wanted.start} is not before --to {wanted.end}")
    if from_us is not None and from_us > now_us:
        fail(f"--from {wanted.start} lies in the future")
    return Window(from_us, to_us)


async def _make(source: Recording, out: Path, wanted: Wanted, window: Window, progress: Progress) -> Made:
    require_free(out)
    task = progress.add_task("looking for what it takes", total=None)
    asked = wanted.asked(source)
    left_out: list[str] = []
    async with source.source() as log:
        if wanted.anonymize:
            slices = await _slices(source, log, wanted, window, left_out)
            contents = msgspec.structs.replace(await _contents(log, slices, asked), anonymized=True)
            written = await _anonymize(log, out, contents, progress, task)
            contents, verified, seeds_kept = written
        else:
            writer = RecordingWriter.resume(out, asked)
            if writer is None:
                slices = await _slices(source, log, wanted, window, left_out)
                writer = RecordingWriter.create(out, await _contents(log, slices, asked))
            contents, verified, seeds_kept = await _copy(log, writer, progress, task), {}, 0
        progress.remove_task(task)
    return Made(
        out=out,
        contents=contents,
        left_out=left_out,
        pools=await _pools(out),
        verified=verified,
        seeds_kept=seeds_kept,
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


async def _anonymize(log: Log, out: Path, contents: Contents, progress: Progress, task: TaskID) -> Anonymized:
    for group in contents.groups:
        await require_policies(log, group.partition)

    def on_step(name: str, done: int, total: int) -> None:
        progress.update(task, description=name, completed=done, total=total)

    return await record_anonymized(log, out, contents, on_step)


async def _slices(source: Recording, log: Log, wanted: Wanted, window: Window, left_out: list[str]) -> list[Slice]:
    """One of each group that is wanted and decided something."""
    chosen = await _chosen(source, log, wanted)
    if wanted.last:
        newest = [at_us for at_us in [await newest_us(log, partition) for partition in chosen.values()] if at_us]
        window = Window(max(newest) - span_us("--last", wanted.last) + 1) if newest else window
    slices: list[Slice] = []
    for name, partition in chosen.items():
        try:
            slices.append(await slice_of(log, name, partition, window))
        except NothingDecided:
            if name in wanted.groups or len(chosen) == 1:
                raise
            left_out.append(name)
    if not slices:
        fail(f"none of the groups decided anything in the window: {', '.join(chosen)}")
    return slices


async def _chosen(source: Recording, log: Log, wanted: Wanted) -> dict[str, int]:
    """The groups that are wanted with their control partitions."""
    placed = await groups_of(log)
    known = f"{source.name} has {', '.join(placed) or 'none'}"
    for name in wanted.groups:
        if name not in placed:
            fail(f"there is no group {name}: {known}")
    chosen = {name: placed[name] for name in placed if not wanted.groups or name in wanted.groups}
    if wanted.pools:
        pools = {name: {pool.pool for pool in await pools_of(log, placed[name])} for name in chosen}
        there = set().union(*pools.values())
        for pool in wanted.pools:
            if pool not in there:
                fail(f"there is no pool {pool}: {source.name} has {', '.join(sorted(there)) or 'none'}")
        chosen = {name: chosen[name] for name in chosen if pools[name] & set(wanted.pools)}
    if not chosen:
        fail(f"there is no group: {known}")
    return chosen


async def _contents(log: SqliteLog | KafkaLog, slices: list[Slice], asked: dict[str, str]) -> Contents:
    if isinstance(log, KafkaLog):
        return await contents_of(log, slices, namespace=log.settings.namespace, source="kafka", asked=asked)
    return await contents_of(
        log,
        slices,
        namespace=log.namespace,
        source="log" if log.recording is None else "recording",
        asked=asked,
        anonymized=log.recording is not None and log.recording.anonymized,
    )


async def _pools(out: Path) -> dict[str, list[str]]:
    """The pools of each group, from the recording itself."""
    log = SqliteLog.open(out, readonly=True)
    try:
        groups = await groups_of(log)
        return {
            name: sorted({pool.pool for pool in await pools_of(log, partition)}) for name, partition in groups.items()
        }
    finally:
        log.close()


async def _verify(made: Made, progress: Progress) -> None:
    log = SqliteLog.open(made.out, readonly=True)
    try:
        log.check()
        for group in made.contents.groups:
            task = progress.add_task(f"verifying {group.name}", total=group.end)

            def on_progress(done: int, total: int, _decisions: int, task: TaskID = task) -> None:
                progress.update(task, completed=done, total=total)

            await require_policies(log, group.partition)
            made.verified[group.name] = await verify(log, group.partition, on_progress)
            progress.remove_task(task)
    finally:
        log.close()


def _plain(made: Made) -> dict[str, Any]:
    contents = made.contents
    return {
        "out": str(made.out),
        "bytes": made.out.stat().st_size,
        "digest": contents.content,
        "source": contents.source,
        "from": utc(contents.from_us),
        "to": utc(contents.to_us),
        "anonymized": contents.anonymized,
        "seeds_kept": made.seeds_kept,
        "groups": [{**msgspec.to_builtins(one), "pools": made.pools[one.name]} for one in contents.groups],
        "extents": contents.extents,
        "left_out": made.left_out,
        "verified": made.verified,
    }


def _show(made: Made) -> None:
    contents = made.contents
    typer.echo(f"recorded   {made.out}, {made.out.stat().st_size / 1e6:.1f} MB, digest {contents.content}")
    typer.echo(f"window     {utc(contents.from_us)} to {utc(contents.to_us)}")
    if contents.anonymized:
        kept = f"; {made.seeds_kept} requests keep their tie seed, a hash of their id" if made.seeds_kept else ""
        typer.echo(f"anonymous  prompts, texts, keys and headers are left out, names and hashes masked{kept}")
    for group in contents.groups:
        pools = ", ".join(made.pools[group.name])
        typer.echo(f"group      {group.name}: control partition {group.partition}, pools recorded together: {pools}")
        held = f"  journal  {group.decisions} decisions at offsets {group.first} to {group.end - 1}"
        since = f", from the snapshot at {group.start} on" if group.start else ", from the log's beginning on"
        typer.echo(held + since)
        of_group = [one for one in contents.extents if one.partition == group.partition and one.topic != "groups"]
        typer.echo("  records  " + ", ".join(f"{one.topic} {one.count}" for one in of_group))
        report = made.verified.get(group.name)
        if report is None:
            typer.echo(f"  not verified; `forebay replay verify {made.out}` does it")
        elif report.divergence is None:
            typer.echo(f"  verified {report.verified} of {report.decisions} decisions, digest {report.digest}")
        else:
            typer.echo(f"  DIVERGENCE at journal offset {report.divergence.offset}: {report.divergence.reason}")
            typer.echo(f"  kept, to find out why; `forebay replay verify {made.out}` says more")
