"""Observer that fills the tables of requests, markers and metrics while a pass follows a log."""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, get_args

from forebay.core.step import AnyDecision, InputEvent
from forebay.core.world import World
from forebay.events.control import PoolSetting, WorkerCommanded
from forebay.events.decisions import (
    JournalRecord,
    KvReleased,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
)
from forebay.events.fleet import WorkerDraining, WorkerFact, WorkerJoined, WorkerLost, WorkerRecovered, WorkerSuspect
from forebay.events.progress import (
    AttemptRejected,
    EncodeFailed,
    EncodeFinished,
    FirstTokenEmitted,
    PrefillFailed,
    PrefillFinished,
    ProgressEvent,
    RequestFailed,
    RequestFinished,
    RequestProgress,
    StageEnd,
    TransferFailed,
)
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import CONTROL, DECISIONS, FLEET, PROGRESS, REQUESTS
from forebay.replay.catalog import checkpoints, markers, series
from forebay.replay.catalog.markers import MarkerRecorder
from forebay.replay.catalog.mentions import MentionTable
from forebay.replay.catalog.observer import CatalogObserver
from forebay.replay.catalog.request_steps import COLUMNS, CatalogRequest, Row
from forebay.replay.catalog.series import MetricRecorder

UNRECORDED_MAX = 10_000  # requests shown with events after the journal; submissions pile up while there is no owner
_FIELDS = f"number INTEGER PRIMARY KEY, {', '.join(name for name in COLUMNS if name != 'number')}"
_INDEXES = """
CREATE INDEX requests_by_time ON requests (submitted_us);
CREATE INDEX active_requests ON requests (number) WHERE ended_us IS NULL;
CREATE INDEX unsuccessful_requests ON requests (number) WHERE is_unsuccessful = 1;
"""
# `unrecorded_requests` has the requests that events after the newest journal record change, and replaces their rows.
REQUESTS_SCHEMA = f"""
CREATE TABLE requests ({_FIELDS});
CREATE TABLE unrecorded_requests ({_FIELDS});
{_INDEXES}
"""
_MARKS = ", ".join("?" * len(COLUMNS))


class ContentsObserver(CatalogObserver):
    """Observer without handlers for KV events and load reports, which are most events."""

    schema: ClassVar[str] = REQUESTS_SCHEMA + series.SCHEMA + markers.SCHEMA

    def __init__(self) -> None:
        self._now_us = 0
        self._active: dict[str, CatalogRequest] = {}
        self._changed: dict[int, CatalogRequest] = {}
        self._forgotten: list[int] = []
        self._submitted: CatalogRequest | None = None  # its first decision is the next record
        self._unrecorded: dict[str, CatalogRequest] = {}
        self._is_unrecorded_changed = True
        self._metrics = MetricRecorder()
        self._markers = MarkerRecorder()
        handlers: dict[type[Any], Callable[[Any, int, Sequence[AnyDecision], World], None]] = {
            RequestSubmitted: self._submit,
            **dict.fromkeys((FirstTokenEmitted, RequestFinished, RequestFailed), self._progress),
            **dict.fromkeys((EncodeFinished, EncodeFailed, PrefillFinished, PrefillFailed), self._progress),
            AttemptRejected: self._progress,
            TransferFailed: self._fail_transfer,
            **dict.fromkeys((WorkerJoined, WorkerSuspect, WorkerRecovered, WorkerDraining, WorkerLost), self._fleet),
            **dict.fromkeys(get_args(PoolSetting), self._settings),
            WorkerCommanded: self._command,
        }
        self._handlers = handlers

    def open(self, connection: sqlite3.Connection, world: World) -> None:
        self._now_us = world.now_us
        select = f"SELECT {', '.join(COLUMNS)} FROM requests WHERE ended_us IS NULL"
        for row in connection.execute(select):
            request = CatalogRequest.of_row(row)
            self._active[request.request_id] = request
        self._follow_active(world)
        self._metrics.open(connection)
        self._markers.open(connection, world)

    def resume(self, world: World) -> None:
        self._now_us = max(self._now_us, world.now_us)
        for name in [name for name in self._active if world.requests.get(name) is None]:
            number = self._active.pop(name).number
            self._forgotten.append(number)  # its end is unknown
            self._changed.pop(number, None)
        self._follow_active(world)
        self._markers.resume(world)

    def _follow_active(self, world: World) -> None:
        for found in world.requests.active():
            tracked = self._active.get(found.submitted.request_id)
            if tracked is None:
                model = world.pools[found.submitted.pool].model
                tracked = CatalogRequest.of_active(found, model, world.now_us)
                self._active[tracked.request_id] = self._changed[tracked.number] = tracked
            tracked.follow(found)

    def on_applied(
        self, topic: str, event: InputEvent | None, now_us: int, decisions: Sequence[AnyDecision], world: World
    ) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event, now_us, decisions, world)

    def on_record(self, offset: int, record: JournalRecord, world: World) -> None:
        self._now_us = now_us = world.now_us
        self.clear_unrecorded()
        if record.consumed and self._markers.takeover is not None:
            self._markers.takeover.settle(record.consumed[0].now_us)
        match record:
            case RequestRouted() | RequestHeld() | RequestRejected() | RequestAborted():
                self._decide(offset, record, now_us, world)
            case KvReleased():
                if (request := self._active.get(record.request_id)) is not None:
                    request.journal_offset = offset
                    self._changed[request.number] = request
            case OwnerClaimed():
                self._markers.add_claim(offset, record, world)

    def clear_unrecorded(self) -> None:
        if self._unrecorded:
            self._unrecorded.clear()
            self._is_unrecorded_changed = True

    def on_unrecorded(self, topic: str, offset: int, event: InputEvent | None, at_us: int) -> None:
        at_us = max(at_us, self._now_us)
        match event:
            case RequestSubmitted() if self._shown(event.request_id) is None:
                self._show(CatalogRequest.of_submission(offset, event, at_us))
            case ProgressEvent():
                request = self._shown(event.request_id)
                if request is not None and request.ended_us is None and request.accepts(event):
                    _apply(self._show(request), event, at_us)
            case WorkerLost():
                for name in {**self._active, **self._unrecorded}:
                    request = self._shown(name)
                    if request is not None and request.is_on(event.worker_id, event.worker_epoch):
                        self._show(request).wait(at_us)

    def write(self, connection: sqlite3.Connection) -> None:
        # A forgotten request may be submitted again with the same number.
        connection.executemany("DELETE FROM requests WHERE number = ?", [(number,) for number in self._forgotten])
        self._forgotten.clear()
        _insert(connection, "requests", (one.row() for one in self._changed.values()))
        self._changed.clear()
        if self._is_unrecorded_changed:
            connection.execute("DELETE FROM unrecorded_requests")
            _insert(connection, "unrecorded_requests", (one.row() for one in self._unrecorded.values()))
            self._is_unrecorded_changed = False
        self._metrics.write(connection)
        self._markers.write(connection)

    def remove_before(self, connection: sqlite3.Connection, offset: int, now_us: int) -> None:
        connection.execute("DELETE FROM requests WHERE submitted_us < ? AND ended_us < ?", [now_us, now_us])
        series.remove_before(connection, now_us)
        markers.remove_before(connection, now_us)

    def _submit(self, event: RequestSubmitted, now_us: int, decisions: Sequence[AnyDecision], world: World) -> None:
        # Without a decision it is a redelivery. A repetition is not run; its client gets the earlier response.
        if decisions and not isinstance(decisions[0], RequestRepeated):
            number = world.view[REQUESTS.name] - 1
            self._submitted = CatalogRequest.of_submission(number, event, now_us)
            self._metrics.count_submission(now_us)
            if self._markers.takeover is not None:
                self._markers.takeover.count(event)

    def _decide(
        self,
        offset: int,
        record: RequestRouted | RequestHeld | RequestRejected | RequestAborted,
        now_us: int,
        world: World,
    ) -> None:
        submitted, self._submitted = self._submitted, None
        if submitted is not None and submitted.request_id == record.request_id:
            request: CatalogRequest | None = submitted
            if not isinstance(record, RequestRejected):
                self._active[submitted.request_id] = submitted
        else:
            request = self._active.get(record.request_id)
        if request is None:
            return
        self._changed[request.number] = request
        match record:
            case RequestRouted():
                active = world.requests.get(record.request_id)
                request.route(record, offset, now_us, record.pool if active is None else active.submitted.pool)
            case RequestHeld():
                request.hold(record, offset, now_us)
            case RequestRejected() | RequestAborted():
                request.refuse(record, offset, now_us)
                self._end(request, DECISIONS.name, offset, now_us)

    def _progress(self, event: RequestProgress, now_us: int, _: Sequence[AnyDecision], world: World) -> None:
        self._report(event, now_us, world.view[PROGRESS.name] - 1)

    def _report(self, event: RequestProgress, now_us: int, offset: int) -> None:
        request = self._active.get(event.request_id)
        if request is None or not request.accepts(event):
            return
        self._changed[request.number] = request
        is_first = _apply(request, event, now_us)
        if is_first:
            self._metrics.count_first_token(request, event.worker_id, now_us)
        elif request.ended_us is not None:
            if self._markers.takeover is not None:
                self._markers.takeover.count(event)
            self._end(request, PROGRESS.name, offset, now_us)

    def _fail_transfer(
        self, event: TransferFailed, now_us: int, decisions: Sequence[AnyDecision], world: World
    ) -> None:
        request, after = self._active.get(event.request_id), world.requests.get(event.request_id)
        is_unchanged = (
            request is not None
            and after is not None
            and (after.phase, after.stage, after.stage_attempt) == (request.phase, request.stage, request.attempt)
        )
        if not is_unchanged:  # otherwise there was nothing to fetch, and the owner ignored the event
            self._progress(event, now_us, decisions, world)

    def _fleet(self, event: WorkerJoined | WorkerFact, now_us: int, _: Sequence[AnyDecision], world: World) -> None:
        self._markers.add_fleet_event(event, world.view[FLEET.name] - 1, now_us, world)
        if isinstance(event, WorkerLost):
            worker = world.fleet.get(event.worker_id)
            if worker is None or worker.worker_epoch != event.worker_epoch:
                self._lose(event, now_us)

    def _lose(self, event: WorkerLost, now_us: int) -> None:
        for request in self._active.values():
            if request.is_on(event.worker_id, event.worker_epoch):
                self._changed[request.number] = request
                request.wait(now_us)

    def _settings(self, event: PoolSetting, now_us: int, _: Sequence[AnyDecision], world: World) -> None:
        self._markers.add_settings(event, world.view[CONTROL.name] - 1, now_us, world)

    def _command(self, event: WorkerCommanded, now_us: int, decisions: Sequence[AnyDecision], world: World) -> None:
        self._markers.add_command(event, world.view[CONTROL.name] - 1, now_us, decisions)

    def _end(self, request: CatalogRequest, topic: str, offset: int, now_us: int) -> None:
        if self._active.get(request.request_id) is request:
            del self._active[request.request_id]
        self._metrics.count_end(request, now_us)
        if request.state not in ("finished", "cancelled"):
            self._markers.count_end(request, topic, offset, now_us)

    def _shown(self, request_id: str) -> CatalogRequest | None:
        return self._unrecorded.get(request_id) or self._active.get(request_id)

    def _show(self, request: CatalogRequest) -> CatalogRequest:
        """Return a copy of a request that events after the newest journal record may change."""
        self._is_unrecorded_changed = True
        if request.request_id in self._unrecorded or len(self._unrecorded) >= UNRECORDED_MAX:
            return self._unrecorded.get(request.request_id) or request.copy()
        self._unrecorded[request.request_id] = copied = request.copy()
        return copied


def _apply(request: CatalogRequest, event: RequestProgress, now_us: int) -> bool:
    """Apply an accepted progress event. Return whether it is the first token of the response."""
    match event:
        case FirstTokenEmitted():
            return request.emit_first_token(event, now_us)
        case RequestFinished():
            request.finish(event, now_us)
        case RequestFailed():
            request.fail(event, now_us)
        case _ if isinstance(event, StageEnd):
            request.wait(now_us)
    return False


def _insert(connection: sqlite3.Connection, table: str, rows: Iterable[Row]) -> None:
    connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({_MARKS})", rows)


SCHEMAS = (checkpoints.SCHEMA, ContentsObserver.schema, MentionTable.schema)  # all tables of a catalog


def new_observers() -> Sequence[CatalogObserver]:
    return [ContentsObserver(), MentionTable()]
