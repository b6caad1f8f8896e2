"""Catalogs of test logs, with a clock that makes checkpoints frequent, and their tables without a file."""

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar

from forebay import runtime
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.step import CLOCK, AnyDecision, InputEvent
from forebay.core.world import World
from forebay.events.decisions import JournalRecord
from forebay.events.topics import DECISIONS, INPUTS
from forebay.journal.reader import JournalReader, Step, read_whole
from forebay.journal.records import decode_or_none
from forebay.replay.anonymize.anonymize import ReadOnlyLog
from forebay.replay.catalog import checkpoints
from forebay.replay.catalog.contents import ContentsObserver
from forebay.replay.catalog.follow import Follower
from forebay.replay.catalog.mentions import MentionTable, find_mentions
from forebay.replay.catalog.observer import CatalogObserver
from forebay.replay.catalog.seek import CatalogStates
from forebay.replay.catalog.store import SIZE_MAX, Store
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import Explanation
from forebay.runtime.system import SystemRuntime
from forebay.transport.base import Log, LogError, Record, records_of
from tests.logs import recordings
from tests.logs.own_policy import CUSTOM
from tests.replay.recorder import Recorder, fleet

T = TypeVar("T")
P = ParamSpec("P")
READING_NS = 20_000_000  # so that a checkpoint is due every 20 records or so
APPENDED_NS = 10_000_000  # earliest append time of a record

RECORDINGS = recordings.representative()


class ReadingClock(SystemRuntime):
    """Runtime whose clocks advance with each reading. The wall clock is shortly after a recorder's clock."""

    def __init__(self) -> None:
        self._now_ns = 0
        self._wall_ns = APPENDED_NS

    def monotonic_ns(self) -> int:
        self._now_ns += READING_NS
        return self._now_ns

    def wall_ns(self) -> int:
        self._wall_ns += 1_000
        return self._wall_ns


_opened: list[Store] = []


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test by a `ReadingClock`, and close its catalogs."""
    try:
        with runtime.use(ReadingClock()):
            return asyncio.run(work)
    finally:
        while _opened:
            _opened.pop().close()


def timed(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test by `run`."""

    @wraps(test)
    def run_test(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return run_test


class Noted(CatalogObserver):
    """Observer whose table has a row per call."""

    schema: ClassVar[str] = "CREATE TABLE noted (number INTEGER PRIMARY KEY, what TEXT, offset INTEGER);"

    def __init__(self) -> None:
        self.rows: list[tuple[str, int]] = []
        self.unrecorded: list[tuple[str, int]] = []
        self.removed_before: list[int] = []

    def open(self, connection: sqlite3.Connection, world: World) -> None:
        self.rows.clear()

    def on_applied(
        self, topic: str, event: InputEvent | None, now_us: int, decisions: Sequence[AnyDecision], world: World
    ) -> None:
        if topic != CLOCK:
            self.rows.append((topic, world.view[topic] - 1))

    def on_record(self, offset: int, record: JournalRecord, world: World) -> None:
        self.rows.append(("record", offset))

    def clear_unrecorded(self) -> None:
        self.unrecorded.clear()

    def on_unrecorded(self, topic: str, offset: int, event: InputEvent | None, at_us: int) -> None:
        self.unrecorded.append((topic, offset))

    def write(self, connection: sqlite3.Connection) -> None:
        connection.executemany("INSERT INTO noted (what, offset) VALUES (?, ?)", self.rows)
        self.rows.clear()

    def remove_before(self, connection: sqlite3.Connection, offset: int, now_us: int) -> None:
        self.removed_before.append(offset)


def noted_by(follower: Follower) -> Noted:
    """Return the observer of a follower of `index`."""
    observer = follower.observers[0]
    assert isinstance(observer, Noted)
    return observer


def busy(count: int, *more: str) -> Recorder:
    """Return a recorder of a worker that gets `count` requests, and then those with the IDs `more`."""
    made = fleet("a")
    for number in range(count):
        made.ask(f"request-{number}", [number])
    for name in more:
        made.ask(name, [1, 2])
    made.seal()
    return made


def running(*names: str) -> Recorder:
    """Return a recorder of a worker that runs these requests."""
    made = fleet("a")
    for name in names:
        made.ask(name, [len(name)])
    return made


async def open_store(path: Path, log: Log, partition: int = 0) -> Store:
    schemas = (checkpoints.SCHEMA, MentionTable.schema, Noted.schema)
    _opened.append(await Store.open(path, log, partition, schemas))
    return _opened[-1]


async def catalog_explanation(
    log: Log,
    partition: int,
    store: Store,
    request_id: str,
    journal_offset: int | None = None,
    custom: CustomPolicies = ONLY_BUILT_IN,
) -> Explanation:
    """Return the explanation that begins at a checkpoint, of the request with the newest decision at this offset."""
    mentions = find_mentions(store, request_id, journal_offset)
    return await explain(CatalogStates(store, log, partition, custom), request_id, mentions=mentions)


async def index(
    log: Log,
    path: Path,
    partition: int = 0,
    custom: CustomPolicies = CUSTOM,
    size_max: int = SIZE_MAX,
    progress: Callable[[int, int], None] | None = None,
) -> Follower:
    """Return a follower that has followed a log to its end, with an open store at `path`."""
    store = await open_store(path, log, partition)
    follower = Follower(
        log, partition, store, lambda: [Noted(), MentionTable()], custom=custom, size_max=size_max, progress=progress
    )
    await follower.catch_up()
    return follower


def noted(store: Store) -> list[tuple[str, int]]:
    return store.connection.execute("SELECT what, offset FROM noted ORDER BY number").fetchall()


def offsets(store: Store) -> list[int]:
    return [offset for (offset,) in store.connection.execute("SELECT offset FROM checkpoints ORDER BY offset")]


class LogView(ReadOnlyLog):
    """View of a log that may hide the end of its journal, and may fail.

    Attributes:
        journal_end: end of the visible journal; None for all records.
    """

    def __init__(self, log: Log, journal_end: int | None = None) -> None:
        self.journal_end = journal_end
        self.is_away = False
        self._log = log

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        if self.is_away:
            raise LogError("the broker is away")
        limit = min(limit, await self.end(topic, partition) - offset)
        return await self._log.read(topic, partition, offset, limit) if limit > 0 else []

    async def begin(self, topic: str, partition: int) -> int:
        return await self._log.begin(topic, partition)

    async def end(self, topic: str, partition: int) -> int:
        end = await self._log.end(topic, partition)
        return end if self.journal_end is None or topic != DECISIONS.name else min(end, self.journal_end)


# Tables filled as the follower does, without its file


def new_tables() -> sqlite3.Connection:
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
    check: Callable[[JournalReader, ContentsObserver, Step], None] | None = None,
) -> JournalReader:
    """Derive a log, and write the rows of its records.

    Args:
        write_every: journal records between two writes.
        reopen_every: number of writes after which another observer continues, as after a restart; 0 for never.
        check: called after each record.
    """
    reader = await read_whole(log, partition, CUSTOM)
    observer = ContentsObserver()
    observer.open(connection, reader.world)

    def on_applied(topic: str, event: InputEvent | None, now_us: int, decisions: Sequence[AnyDecision]) -> None:
        observer.on_applied(topic, event, now_us, decisions, reader.world)

    reader.followed.on_applied = on_applied
    number = 0
    async for step in reader:
        number += 1
        assert step.divergence is None
        observer.on_record(step.offset, step.record, reader.world)
        if check is not None:
            check(reader, observer, step)
        if number % write_every == 0:
            write(connection, observer)
            if reopen_every and number % (write_every * reopen_every) == 0:
                observer = ContentsObserver()
                observer.open(connection, reader.world)
    write(connection, observer)
    await show_tail(connection, observer, log, partition, reader)
    return reader


async def tables_of(made: Recorder, **options: Any) -> sqlite3.Connection:
    """Return the tables of a recorder's log."""
    connection, log = new_tables(), await made.log()
    await fill(connection, log, **options)
    log.close()
    return connection


def write(connection: sqlite3.Connection, observer: ContentsObserver) -> None:
    connection.execute("BEGIN")
    observer.write(connection)
    connection.execute("COMMIT")


async def show_tail(
    connection: sqlite3.Connection, observer: ContentsObserver, log: Log, partition: int, reader: JournalReader
) -> None:
    """Report the events after the journal's end, in append order, and write their effect."""
    tail = []
    for topic in INPUTS:
        begin, end = reader.world.view.get(topic.name, 0), await log.end(topic.name, partition)
        tail += [
            (record.at_us, topic.name, record.offset, decode_or_none(topic, record.value))
            async for record in records_of(log, topic, partition, begin, end)
        ]
    observer.clear_unrecorded()
    for at_us, name, offset, event in sorted(tail, key=lambda one: one[0]):
        observer.on_unrecorded(name, offset, event, at_us)
    write(connection, observer)
