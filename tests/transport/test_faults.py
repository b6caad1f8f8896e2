"""The fault-injecting log crashes at a chosen append; only earlier appends reach the log that it wraps."""

from collections.abc import Callable

import pytest

from forebay.transport.base import Log
from forebay.transport.sqlite.log import SqliteLog
from tests.harness.faulty_log import Crashed, FaultyLog
from tests.transport.conftest import Wakes, drafts, numbers, stored


@pytest.mark.parametrize("crash_after", [0, 1, 4, 9])
async def test_appends_before_the_crash_are_complete_on_the_wrapped_log(log: SqliteLog, crash_after: int) -> None:
    faulty = FaultyLog(log, crash_after)
    done = 0
    with pytest.raises(Crashed):
        while True:
            first = 3 * done
            if done % 2:
                faulty.append_soon(drafts(3, first=first))
            else:
                assert await faulty.append(drafts(3, first=first)) == [first, first + 1, first + 2]
            done += 1
    assert faulty.crashed
    assert done == crash_after
    assert log.next_offset("topic", 0) == 3 * crash_after
    assert numbers(stored(log)) == list(range(3 * crash_after))
    assert await log.append(drafts(1)) == [3 * crash_after]


async def test_after_the_crash_every_call_but_close_fails(log: SqliteLog) -> None:
    faulty = FaultyLog(log, 1)
    tail = faulty.tail("topic", 0, 0, Wakes())
    await faulty.append(drafts(2))
    assert len(tail) > 0
    assert numbers(tail.take(1)) == [0]
    assert numbers(await faulty.read("topic", 0, 0, 10)) == [0, 1]
    assert await faulty.end("topic", 0) == 2
    with pytest.raises(Crashed):
        faulty.append_soon(drafts(1))
    calls: list[Callable[[], object]] = [
        lambda: faulty.append_soon(drafts(1)),
        lambda: faulty.tail("topic", 0, 0, Wakes()),
        lambda: tail.take(1),
        lambda: len(tail),
    ]
    for call in calls:
        with pytest.raises(Crashed):
            call()
    for waited in (faulty.append(drafts(1)), faulty.read("topic", 0, 0, 1), faulty.end("topic", 0)):
        with pytest.raises(Crashed):
            await waited
    tail.close()


async def test_a_faulty_log_satisfies_the_log_port(log: SqliteLog) -> None:
    inner: Log = FaultyLog(log, 5)
    outer: Log = FaultyLog(inner, 1)
    assert await outer.append(drafts(1)) == [0]
    with pytest.raises(Crashed):
        await outer.append(drafts(1))
    assert await inner.append(drafts(1)) == [1]
