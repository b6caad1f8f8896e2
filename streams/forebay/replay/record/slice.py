"""Select the slice of a log that a recording needs, and copy it.

Theory of operation. The user asks for a window, which is a range of journal records. Its decisions follow from a state
before the window and all events applied since. A slice therefore contains the journal from the newest snapshot before
the window, or from the log's beginning, to the end of the window, and of each input topic the records that this part
consumed. All offsets are fixed before the first record is copied, so the log may grow during the copy.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from forebay.core.step import AnyDecision
from forebay.events.decisions import OwnerClaimed, SnapshotRecord
from forebay.events.topics import DECISIONS, GROUPS, INPUTS, SCALING, SNAPSHOTS
from forebay.journal.records import decode_journal
from forebay.journal.snapshots import chunks_end, newest_snapshot
from forebay.journal.start import EMPTY_STATE, StoredState, begins_of, oldest_usable, recorded_views, usable_state
from forebay.transport.base import PAGE_RECORDS, Log, LogError, Record, reversed_records
from forebay.transport.directory import PARTITION
from forebay.transport.sqlite.recording import Contents, Extent, RecordedGroup, utc
from forebay.transport.sqlite.recording_writer import RecordingWriter

AT_US_END = 253_402_300_800_000_000  # the year 10000, beyond Python's datetime

Rewrite = Callable[[Record], Awaitable[Record]]
OnProgress = Callable[[int, int], None]


class NothingDecided(LogError):
    """Raised if the window contains no decision."""


class Window(NamedTuple):
    """Journal records appended from `from_us` until before `to_us`, in microseconds since 1970. None is no limit."""

    from_us: int | None = None
    to_us: int | None = None


class Slice(NamedTuple):
    """Part of a log from which one group's decisions in a window can be derived, with one extent per topic.

    `from_us` and `to_us` are the append times of the window's first and last record, in microseconds since 1970.
    """

    group: RecordedGroup
    extents: tuple[Extent, ...]
    from_us: int
    to_us: int


async def slice_of(log: Log, name: str, partition: int, window: Window) -> Slice:
    begin, end = await log.begin(DECISIONS.name, partition), await log.end(DECISIONS.name, partition)
    if begin == end:
        raise NothingDecided(f"the journal of group {name or partition} is empty")
    begins = await begins_of(log, partition)
    last = end if window.to_us is None else await offset_at(log, partition, window.to_us, before=True)
    if window.from_us is not None:
        first = await offset_at(log, partition, window.from_us)
        start = await _start_before(log, partition, first, last, begins)
        cut_off = first == begin > 0 and await _at_us(log, partition, first) > window.from_us
        if cut_off or start.offset > first:
            raise await _too_early(log, partition, start.offset, begins)
    else:
        start = EMPTY_STATE if not any(begins.values()) else await _earliest(log, partition, last, begins)
        first = start.offset
    view = known = Counter(start.view)
    decisions, version = 0, start.core_version
    oldest: SnapshotRecord | None = None
    newest: SnapshotRecord | None = None
    passed: Counter[str] = Counter()  # by owners whose last records an operator gave up
    async for offset, record, view in recorded_views(log, partition, start, last):
        if view is not known:
            passed, known = passed | known, view
        decisions += offset >= first and isinstance(record, AnyDecision)
        if isinstance(record, SnapshotRecord):
            oldest, newest = oldest or record, record
        elif isinstance(record, OwnerClaimed):
            version = record.core_version
    if not decisions:
        span = f"{utc(await _at_us(log, partition, begin))} to {utc(await _at_us(log, partition, end - 1))}"
        raise NothingDecided(f"group {name or partition} made no decision in the window; its journal covers {span}")
    view |= passed
    extents = [Extent(topic.name, partition, start.view.get(topic.name, 0), view[topic.name]) for topic in INPUTS]
    extents.append(Extent(DECISIONS.name, partition, start.offset, last))
    first_chunk = oldest.first_offset if oldest is not None and start.offset else 0
    last_chunk = 0 if newest is None else await chunks_end(log, partition, newest)
    extents.append(Extent(SNAPSHOTS.name, partition, first_chunk, last_chunk))
    group = RecordedGroup(name, partition, start.offset, first, last, decisions, version)
    ends = await _at_us(log, partition, first), await _at_us(log, partition, last - 1)
    return Slice(group, tuple(extents), *ends)


async def scaling_of(log: Log, window: Window) -> Extent:
    """Return the records of the topic `scaling` from its beginning to the end of a window.

    The decisions of planners follow from all records before them. Raises LogError if the topic cannot be read.
    """
    begin, end = await log.begin(SCALING.name, PARTITION), await log.end(SCALING.name, PARTITION)
    if window.to_us is not None:
        end = await offset_at(log, PARTITION, window.to_us, before=True, topic=SCALING.name)
    return Extent(SCALING.name, PARTITION, begin, end)


async def contents_of(
    log: Log,
    slices: list[Slice],
    *,
    namespace: str,
    source: str,
    asked: Mapping[str, str],
    anonymized: bool = False,
    scaling: Extent | None = None,
) -> Contents:
    """Return the contents of a recording with these slices, the whole topic `groups` and records of `scaling`."""
    directory = Extent(
        GROUPS.name, PARTITION, await log.begin(GROUPS.name, PARTITION), await log.end(GROUPS.name, PARTITION)
    )
    extents = [directory, *(extent for one in slices for extent in one.extents)]
    if scaling is not None and scaling.count:
        extents.append(scaling)
    return Contents(
        namespace=namespace,
        source=source,
        from_us=min(one.from_us for one in slices),
        to_us=max(one.to_us for one in slices),
        groups=tuple(sorted(one.group for one in slices)),
        extents=tuple(sorted(extents)),
        asked=asked,
        anonymized=anonymized,
    )


async def copy(
    log: Log, writer: RecordingWriter, progress: OnProgress | None = None, rewrite: Rewrite | None = None
) -> None:
    """Copy the records of a recording, page by page.

    `rewrite` returns the record to store instead of a record of the log. It may change value, key and headers only. The
    journals come last, so that `rewrite` can read the other topics in the recording.
    """
    for extent in sorted(writer.contents.extents, key=lambda one: one.topic == DECISIONS.name):
        while (offset := writer.position(extent)) < extent.end:
            limit = min(PAGE_RECORDS, extent.end - offset)
            records = await log.read(extent.topic, extent.partition, offset, limit)
            if not records:
                where = f"{extent.topic}/{extent.partition} ends at offset {offset}"
                raise LogError(f"{where}, but should be recorded up to {extent.end}; is this a different log?")
            writer.write(records if rewrite is None else [await rewrite(record) for record in records])
            if progress is not None:
                progress(writer.done, writer.total)


async def offset_at(log: Log, partition: int, at_us: int, *, before: bool = False, topic: str = DECISIONS.name) -> int:
    """Return the offset of the first record of a topic, by default the journal, appended at or after `at_us`.

    With `before`, return the offset after the last record that was appended before `at_us`. Append times may step back
    a little when a new owner's clock is behind. The result is correct despite such steps if they span less than
    `PAGE_RECORDS` records.
    """
    begin, end = await log.begin(topic, partition), await log.end(topic, partition)
    low, high = begin, end
    while low < high:
        middle = (low + high) // 2
        if await _at_us(log, partition, middle, topic) < at_us:
            low = middle + 1
        else:
            high = middle
    if before:
        near = await log.read(topic, partition, low, PAGE_RECORDS) if low < end else []
        return max([low, *(record.offset + 1 for record in near if record.at_us < at_us)])
    start = max(begin, low - PAGE_RECORDS)
    near = await log.read(topic, partition, start, low - start) if start < low else []
    return min([low, *(record.offset for record in near if record.at_us >= at_us)])


async def newest_us(log: Log, partition: int) -> int | None:
    """Return when the newest decision was appended, in microseconds since 1970. None if the journal has no decision."""
    async for record in reversed_records(log, DECISIONS, partition, await log.end(DECISIONS.name, partition)):
        if isinstance(decode_journal(record), AnyDecision):
            return record.at_us
    return None


async def _at_us(log: Log, partition: int, offset: int, topic: str = DECISIONS.name) -> int:
    (record,) = await log.read(topic, partition, offset, 1)
    if not 0 <= record.at_us < AT_US_END:
        raise LogError(
            f"record {offset} of {topic}/{partition} has an invalid append time: {record.at_us} us after 1970"
        )
    return record.at_us


async def _start_before(log: Log, partition: int, first: int, last: int, begins: Mapping[str, int]) -> StoredState:
    """Return the newest usable state at or before journal offset `first`, or the oldest one if there is none."""
    taken = await newest_snapshot(log, partition, min(first + 1, last))
    start = None if taken is None else await usable_state(log, partition, taken, begins)
    if start is not None:
        return start
    if not any(begins.values()):
        return EMPTY_STATE
    return await _earliest(log, partition, last, begins)


async def _earliest(log: Log, partition: int, end: int, begins: Mapping[str, int]) -> StoredState:
    if (start := await oldest_usable(log, partition, begins, end)) is not None:
        return start
    raise LogError(
        f"no part of this window can be recorded: control partition {partition} has no {_heads(begins)}, nor a snapshot"
        " with all events after it; choose a later window"
    )


async def _too_early(log: Log, partition: int, offset: int, begins: Mapping[str, int]) -> LogError:
    earliest = utc(await _at_us(log, partition, offset))
    return LogError(
        f"the window begins too early: control partition {partition} can be recorded from {earliest} on, it has"
        f" no {_heads(begins)}"
    )


def _heads(begins: Mapping[str, int]) -> str:
    return ", no ".join(f"{topic} before offset {begin}" for topic, begin in sorted(begins.items()) if begin)
