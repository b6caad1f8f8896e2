"""`forebay dead-letters`: list, show and retry records that did not decode or were rejected."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

import click
import msgspec

from forebay.cli.command import DeadLettersListCommand, DeadLettersRetryCommand
from forebay.cli.common.errors import BROKEN, explained, fail
from forebay.cli.common.recording import Source
from forebay.cli.common.tables import print_table
from forebay.cli.common.terminal import printable
from forebay.cli.common.times import time_us
from forebay.events.names import unknown_name
from forebay.events.topics import DEAD_LETTERS, FIXED_TOPICS, topic_named
from forebay.journal.groups import groups_of
from forebay.transport.base import Log, Record
from forebay.transport.dead_letters import Letter, NotRetriable, append_retry, letters, original, read_letter, retry_of
from forebay.transport.kafka.topics import partitions_of
from forebay.transport.readable import readable
from forebay.transport.sqlite.log import SqliteLog
from forebay.transport.sqlite.recording import utc

PLACE = re.compile(r"(?:(\d{1,9})/)?(\d{1,18})")
REASON_CHARS = 80  # in the table; `--letter` prints the whole reason
RECORD_CHARS = 4_000  # of a record that `--letter` prints without --json; a record may have 8 MiB


def run_list(options: DeadLettersListCommand) -> None:
    if options.letter:
        _show_one(options)
        return
    now_us = time.time_ns() // 1000
    from_us = time_us("--from", options.start, now_us) if options.start else 0
    to_us = time_us("--to", options.end, now_us) if options.end else now_us + 1
    if options.topic:
        _require_topic(options.topic)

    def keep(letter: Letter) -> bool:
        return options.topic in ("", letter.topic) and from_us <= letter.at_us < to_us

    options.source.require_one_source()
    with explained():
        found = asyncio.run(_list(options.source, keep, options.limit))
    for letter in found if options.json else ():
        click.echo(msgspec.json.encode(letter))
    if not options.json:
        _print_table(found, options.limit)


def _show_one(options: DeadLettersListCommand) -> None:
    if options.topic or options.start or options.end:
        fail("--letter shows one letter; omit --topic, --from and --to")
    place = _place("--letter", options.letter)
    options.source.require_one_source()
    with explained():
        found, record, verdict = asyncio.run(_show(options.source, *place))
    _print_letter(found, record, verdict, json=options.json)


def _print_letter(letter: Letter, record: Record, verdict: str, *, json: bool) -> None:
    content = readable(original(letter, record))
    del content["offset"], content["at_us"]  # the offset is printed, and the letter lacks the time of its record
    if json:
        click.echo(msgspec.json.encode({**msgspec.to_builtins(letter), "retry": verdict, "record": content}))
        return
    lines = {
        "letter": f"{letter.partition}/{letter.offset}, {utc(letter.at_us)}",
        "record": f"{letter.topic}/{letter.source_partition} at offset {letter.source_offset},"
        f" {letter.value_bytes} bytes",
        "reason": letter.reason,
        **({"omitted": letter.omitted} if letter.omitted else {}),
        "retry": verdict,
    }
    for name, text in lines.items():
        click.echo(printable(f"{name:<8} {text}"))
    text = msgspec.json.format(msgspec.json.encode(content), indent=2).decode()
    for line in text[:RECORD_CHARS].split("\n"):
        click.echo(printable(line))
    if len(text) > RECORD_CHARS:
        click.echo(f"… ({len(text) - RECORD_CHARS} more characters; --json prints all of them)")


def run_retry(options: DeadLettersRetryCommand) -> None:
    source = options.source.recording(options.where, "LETTER")
    place = _place("LETTER", options.where[-1])
    with explained():
        try:
            letter, tag, retried_as, note = asyncio.run(_retry(source, *place))
        except NotRetriable as error:
            fail(f"letter {place[0]}/{place[1]} was not retried: {error}", BROKEN)
    if options.json:
        line = {"letter": f"{letter.partition}/{letter.offset}", "event": tag, "retried_as": retried_as, "note": note}
        click.echo(msgspec.json.encode(line))
        return
    click.echo(f"letter {letter.partition}/{letter.offset} decodes as {tag}; appended as {retried_as} ({note})")


def _require_topic(name: str) -> None:
    try:
        topic_named(name)
    except KeyError:
        fail(f"--topic: {unknown_name('topic', name, [*(topic.name for topic in FIXED_TOPICS), 'work.POOL'])}")


def _place(name: str, text: str) -> tuple[int, int]:
    """Return the partition and the offset of a letter. Text of another form ends the command."""
    found = PLACE.fullmatch(text)
    if found is None:
        fail(f"{name} {text}: expected PARTITION/OFFSET, for example 0/12")
    return int(found[1] or 0), int(found[2])


async def _list(source: Source, keep: Any, limit: int) -> list[Letter]:
    found: list[Letter] = []
    async with source.source() as log:
        for partition in await _partitions(source, log):
            count = 0
            async for letter in letters(log, partition, keep):
                found.append(letter)
                count += 1
                if count == limit:
                    break
    return sorted(found, key=lambda one: (-one.at_us, one.partition, -one.offset))[:limit]


async def _show(source: Source, partition: int, offset: int) -> tuple[Letter, Record, str]:
    async with source.source() as log:
        await _require_partition(source, log, partition)
        letter, record = await read_letter(log, partition, offset)
        try:
            note = retry_of(letter, record, await _group_in(log, letter), time.time_ns() // 1000).note
        except NotRetriable as error:
            return letter, record, f"no: {error}"
    return letter, record, f"possible: {note}"


async def _retry(source: Source, partition: int, offset: int) -> tuple[Letter, str, str, str]:
    async with _writable(source) as log:
        await _require_partition(source, log, partition)
        letter, record = await read_letter(log, partition, offset)
        retry = retry_of(letter, record, await _group_in(log, letter), time.time_ns() // 1000)
        tag = str(type(retry.event).__struct_config__.tag)
        return letter, tag, await append_retry(log, letter, retry), retry.note


@asynccontextmanager
async def _writable(source: Source) -> AsyncIterator[Log]:
    if source.log is None:
        async with source.source() as log:
            yield log
        return
    with closing(SqliteLog.open(source.log, readonly=True)) as reader:  # a missing file must not be created
        namespace = reader.namespace
    with closing(SqliteLog.open(source.log, namespace=namespace)) as log:
        yield log


async def _group_in(log: Log, letter: Letter) -> str | None:
    groups = await groups_of(log)
    return next((name for name, partition in groups.items() if partition == letter.source_partition), None)


async def _partitions(source: Source, log: Log) -> Sequence[int]:
    if isinstance(log, SqliteLog):
        return [partition for topic, partition, _ in log.topics() if topic == DEAD_LETTERS.name]
    return range((await partitions_of(source.settings())).get(DEAD_LETTERS.name, 0))


async def _require_partition(source: Source, log: Log, partition: int) -> None:
    """End the command if Kafka has no such partition, because its client would retry forever."""
    if not isinstance(log, SqliteLog) and partition not in (known := await _partitions(source, log)):
        fail(f"{DEAD_LETTERS.name} has {len(known)} partitions, counted from 0; got {partition}")


def _print_table(found: list[Letter], limit: int) -> None:
    if not found:
        click.echo("no dead letters")
        return
    rows = []
    for one in found:
        reason = one.reason if len(one.reason) <= REASON_CHARS else f"{one.reason[: REASON_CHARS - 1]}…"
        place = f"{one.topic}/{one.source_partition}/{one.source_offset}"
        number = f"{one.partition}/{one.offset}"
        rows.append((number, utc(one.at_us), place, str(one.value_bytes), one.retried_as, reason))
    print_table(("letter", "time", "record", "bytes", "retried as", "reason"), rows)
    if len(found) == limit:
        click.echo(f"only the newest {limit} letters are shown; --limit shows more")
