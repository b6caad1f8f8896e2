"""`forebay bill`: print what tenants have used, and verify the ledger."""

import asyncio
import csv
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from forebay.cli.command import BillHeadCommand, BillShowCommand, BillVerifyCommand
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Source
from forebay.cli.common.tables import in_markup, print_result, print_table, results
from forebay.cli.common.unverified import DIVERGED
from forebay.events.topics import USAGE
from forebay.events.usage import UsageEntry
from forebay.journal.groups import partitions_of
from forebay.journal.ledger import Chain, Head, LedgerReport, verify_chain
from forebay.journal.usage import Totals, derive
from forebay.processes.notices import complain
from forebay.runtime.files import read_file
from forebay.transport.base import Log
from forebay.transport.kafka import topics
from forebay.transport.sqlite.log import SqliteLog

MONTH = re.compile(r"(\d{4})-(0[1-9]|1[0-2])")
COLUMNS = (
    "tenant", "key", "model", "requests", "incomplete", "prompt_tokens", "cached_tokens", "output_tokens", "queue_s",
    "prefill_s", "decode_s",
)  # fmt: skip

Row = tuple[str, ...]


def run_show(options: BillShowCommand) -> None:
    options.source.require_one_source()
    begin_us, end_us = _month_us(options.month or datetime.now(UTC).strftime("%Y-%m"))
    with explained():
        entries = asyncio.run(_entries(options.source))
    rows = _rows(
        one
        for one in entries
        if begin_us <= one.hour_us < end_us and (options.tenant is None or one.tenant == options.tenant)
    )
    if options.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([COLUMNS, *rows])
    elif rows:
        print_table(COLUMNS, rows)
    else:
        click.echo("no usage")


def run_verify(options: BillVerifyCommand) -> None:
    options.source.require_one_source()
    with explained():
        anchors = {} if options.anchor is None else _anchors(options.anchor)
        reports = asyncio.run(_verify(options.source, anchors))
    if not any(report.head or report.differences for report in reports):
        fail(f"nothing to verify: {options.source.name} has no ledger")
    print_result(reports, options.json, lambda: _show(reports))
    differences = [text for report in reports for text in report.differences]
    if differences:
        others = f"; {len(differences) - 1} other differences" if len(differences) > 1 else ""
        fail(f"the ledger differs: {differences[0]}{others}", DIVERGED)


def run_head(options: BillHeadCommand) -> None:
    options.source.require_one_source()
    with explained():
        heads = asyncio.run(_heads(options.source))
    for head in heads:
        click.echo(msgspec.json.encode(head))


def _month_us(text: str) -> tuple[int, int]:
    """Return the begin and the end of a month in UTC, in microseconds. Text of another form ends the command."""
    found = MONTH.fullmatch(text)
    if found is None or found[1] == "0000" or text == "9999-12":
        fail(f"--month {text}: expected YYYY-MM, for example 2026-12")
    year, month = int(found[1]), int(found[2])
    ends = [(year, month), (year + month // 12, month % 12 + 1)]
    begin, end = (round(datetime(*one, 1, tzinfo=UTC).timestamp()) * 1_000_000 for one in ends)
    return begin, end


def _rows(entries: Iterable[UsageEntry]) -> list[Row]:
    sums: dict[tuple[str, str, str], Totals] = {}
    for one in entries:
        sums.setdefault((one.tenant, one.key_id, one.model), Totals()).add(one)
    return [(*key, *_cells(sums[key])) for key in sorted(sums)]


def _cells(totals: Totals) -> Row:
    counts = totals.requests, totals.incomplete, totals.prompt_tokens, totals.cached_tokens, totals.output_tokens
    times = totals.queue_us, totals.prefill_us, totals.decode_us
    return *map(str, counts), *(f"{us / 1e6:.6f}" for us in times)


def _anchors(path: Path) -> dict[int, Head]:
    """Return the heads in a file of `forebay bill head`, by control partition. Raises ConfigError."""
    try:
        lines = read_file(path, "anchor").splitlines()
        heads = [msgspec.json.decode(line, type=Head) for line in lines if line.strip()]
    except msgspec.MsgspecError as error:
        fail(f"--anchor {path}: expected the output of `forebay bill head`: {error}")
    if not heads:
        fail(f"--anchor {path}: has no record; expected the output of `forebay bill head`")
    return {head.partition: head for head in heads}


async def _partitions(source: Source, log: Log) -> Sequence[int]:
    """Return the control partitions. A namespace without the topic ends the command."""
    if isinstance(log, SqliteLog):
        return sorted(await partitions_of(log))
    count = (await topics.partitions_of(source.settings())).get(USAGE.name, 0)
    if not count:
        name = source.settings().topic(USAGE.name)
        fail(f"{source.kafka} has no topic {name}; create it with `forebay topics create --upgrade`")
    return range(count)


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


async def _verify(source: Source, anchors: dict[int, Head]) -> list[LedgerReport]:
    async with source.source() as log:
        partitions = sorted({*await _partitions(source, log), *anchors})
        return [await verify_chain(log, partition, anchors.get(partition)) for partition in partitions]


async def _heads(source: Source) -> list[Head]:
    heads: list[Head] = []
    async with source.source() as log:
        for partition in await _partitions(source, log):
            chain = Chain(log, partition)
            await chain.read()
            if chain.head is not None:
                heads.append(Head(partition=partition, number=chain.head.number, hash=chain.head.hash))
    return heads


def _show(reports: Sequence[LedgerReport]) -> None:
    console = results(soft_wrap=True)
    for report in reports:
        if report.head is None and not report.differences:
            continue
        console.print(
            f"partition {report.partition}: {report.records} records, {report.derived} derived again,"
            f" the journal up to offset {report.until_offset}"
        )
        for text in report.differences:
            console.print(f"  differs: {in_markup(text)}")
