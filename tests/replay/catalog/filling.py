"""Fill a catalog's tables from a log as the follower does, without its file."""

import sqlite3
from collections.abc import Callable, Sequence

from forebay.core.step import AnyDecision, InputEvent
from forebay.events.topics import DECISIONS, INPUTS
from forebay.replay.catalog.contents import ContentsObserver
from forebay.replay.walk import Start, Step, Walk, oldest
from forebay.transport.base import Log
from forebay.transport.history.reader import decode_or_none, records_of
from tests.logs import recordings
from tests.logs.own_policy import CUSTOM

RECORDINGS = recordings.representative()


def new_tables() -> sqlite3.Connection:
    """Return empty tables in memory."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(ContentsObserver.schema)
    return connection


async def fill(
    connection: sqlite3.Connection,
    log: Log,
    partition: int = 0,
    *,
    write_every: int = 10,
    reopen_every: int = 0,
    check: Callable[[Walk, ContentsObserver, Step], None] | None = None,
) -> Walk:
    """Derive a log, and write the rows of its records.

    Args:
        write_every: journal records between two writes.
        reopen_every: number of writes after which another observer continues, as after a restart; 0 for never.
        check: called after each record.
    """
    start: Start = await oldest(log, partition, await log.end(DECISIONS.name, partition), CUSTOM)
    walk = Walk(log, partition, start, await log.end(DECISIONS.name, partition))
    observer = ContentsObserver()
    observer.open(connection, walk.world)

    def on_applied(topic: str, event: InputEvent | None, now_us: int, decisions: Sequence[AnyDecision]) -> None:
        observer.on_applied(topic, event, now_us, decisions, walk.world)

    walk.followed.on_applied = on_applied
    writes = 0
    number = 0
    async for step in walk:
        number += 1
        assert step.divergence is None
        observer.on_record(step.offset, step.record, walk.world)
        if check is not None:
            check(walk, observer, step)
        if number % write_every == 0:
            write(connection, observer)
            writes += 1
            if reopen_every and writes % reopen_every == 0:
                observer = ContentsObserver()
                observer.open(connection, walk.world)
    write(connection, observer)
    await show_tail(connection, observer, log, partition, walk)
    return walk


def write(connection: sqlite3.Connection, observer: ContentsObserver) -> None:
    connection.execute("BEGIN")
    observer.write(connection)
    connection.execute("COMMIT")


async def show_tail(
    connection: sqlite3.Connection, observer: ContentsObserver, log: Log, partition: int, walk: Walk
) -> None:
    """Report the events after the journal's end, in append order, and write their effect."""
    tail = []
    for topic in INPUTS:
        begin, end = walk.world.view.get(topic.name, 0), await log.end(topic.name, partition)
        tail += [
            (record.at_us, topic.name, record.offset, decode_or_none(topic, record.value))
            async for record in records_of(log, topic, partition, begin, end)
        ]
    observer.clear_unrecorded()
    for at_us, name, offset, event in sorted(tail, key=lambda one: one[0]):
        observer.on_unrecorded(name, offset, event, at_us)
    write(connection, observer)
