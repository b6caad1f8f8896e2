"""`forebay replay export`: write every topic of a recording as newline-delimited JSON, for DuckDB and other tools."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.progress import Progress

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.terminal import counting_bar
from forebay.cli.replay.columns import view_of
from forebay.cli.replay.command import ExportCommand
from forebay.events.codec import DecodeError, decode
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import DECISIONS, INPUTS, Topic, topic_named
from forebay.replay.recorded import applied
from forebay.transport.base import Record
from forebay.transport.history.reader import Validity
from forebay.transport.history.start import oldest_state
from forebay.transport.readable import plain
from forebay.transport.sqlite.log import SqliteLog

VIEWS = "views.sql"
PAGE_RECORDS = 500
INPUT_NAMES = frozenset(topic.name for topic in INPUTS)


class ExportedTopic(msgspec.Struct, kw_only=True):
    """Number of records of one exported topic, and how many of them could not be decoded."""

    records: int = 0
    undecodable: int = 0


def run_export(options: ExportCommand) -> None:
    with explained():
        recording = SqliteLog.open(options.log, readonly=True)
        try:
            _require_empty(options.folder)
            with counting_bar() as progress:
                exported = asyncio.run(_export(recording, options.folder, progress, token_ids=options.token_ids))
        except OSError as error:
            fail(f"cannot write to {options.folder}: {error.strerror}; choose another directory")
        finally:
            recording.close()
    for name, done in exported.items():
        undecodable = f", {done.undecodable} of them undecodable" if done.undecodable else ""
        click.echo(f"{options.folder / name}.ndjson  {done.records} records{undecodable}")
    click.echo(f"{options.folder / VIEWS}")


def _require_empty(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        fail(f"{folder} is a file; choose another directory")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        fail(f"{folder} is not empty; choose another directory")


async def _export(log: SqliteLog, folder: Path, progress: Progress, *, token_ids: bool) -> dict[str, ExportedTopic]:
    partitions: dict[str, list[int]] = {topic.name: [] for topic in (*INPUTS, DECISIONS)}  # exported even if empty
    for name, partition, _ in log.topics():
        partitions.setdefault(name, []).append(partition)
    exported = {}
    for name, numbers in partitions.items():
        total = sum([await log.end(name, number) - await log.begin(name, number) for number in numbers])
        task = progress.add_task(name, total=total)
        done = exported[name] = ExportedTopic()
        part = folder / f"{name}.ndjson.part"
        with part.open("wb") as file:
            for number in numbers:
                async for line, decoded in _lines(log, name, number, token_ids=token_ids):
                    file.write(msgspec.json.encode(line) + b"\n")
                    done.records += 1
                    done.undecodable += not decoded
                    if done.records % PAGE_RECORDS == 0:
                        progress.update(task, completed=done.records)
        part.rename(folder / f"{name}.ndjson")
    (folder / VIEWS).write_text("".join(view_of(name, _topic(name), token_ids=token_ids) for name in exported))
    return exported


async def _lines(
    log: SqliteLog, name: str, partition: int, *, token_ids: bool
) -> AsyncIterator[tuple[dict[str, Any], bool]]:
    """Yield each record as a flat object, and whether it decoded."""
    topic = _topic(name)
    orders = applied(log, partition, name) if name in INPUT_NAMES else None
    when = None if orders is None else await anext(orders, None)
    start = await oldest_state(log, partition) if name == DECISIONS.name else None
    validity = None if start is None else Validity.after(start, start.core_version)
    offset = await log.begin(name, partition)
    while records := await log.read(name, partition, offset, PAGE_RECORDS):
        for record in records:
            line = _place(record)
            if orders is not None:
                known = when if when is not None and when.offset == record.offset else None
                line |= {"applied_us": known and known.now_us, "applied_by": known and known.journal_offset}
                when = when if known is None else await anext(orders, None)
            is_before = (
                start is not None and record.offset < start.offset
            )  # which of these are stale is no longer known
            decoded = _add_event(line, topic, record, None if is_before else validity, token_ids=token_ids)
            yield line, decoded
        offset = records[-1].offset + 1


def _place(record: Record) -> dict[str, Any]:
    line: dict[str, Any] = {
        "log_offset": record.offset,
        "log_partition": record.partition,
        "log_at_us": record.at_us,
    }
    if record.key is not None:
        line["log_key"] = record.key.decode(errors="backslashreplace")
    if record.headers:
        line["log_headers"] = dict(record.headers)
    return line


def _add_event(
    line: dict[str, Any], topic: Topic | None, record: Record, validity: Validity | None, *, token_ids: bool
) -> bool:
    """Add the event's fields to a line. A record that does not decode is kept as it is, with the error."""
    if topic is None or topic.events is None:
        line["value"] = record.value.decode(errors="backslashreplace")
        return True
    try:
        event = decode(topic, record.value)
    except DecodeError as error:
        event, line["undecodable"], line["value"] = None, str(error), base64.b64encode(record.value).decode()
    if validity is not None:
        line["void"] = validity.read(record) is None and event is not None
    if event is None:
        return False
    if isinstance(event, RequestSubmitted):
        line["prompt_tokens"] = event.prompt_tokens
    line |= plain(event, token_ids=token_ids)
    return True


def _topic(name: str) -> Topic | None:
    """Return the topic, or None if this version does not know it. Its records are then exported undecoded."""
    try:
        return topic_named(name)
    except KeyError:
        return None
