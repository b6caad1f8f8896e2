"""The chain of usage records: its writers, its verification, and what happens after every kind of change to it."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest

from forebay.events.codec import decode
from forebay.events.progress import RequestFinished
from forebay.events.topics import DECISIONS, USAGE
from forebay.events.usage import UsageEntry, UsageRecorded
from forebay.journal.ledger import Chain, LedgerReport, seal, verify_chain
from forebay.journal.usage import HOUR_US, derive
from forebay.live.ledger import ChainWriter
from forebay.live.partitions import Partitions
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.live.growing import Growing, history
from tests.system import until


def sums(entries: Sequence[UsageEntry]) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for one in entries:
        for name in ("requests", "output_tokens", "prompt_tokens", "decode_us"):
            key = one.hour_us, one.tenant, one.key_id, one.model, name
            found[key] = found.get(key, 0) + getattr(one, name)
    return found


async def recorded(log: SqliteLog) -> list[UsageEntry]:
    return [entry for record in await Chain(log, 0).read() for entry in record.entries]


async def chain_of(*, pieces: int = 6) -> SqliteLog:
    """Return a log with a chain of `pieces` records."""
    growing = Growing(history(2 * pieces + 1))
    await growing.begin()
    writer = ChainWriter(growing.log, 0)
    for _ in range(pieces):
        await growing.grow(6)
        await writer.advance(is_last=True)
    await growing.end()
    await writer.advance(is_last=True)
    return growing.log


async def with_chain(log: SqliteLog, values: Sequence[bytes]) -> SqliteLog:
    """Return a copy of a log with these usage records."""
    copy = SqliteLog.open(None)
    for topic, partition, end in log.topics():
        if topic != USAGE.name:
            records = log.records(topic, partition, 0, end)
            await copy.append([Draft(topic, partition, record.value) for record in records])
    await copy.append([Draft(USAGE.name, 0, value) for value in values])
    return copy


async def values_of(log: SqliteLog) -> list[bytes]:
    return [record.value for record in log.records(USAGE.name, 0, 0, 1_000)]


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["first", "second", "both", "killed"])), max_size=12))
async def test_writers_that_alternate_race_and_die_write_what_the_journal_leads_to(
    steps: list[tuple[int, str]],
) -> None:
    growing = Growing(history(12))
    with closing(growing.log) as log:
        await growing.begin()
        racing = _Racing(log)
        writers = [ChainWriter(log, 0), ChainWriter(racing, 0)]
        for count, what in steps:
            await growing.grow(count)
            if what == "killed":
                writers = [ChainWriter(log, 0), ChainWriter(racing, 0)]
            racing.other = writers[0] if what == "both" else None
            await writers[what != "first"].advance(is_last=True)
        racing.other = None
        await growing.end()
        for writer in writers:
            while await writer.advance(is_last=True):
                pass
        report = await verify_chain(log, 0)
        assert report.differences == []
        assert report.records == report.derived
        assert len(await values_of(log)) == report.records + racing.lost
        assert sums(await recorded(growing.log)) == sums(await derive(log, 0))


class _Racing:
    """A log on which another writer appends right before each append."""

    def __init__(self, log: SqliteLog) -> None:
        self._log = log
        self.other: ChainWriter | None = None
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append(self, drafts: Sequence[Draft]) -> list[int]:
        if self.other is not None:
            self.lost += await self.other.advance(is_last=True)
        return await self._log.append(drafts)


async def test_a_record_is_due_after_a_time_or_when_an_hour_is_over() -> None:
    made = history(2)
    growing = Growing(made)
    with closing(growing.log) as log:
        await growing.begin()
        await growing.end()
        writer = ChainWriter(log, 0)
        assert not await writer.advance(is_last=False)
        made.progress("r1", RequestFinished, HOUR_US, finish_reason="stop", output_tokens=5)
        made.seal()
        later = Growing(made)
    with closing(later.log) as log:
        await later.begin()
        await later.end()
        writer = ChainWriter(log, 0)
        assert await writer.advance(is_last=False), "the hour of the first request is over"
        assert [one.hour_us for one in await recorded(later.log)] == [0, HOUR_US]
        assert writer.behind > 0
        assert not await writer.advance(is_last=True), "there is nothing more"
        assert writer.behind == 0


async def test_a_record_without_usage_follows_an_hour_without_any() -> None:
    made = history(0)
    for _ in range(3):
        made("control", None, HOUR_US // 2)
        made.seal()
    growing = Growing(made)
    with closing(growing.log) as log:
        await growing.begin()
        await growing.grow(len(made.journal) - 2)
        writer = ChainWriter(log, 0)
        assert not await writer.advance(is_last=True)
        await growing.end()
        assert await writer.advance(is_last=True)
        assert not await writer.advance(is_last=True)
        (record,) = await Chain(log, 0).read()
        assert (record.entries, record.until_offset) == ((), len(made.journal))
        assert (await verify_chain(log, 0)).differences == []


async def test_a_record_has_a_bounded_number_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.live.ledger.ENTRIES_MAX", 2)
    growing = Growing(history(10))
    with closing(growing.log) as log:
        await growing.begin()
        await growing.end()
        writer = ChainWriter(log, 0)
        while await writer.advance(is_last=False):
            pass
        records = await Chain(log, 0).read()
        assert [len(one.entries) for one in records] == [2] * 4
        assert (await verify_chain(log, 0)).differences == []


@given(st.data())
async def test_a_changed_byte_is_found_and_named(data: st.DataObject) -> None:
    log = await chain_of(pieces=3)
    with closing(log):
        values = await values_of(log)
        number = data.draw(st.integers(0, len(values) - 1))
        at = data.draw(st.integers(0, len(values[number]) - 1))
        changed = bytearray(values[number])
        changed[at] ^= data.draw(st.integers(1, 255))
        values[number] = bytes(changed)
        with closing(await with_chain(log, values)) as copy:
            report = await verify_chain(copy, 0)
            assert report.differences[0].startswith(f"record at offset {number} of usage/0 ")
            assert report.records == number


async def test_a_lost_record_is_found_and_a_writer_derives_it_again() -> None:
    log = await chain_of()
    with closing(log):
        values = await values_of(log)
        with closing(await with_chain(log, [*values[:2], *values[3:]])) as copy:
            report = await verify_chain(copy, 0)
            assert len(report.differences) == len(values) - 3
            assert "does not continue the chain: it has number 3 after hash" in report.differences[0]
            writer = ChainWriter(copy, 0)
            while await writer.advance(is_last=True):
                pass
            chain = Chain(copy, 0)
            recorded = [entry for record in await chain.read() for entry in record.entries]
            assert sums(recorded) == sums(await derive(copy, 0))
            assert (await verify_chain(copy, 0)).differences == report.differences, "the fault stays visible"


async def test_a_chain_that_was_computed_again_differs_from_the_journal_and_from_an_anchor() -> None:
    log = await chain_of()
    with closing(log):
        whole = await verify_chain(log, 0)
        assert whole.differences == []
        forged: list[bytes] = []
        previous = ""
        for value in await values_of(log):
            record: UsageRecorded = decode(USAGE, value)
            first, *rest = record.entries
            entries = (replace(first, output_tokens=first.output_tokens + (record.number == 1)), *rest)
            forged.append(seal(replace(record, entries=entries, previous=previous)))
            previous = decode(USAGE, forged[-1]).hash
        with closing(await with_chain(log, forged)) as copy:
            report = await verify_chain(copy, 0, whole)
            assert f"the anchor has {whole.records} records" in report.differences[0]
            assert whole.head in report.differences[0]
            assert len(report.differences) == 2
            assert report.differences[1].startswith("record 1 of usage/0: tenant ")
            assert "the record has output_tokens" in report.differences[1]
            copy.trim(DECISIONS.name, 0, await copy.end(DECISIONS.name, 0), 1_000)
            report = await verify_chain(copy, 0)
            assert (report.differences, report.derived) == ([], 0), "only the anchor shows it now"
        with closing(await with_chain(log, (await values_of(log))[:-2])) as copy:
            assert "but the chain of usage/0 has no such record" in (await verify_chain(copy, 0, whole)).differences[0]
            older = LedgerReport(partition=0, records=1, head=decode(USAGE, (await values_of(log))[0]).hash)
            assert (await verify_chain(copy, 0, older)).differences == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda entries: entries[1:], "the record has requests 0, prompt_tokens 0, output_tokens 0"),
        (
            lambda entries: (*entries, UsageEntry(hour_us=0, tenant="zorg", requests=3)),
            "the record has requests 3, the journal leads to",
        ),
        (lambda entries: (*entries, entries[-1]), "the record has an empty or a repeated entry"),
    ],
)
async def test_every_kind_of_difference_is_named(change: Any, text: str) -> None:
    log = await chain_of()
    with closing(log):
        first: UsageRecorded = decode(USAGE, (await values_of(log))[0])
        with closing(await with_chain(log, [seal(replace(first, entries=change(first.entries)))])) as copy:
            (difference,) = (await verify_chain(copy, 0)).differences
            assert text in difference


async def test_a_part_of_the_journal_that_no_record_covers_is_named() -> None:
    log = await chain_of()
    with closing(log):
        first, second, *_ = (decode(USAGE, value) for value in await values_of(log))
        first = decode(USAGE, seal(first))
        moved = replace(second, from_offset=second.from_offset + 1)
        overlaps = replace(second, from_offset=second.from_offset - 1)
        with closing(await with_chain(log, [seal(first), seal(moved)])) as copy:
            report = await verify_chain(copy, 0)
            gap = f"{first.until_offset} to {first.until_offset}"
            assert f"the journal offsets {gap} before it are part of no record" in report.differences[0]
        with closing(await with_chain(log, [seal(first), seal(overlaps)])) as copy:
            assert "but an earlier record does up to" in (await verify_chain(copy, 0)).differences[0]


async def test_a_writer_says_what_retention_removed(caplog: pytest.LogCaptureFixture) -> None:
    made = history(3)
    until_offset = len(made.journal)
    made.snapshot()
    for number in range(3, 6):
        made.ask(f"r{number}")
        made.progress(f"r{number}", RequestFinished, finish_reason="stop", output_tokens=number)
    made.seal()
    with closing(await made.log()) as log:
        first = Growing(history(3))
        await first.begin()
        await first.end()
        await ChainWriter(first.log, 0).advance(is_last=True)
        await log.append([Draft(USAGE.name, 0, value) for value in await values_of(first.log)])
        first.log.close()
        log.trim(DECISIONS.name, 0, until_offset + 1, 1_000)
        writer = ChainWriter(log, 0)
        assert await writer.advance(is_last=True)
        text = f"lack the journal offsets {until_offset} to {until_offset} of control partition 0"
        assert text in caplog.text
        assert "are part of no record" in (await verify_chain(log, 0)).differences[0]


async def test_a_ledger_writes_all_partitions_and_finishes(caplog: pytest.LogCaptureFixture) -> None:
    growing = Growing(history(8))
    with closing(growing.log) as log:
        await growing.begin()
        await growing.grow(12)
        registry = CollectorRegistry()
        ledger = Partitions(log, registry, "ledger", lambda partition: ChainWriter(log, partition, 0.0))
        running = asyncio.create_task(ledger.run())
        await until(lambda: ledger.followers and ledger.followers[0].chain.head)
        await growing.end()
        await ledger.stop()
        await running
        assert (await verify_chain(log, 0)).differences == []
        assert sums(await recorded(growing.log)) == sums(await derive(log, 0))
        assert b'forebay_ledger_behind_records{partition="0"} 0.0' in generate_latest(registry)
        assert caplog.text == ""


async def test_a_journal_that_cannot_be_read_stops_its_chain_with_one_message(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.live.partitions.RETRY_S", 0.0)
    made = history(8)
    del made.journal[4]
    growing = Growing(made)
    with closing(growing.log) as log:
        await growing.begin()
        await growing.end()
        ledger = Partitions(log, CollectorRegistry(), "ledger", lambda partition: ChainWriter(log, partition, 0.0))
        running = asyncio.create_task(ledger.run())
        await until(lambda: ledger.followers and ledger.followers[0].problem)
        await ledger.stop()
        await running
    assert caplog.text.count("the ledger of control partition 0 stopped: the log lost 1 journal records") == 1
