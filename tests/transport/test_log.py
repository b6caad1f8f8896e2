"""Contract tests of the port `Log`: offsets, order, atomic appends, records that follow others, and tails."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.transport.base import Draft, LogError, LogFull, Record, Tail
from forebay.transport.kafka.log import Following
from forebay.transport.sqlite import tail as sqlite_tail
from forebay.transport.sqlite.log import RECORD_BYTES_MAX, SqliteLog
from tests.depth import examples
from tests.transport.conftest import Wakes, drafts, drain, numbers, stored

PLACES = [("a", 0), ("a", 1), ("b.with-dots-0", 0), ("b.with-dots-0", (1 << 23) - 1)]


async def test_a_record_is_read_as_it_was_appended(log: SqliteLog) -> None:
    given = [
        Draft("topic", 5, b""),
        Draft("topic", 5, bytes(range(256)), b"", {}),
        Draft("topic", 5, b"v", b"\x00key", {"a": "1", "": "\u00e4\u2028\x00"}),
    ]
    await log.append(given)
    found = stored(log, "topic", 5)
    assert [(record.value, record.key, record.headers) for record in found] == [
        (draft.value, draft.key, draft.headers) for draft in given
    ]
    assert [(record.topic, record.partition, record.offset) for record in found] == [
        ("topic", 5, offset) for offset in range(3)
    ]


async def test_a_read_is_bounded_and_starts_at_any_offset(log: SqliteLog) -> None:
    await log.append(drafts(10))
    assert numbers(log.records("topic", 0, 3, 4)) == [3, 4, 5, 6]
    assert numbers(log.records("topic", 0, 8, 4)) == [8, 9]
    assert log.records("topic", 0, 10, 4) == []
    assert log.records("topic", 0, 500, 4) == []
    assert log.records("topic", 0, 3, 0) == []
    assert log.records("topic", 1, 0, 4) == []
    assert log.records("nothing", 0, 0, 4) == []


async def test_concurrent_appends_keep_their_order_and_share_a_timestamp(log: SqliteLog) -> None:
    calls = [asyncio.ensure_future(log.append(drafts(2, first=2 * number))) for number in range(50)]
    assert [await call for call in calls] == [[2 * number, 2 * number + 1] for number in range(50)]
    assert numbers(stored(log)) == list(range(100))
    assert len({record.at_us for record in stored(log)}) == 1


async def test_an_empty_append_writes_nothing(log: SqliteLog) -> None:
    assert await log.append([]) == []
    log.append_soon([])
    assert await log.append(drafts(1)) == [0]


async def test_a_flush_waits_for_all_records_appended_before(log: SqliteLog) -> None:
    wakes = Wakes()
    tail = log.tail("topic", 0, 0, wakes)
    await log.flush()
    log.append_soon(drafts(2), then=drafts(1, first=2))
    assert numbers(drain(tail)) == []
    await log.flush()
    assert numbers(drain(tail)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (Draft("Topic", 0, b""), "'Topic'"),
        (Draft("", 0, b""), "''"),
        (Draft("a" * 201, 0, b""), "1 to 200"),
        (Draft('x"; drop table y', 0, b""), "invalid topic name"),
        (Draft("topic\n", 0, b""), "invalid topic name"),
        (Draft("topic", -1, b""), "partition -1"),
        (Draft("topic", 1 << 23, b""), "partition 8388608"),
        (Draft("topic", 0, bytes(RECORD_BYTES_MAX), b"k"), f"{RECORD_BYTES_MAX + 1} bytes"),
    ],
)
async def test_an_invalid_draft_fails_its_whole_append(log: SqliteLog, bad: Draft, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        await log.append([*drafts(2), bad])
    with pytest.raises(ValueError, match=text):
        log.append_soon([*drafts(2), bad])
    assert log.next_offset("topic", 0) == 0
    assert await log.append(drafts(1)) == [0]
    assert log.failure is None


async def test_the_largest_record_fits(log: SqliteLog) -> None:
    await log.append([Draft("topic", 0, bytes(RECORD_BYTES_MAX))])
    assert len(stored(log)[0].value) == RECORD_BYTES_MAX


async def test_a_cancelled_append_is_still_written(log: SqliteLog) -> None:
    call = asyncio.ensure_future(log.append(drafts(1)))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert await log.append(drafts(1, first=1)) == [1]
    assert numbers(stored(log)) == [0, 1]


async def test_the_end_includes_pending_appends(log: SqliteLog) -> None:
    log.append_soon(drafts(2))
    assert log.next_offset("topic", 0) == 2
    assert numbers(stored(log)) == [0, 1]


async def test_a_wake_shared_by_tails_is_set_once_per_commit(log: SqliteLog) -> None:
    wake = Wakes()
    tails = [log.tail("topic", partition, 0, wake) for partition in range(3)]
    log.append_soon(drafts(2, partition=0))
    await log.append([*drafts(2, partition=2), *drafts(1, "other")])
    assert wake.count == 1
    assert [numbers(drain(tail)) for tail in tails] == [[0, 1], [], [0, 1]]


async def test_a_closed_log_raises(log: SqliteLog) -> None:
    await log.append(drafts(1))
    log.close()
    log.close()
    with pytest.raises(LogError, match="is closed"):
        await log.append(drafts(1))
    with pytest.raises(LogError, match="is closed"):
        stored(log)


@dataclass
class FollowedTail:
    """A tail, and the offset of the next record that it must yield."""

    tail: Tail
    wake: Wakes
    place: tuple[str, int]
    position: int


@dataclass
class Model:
    """The expected content of the log: values by topic and partition."""

    values: dict[tuple[str, int], list[bytes]] = field(default_factory=lambda: defaultdict(list))
    tails: list[FollowedTail] = field(default_factory=list)
    written: int = 0

    def draft(self, place: tuple[str, int], size: int) -> Draft:
        self.written += 1
        value = str(self.written).encode().rjust(size, b"0")
        self.values[place].append(value)
        return Draft(*place, value)

    def expect(self, place: tuple[str, int], offset: int, limit: int) -> list[bytes]:
        return self.values[place][offset : offset + limit]


PLACE = st.sampled_from(PLACES)
ROWS = st.lists(st.tuples(PLACE, st.integers(0, 30)), min_size=1, max_size=12)


@dataclass
class Append:
    """Append rows of (place, size), with or without awaiting the result."""

    rows: list[tuple[tuple[str, int], int]]
    wait: bool


@dataclass
class Open:
    """Open a tail of a place at an offset."""

    place: tuple[str, int]
    offset: int


@dataclass
class Take:
    index: int
    limit: int


@dataclass
class Close:
    index: int


Action = Append | Open | Take | Close
ACTIONS = st.lists(
    st.builds(Append, ROWS, st.booleans())
    | st.builds(Open, PLACE, st.integers(0, 20))
    | st.builds(Take, st.integers(0, 5), st.integers(0, 10))
    | st.builds(Close, st.integers(0, 5)),
    max_size=30,
)


def values(records: list[Record]) -> list[bytes]:
    return [record.value for record in records]


async def play_append(log: SqliteLog, model: Model, action: Append) -> None:
    before = {place: len(model.values[place]) for place in PLACES}
    counts = [one.wake.count for one in model.tails]
    batch = [model.draft(place, size) for place, size in action.rows]
    if action.wait:
        expected = dict(before)
        for (place, _), offset in zip(action.rows, await log.append(batch), strict=True):
            assert offset == expected[place]
            expected[place] += 1
    else:
        log.append_soon(batch)
        await asyncio.sleep(0)
    for one, count in zip(model.tails, counts, strict=True):
        news = len(model.values[one.place]) > max(one.position, before[one.place])
        assert one.wake.count == count + news


async def play(log: SqliteLog, actions: list[Action]) -> None:
    model = Model()
    for action in actions:
        match action:
            case Append():
                await play_append(log, model, action)
            case Open(place, offset):
                wake = Wakes()
                model.tails.append(FollowedTail(log.tail(*place, offset, wake), wake, place, offset))
                assert wake.count == (len(model.values[place]) > offset)
            case Take(index, limit) if index < len(model.tails):
                one = model.tails[index]
                found = values(one.tail.take(limit))
                ready = model.expect(one.place, one.position, limit)
                assert found == ready[: len(found)]
                assert found or not ready
                one.position += len(found)
            case Close(index) if index < len(model.tails):
                model.tails.pop(index).tail.close()
            case Take() | Close():
                pass
            case _:
                assert_never(action)
        for one in model.tails:
            assert (len(one.tail) > 0) == (len(model.values[one.place]) > one.position)
    for place in PLACES:
        assert values(stored(log, *place)) == model.values[place]
        assert log.next_offset(*place) == len(model.values[place])


@examples(1.5)
@given(ACTIONS, st.integers(1, 8), st.integers(1, 10_000))
def test_any_history_reads_like_a_list(actions: list[Action], records_max: int, bytes_max: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_tail, "TAIL_RECORDS_MAX", records_max)
        patch.setattr(sqlite_tail, "TAIL_BYTES_MAX", bytes_max)
        log = SqliteLog.open(None)
        try:
            asyncio.run(play(log, actions))
        finally:
            log.close()


def named(*names: str) -> list[Draft]:
    return [Draft("topic", 0, name.encode()) for name in names]


class Written:
    """Drafts in the order of their appends; the test decides when they are durable."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self.durable: dict[str, Callable[[], None]] = {}
        self.is_full = False
        self.following = Following(self._write, self._write_followers)

    def _write(self, added: Sequence[Draft], on_durable: Callable[[], None] | None) -> None:
        if self.is_full:
            raise LogFull("full")
        self.values += [draft.value.decode() for draft in added]
        if on_durable is not None:
            self.durable[added[0].value.decode()] = on_durable

    def _write_followers(self, added: Sequence[Draft]) -> None:
        self.values += [draft.value.decode() for draft in added]


def test_followers_wait_for_their_drafts_and_for_earlier_followers() -> None:
    written = Written()
    written.following.append(named("a"), named("after a"))
    written.following.append(named("b"), named("after b"))
    written.following.append([], named("after nothing"))
    written.following.append(named("c"), [])
    written.durable["b"]()
    assert written.values == ["a", "b", "c"]
    written.durable["a"]()
    assert written.values == ["a", "b", "c", "after a", "after b", "after nothing"]
    assert not len(written.following)


def test_an_append_that_raises_does_not_block_later_followers() -> None:
    written = Written()
    written.is_full = True
    with pytest.raises(LogFull):
        written.following.append(named("a"), named("after a"))
    written.is_full = False
    written.following.append(named("b"), named("after b"))
    written.durable["b"]()
    assert written.values == ["b", "after b"]


def test_a_failed_log_appends_no_followers() -> None:
    written = Written()
    written.following.append(named("a"), named("after a"))
    written.following.clear()
    written.durable["a"]()
    assert written.values == ["a"]
