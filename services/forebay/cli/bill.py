"""`forebay bill`: print what tenants have used, and verify the ledger."""

import asyncio
import csv
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import click
import msgspec

from forebay.cli.command import BillShowCommand, BillVerifyCommand
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Source
from forebay.cli.common.tables import in_markup, print_result, print_table, results
from forebay.cli.common.unverified import DIVERGED
from forebay.events.topics import USAGE
from forebay.events.usage import UsageEntry
from forebay.journal.groups import partitions_of
from forebay.journal.ledger import Chain, LedgerReport, verify_chain
from forebay.journal.usage import SUMS, derive
from forebay.processes.notices import complain
from forebay.runtime.files import read_file
from forebay.transport.base import Log
from forebay.transport.kafka.topics import count_topics
from forebay.transport.sqlite.log import SqliteLog

Anchors = Annotated[list[LedgerReport], msgspec.Meta(min_length=1)]


def run_show(options: BillShowCommand) -> None:
    options.source.require_one_source()
    begin_us, end_us = _month_us(options.month or datetime.now(UTC).strftime("%Y-%m"))
    with explained():
        entries = asyncio.run(_entries(options.source))
    sums: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for one in entries:
        if begin_us <= one.hour_us < end_us and options.tenant in (None, one.tenant):
            sums[one.tenant, one.key_id, one.model].update({name: getattr(one, name) for name in SUMS})
    columns = ("tenant", "key", "model", *(name.replace("_us", "_s") for name in SUMS))
    rows = [
        (*key, *(f"{found[name] / 1e6:.6f}" if name.endswith("_us") else str(found[name]) for name in SUMS))
        for key, found in sorted(sums.items())
    ]
    if options.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows([columns, *rows])
    elif rows:
        print_table(columns, rows)
    else:
        click.echo("no usage")


def run_verify(options: BillVerifyCommand) -> None:
    options.source.require_one_source()
    with explained():
        anchors = {} if options.anchor is None else _anchors(options.anchor)
        reports = asyncio.run(_verify(options.source, anchors))
    reports = [report for report in reports if report.records or report.differences]
    if not reports:
        fail(f"nothing to verify: {options.source.name} has no ledger")
    print_result(reports, options.json, lambda: _show(reports))
    differences = [text for report in reports for text in report.differences]
    if differences:
        others = f"; {len(differences) - 1} other differences" if len(differences) > 1 else ""
        fail(f"the ledger differs: {differences[0]}{others}", DIVERGED)


def _month_us(text: str) -> tuple[int, int]:
    """Return the begin and the end of a month in UTC, in microseconds. Text of another form ends the command."""
    try:
        begin = datetime.strptime(text, "%Y-%m").replace(tzinfo=UTC)
        end = (begin + timedelta(days=31)).replace(day=1)
    except (ValueError, OverflowError):
        fail(f"--month {text}: expected YYYY-MM, for example 2026-12")
    return round(begin.timestamp()) * 1_000_000, round(end.timestamp()) * 1_000_000


def _anchors(path: Path) -> dict[int, LedgerReport]:
    """Return the reports in a file by control partition. Raises ConfigError if it cannot be read."""
    try:
        reports = msgspec.json.decode(read_file(path, "anchor"), type=Anchors)
    except msgspec.MsgspecError as error:
        fail(f"--anchor {path}: expected the output of `forebay bill verify --json`: {error}")
    return {report.partition: report for report in reports}


async def _partitions(source: Source, log: Log) -> Sequence[int]:
    """Return the control partitions. Raises KafkaUnusable for missing topics."""
    if isinstance(log, SqliteLog):
        return sorted(await partitions_of(log))
    return range((await count_topics(source.settings())).groups)


async def _entries(source: Source) -> list[UsageEntry]:
    found: list[UsageEntry] = []
    async with source.source() as log:
        for partition in await _partitions(source, log):
            chain = Chain(log, partition)
            records = await chain.read()
            if chain.faults:
                complain(f"the ledger is damaged, run `forebay bill verify`: {chain.faults[0]}")
            if not records and await log.end(USAGE.name, partition) == 0:
                found += await derive(log, partition)
            found += [entry for record in records for entry in record.entries]
    return found


async def _verify(source: Source, anchors: dict[int, LedgerReport]) -> list[LedgerReport]:
    async with source.source() as log:
        partitions = sorted({*await _partitions(source, log), *anchors})
        return [await verify_chain(log, partition, anchors.get(partition)) for partition in partitions]


def _show(reports: Sequence[LedgerReport]) -> None:
    console = results(soft_wrap=True)
    for report in reports:
        console.print(
            f"partition {report.partition}: {report.records} records, {report.derived} derived again,"
            f" the journal up to offset {report.until_offset}"
        )
        for text in report.differences:
            console.print(f"  differs: {in_markup(text)}")
