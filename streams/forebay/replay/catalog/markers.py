"""Events of interest on the time axis, as sentences. Queries that would return too many of them merge them.

A pass over the journal collects them; those of the planner come from its own topic.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, get_args

import msgspec

from forebay.core.state.fleet import FleetWorker, WorkerPhase
from forebay.core.step import AnyDecision
from forebay.core.world import CORE_VERSION, World
from forebay.events.codec import DecodeError, decode
from forebay.events.control import (
    BusyThresholdsSet,
    DisaggregationSet,
    PolicySet,
    PoolConfigured,
    PoolSetting,
    WorkerCommanded,
)
from forebay.events.decisions import CommandSent, OwnerClaimed
from forebay.events.fleet import WorkerFact, WorkerJoined
from forebay.events.scaling import PlannerPaused, PoolSizeSet, ScalingDecided, ScalingEvent
from forebay.events.topics import CONTROL, DECISIONS, FLEET, SCALING
from forebay.journal.release import rules_text
from forebay.replay.catalog.facts import Marker, MarkerKind
from forebay.replay.catalog.request_steps import CatalogRequest
from forebay.replay.catalog.store import Store
from forebay.replay.moment import flat
from forebay.replay.scaling.reader import PARTITION, has_scaling, pool_text
from forebay.replay.takeover import Takeover
from forebay.transport.base import Log, records_of

KINDS: tuple[MarkerKind, ...] = get_args(MarkerKind)
SECOND_US = 1_000_000
MARKERS_MAX = 2_000  # markers that a query returns
REASONS_NAMED = 3  # in a sentence
REASONS_COUNTED = 16  # errors of engines may all differ; the others count as one more reason
REASON_CHARS_MAX = 60
CHANGES_MAX = 4  # settings in a sentence; the number of all others is added
NAMES_MAX = 3
VALUE_CHARS_MAX = 40
RECORDS_MAX = 10_000  # records that one call reads: about 50 ms of work
POOLS_MAX = 3  # pools in a sentence
_POSITION = "scaling_offset"  # offset of the first record that is not in the catalog
PHASE_KINDS: dict[WorkerPhase, MarkerKind] = {
    WorkerPhase.READY: "worker_joined",
    WorkerPhase.SUSPECT: "worker_suspect",
    WorkerPhase.DRAINING: "worker_draining",
    WorkerPhase.LOST: "worker_lost",
}
MERGED: dict[MarkerKind, str] = {
    "takeover": "takeovers",
    "worker_joined": "workers joined",
    "worker_suspect": "workers became suspect",
    "worker_draining": "workers began to drain",
    "worker_lost": "workers were lost",
    "configuration": "configuration changes",
    "command": "commands",
    "scaling": "scaling events",
    "rejections": "requests rejected",
    "failures": "requests failed",
}
# `reasons` has the counts by reason of the markers that count requests. For a takeover it has the `Takeover`.
SCHEMA = """
CREATE TABLE markers (
    kind TEXT, at_us INTEGER, topic TEXT, offset INTEGER, count INTEGER, text TEXT, reasons TEXT,
    PRIMARY KEY (kind, at_us, topic, offset)
) WITHOUT ROWID;
"""

MarkerRow = tuple[MarkerKind, int, str, int, int, str, str]

PoolsInEffect = dict[str, PoolConfigured]


def settings_text(event: PoolSetting, before: PoolsInEffect, after: PoolsInEffect) -> str:
    """Return what an event changes in the settings. Empty if it changes nothing, for example for an unknown model."""
    match event:
        case PoolConfigured():
            text = _pool_text(event, before)
        case BusyThresholdsSet():
            changes = _changes(event.model, before, after, "busy")
            text = f"Busy thresholds of {event.model}: {join_changes(changes)}" if changes else ""
        case DisaggregationSet():
            changes = _changes(event.model, before, after, "disagg")
            text = f"Disaggregation of {event.model}: {join_changes(changes)}" if changes else ""
        case PolicySet():
            text = _mode_text(event.pool, before, after)
        case _:
            text = event.summary
    return text and _sentence(text, "" if isinstance(event, PoolConfigured) else event.operator)


def _changes(model: str, before: PoolsInEffect, after: PoolsInEffect, name: Literal["busy", "disagg"]) -> list[str]:
    """Return each change that an event made in a part of the router configuration of any pool of a model, once."""
    role = "decode" if name == "disagg" else None
    pools = [pool for pool, new in after.items() if new.model == model and role in (None, new.role)]
    changes = (changes_of(getattr(before[one].router, name), getattr(after[one].router, name)) for one in pools)
    return list(dict.fromkeys(chain.from_iterable(changes)))


def modes_text(before: PoolsInEffect, after: PoolsInEffect) -> str:
    """Return the pools whose router mode a new owner changed, because it may not run their policy. Empty if none."""
    texts = (_mode_text(pool, before, after) for pool in after)
    text = "; ".join(text for text in texts if text)
    return text and f"{text}, because the new owner may not run the previous policy."


def command_text(event: WorkerCommanded, sent: CommandSent | None) -> str:
    """Return what an operator's command does. `sent` is the owner's decision; None for a repeated command."""
    command = event.command
    named = f"{command.action} {command.lora_name}".rstrip()
    if sent is not None and sent.reason is not None:
        text = f"Command {named} for {event.model} was rejected: {sent.reason}"
    else:
        targets = [one.worker_id for one in sent.targets] if sent is not None else list(event.worker_ids)
        text = f"Command {named} was sent to {join_names(targets, 'worker') if targets else event.model}"
    return _sentence(text, event.operator)


def changes_of(before: msgspec.Struct, after: msgspec.Struct) -> list[str]:
    """Return the fields that differ as `name old → new`, with dotted names for parts of a part."""
    old, new = dict(flat(before)), dict(flat(after))
    return [_change_text(name, old[name], new[name]) for name in new if old[name] != new[name]]


def join_changes(changes: list[str]) -> str:
    """Return changes as text, with the number of those above `CHANGES_MAX`."""
    more = len(changes) - CHANGES_MAX
    return ", ".join(changes[:CHANGES_MAX]) + (f" and {more} more" if more > 0 else "")


def join_names(names: Iterable[str], noun: str) -> str:
    """Return names after their noun, for example `workers a and b` or `5 workers`."""
    found = list(names)
    if len(found) == 1:
        return f"{noun} {found[0]}"
    if len(found) <= NAMES_MAX:
        return f"{noun}s {', '.join(found[:-1])} and {found[-1]}"
    return f"{len(found)} {noun}s"


def _mode_text(pool: str, before: PoolsInEffect, after: PoolsInEffect) -> str:
    modes = [pools[pool].router.mode if pool in pools else "none" for pools in (before, after)]
    return f"Pool {pool}: mode {modes[0]} → {modes[1]}" if modes[0] != modes[1] else ""


def _pool_text(event: PoolConfigured, before: PoolsInEffect) -> str:
    known = before.get(event.pool)
    if known is None:
        return f"Pool {event.pool} serves {event.model} with router mode {event.router.mode}"
    effective = msgspec.structs.replace(known, at_us=event.at_us)
    changes = [change.removeprefix("router.") for change in changes_of(effective, event)]
    return f"Pool {event.pool}: {join_changes(changes)}" if changes else ""


def _sentence(text: str, operator: str) -> str:
    return f"{text} (by {operator})." if operator else f"{text}."


def _change_text(name: str, old: Any, new: Any) -> str:
    if isinstance(old, tuple):  # the classes of a queue
        return f"{name} changed"
    return f"{name} {_value(old)} → {_value(new)}"


def _value(value: Any) -> str:
    if value is None or value == "":
        return "off"
    text = ("yes" if value else "no") if isinstance(value, bool) else str(value)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}…"


@dataclass(slots=True)
class SecondTally:
    """Requests that were rejected or failed within one second of the owner's clock."""

    at_us: int = -1
    topic: str = ""
    offset: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class MarkerRecorder:
    def __init__(self) -> None:
        self._rows: list[MarkerRow] = []
        self.takeover: Takeover | None = None  # the newest one; `write` writes its state
        self._moved: list[tuple[int]] = []  # offsets of claims whose markers may have got another time or text
        self._pools: PoolsInEffect = {}
        self._phases: dict[str, tuple[int, WorkerPhase]] = {}
        self._tallies: dict[MarkerKind, SecondTally] = {"rejections": SecondTally(), "failures": SecondTally()}

    def open(self, connection: sqlite3.Connection, world: World) -> None:
        self.resume(world)
        select = "SELECT * FROM markers WHERE kind = ? ORDER BY at_us DESC LIMIT 1"
        newest_claim = "SELECT * FROM markers WHERE kind = 'takeover' ORDER BY offset DESC LIMIT 1"
        for row in connection.execute(newest_claim):
            self.takeover = msgspec.json.decode(row[-1], type=Takeover)
        for kind in self._tallies:
            for _, at_us, topic, offset, _, _, reasons in connection.execute(select, [kind]):
                self._tallies[kind] = SecondTally(at_us, topic, offset, Counter(json.loads(reasons)))

    def resume(self, world: World) -> None:
        """Continue in another world, after records that this program cannot derive."""
        self._pools = world.settings.in_effect()
        self._phases = {one.spec.worker_id: (one.worker_epoch, one.phase) for one in world.fleet.workers()}

    def add_claim(self, offset: int, record: OwnerClaimed, world: World) -> None:
        self._flush_takeover()
        self.takeover = takeover = Takeover.of(offset, record, world, self.takeover)
        before, self._pools = self._pools, world.settings.in_effect()
        if text := modes_text(before, self._pools):
            self._rows.append(("configuration", takeover.at_us, DECISIONS.name, offset, 1, text, ""))

    def add_fleet_event(self, event: WorkerJoined | WorkerFact, offset: int, now_us: int, world: World) -> None:
        """Add a fleet event, unless the owner ignored it."""
        worker_id = event.spec.worker_id if isinstance(event, WorkerJoined) else event.worker_id
        before, worker = self._phases.get(worker_id), world.fleet.get(worker_id)
        after = None if worker is None else (worker.worker_epoch, worker.phase)
        if after == before:
            return
        if after is None:
            self._phases.pop(worker_id, None)
            phase = WorkerPhase.LOST
        else:
            self._phases[worker_id] = after
            phase = after[1]
        reason = event.reason.strip().rstrip(".") if isinstance(event, WorkerFact) else ""
        text = _worker_text(worker_id, phase, before, worker) + (f": {reason}." if reason else ".")
        self._rows.append((PHASE_KINDS[phase], now_us, FLEET.name, offset, 1, text, ""))

    def add_settings(self, event: PoolSetting, offset: int, now_us: int, world: World) -> None:
        before, self._pools = self._pools, world.settings.in_effect()
        text = settings_text(event, before, self._pools)
        if text:
            self._rows.append(("configuration", now_us, CONTROL.name, offset, 1, text, ""))

    def add_command(self, event: WorkerCommanded, offset: int, now_us: int, decisions: Sequence[AnyDecision]) -> None:
        sent = next((one for one in decisions if isinstance(one, CommandSent)), None)
        self._rows.append(("command", now_us, CONTROL.name, offset, 1, command_text(event, sent), ""))

    def count_end(self, request: CatalogRequest, topic: str, offset: int, now_us: int) -> None:
        kind: MarkerKind = "rejections" if request.state == "rejected" else "failures"
        tally, second_us = self._tallies[kind], now_us - now_us % SECOND_US
        if tally.at_us != second_us:
            self._flush(kind)
            tally = self._tallies[kind] = SecondTally(second_us, topic, offset)
        reason = request.reason if request.state != "failed" else request.reason.partition("\n")[0] or "engine error"
        reason = reason[:REASON_CHARS_MAX]
        if reason not in tally.reasons and len(tally.reasons) == REASONS_COUNTED:
            reason = "other"
        tally.reasons[reason] += 1

    def write(self, connection: sqlite3.Connection) -> None:
        for kind in self._tallies:
            self._flush(kind)
        self._flush_takeover()
        connection.executemany("DELETE FROM markers WHERE kind = 'takeover' AND offset = ?", self._moved)
        self._moved.clear()
        _insert(connection, self._rows)
        self._rows.clear()

    def _flush_takeover(self) -> None:
        if (one := self.takeover) is not None:
            state = msgspec.json.encode(one).decode()
            self._moved.append((one.offset,))
            self._rows.append(("takeover", one.at_us, DECISIONS.name, one.offset, 1, _takeover_text(one), state))

    def _flush(self, kind: MarkerKind) -> None:
        tally = self._tallies[kind]
        if tally.at_us >= 0:
            reasons = json.dumps(tally.reasons)
            total, text = tally.reasons.total(), _tally_text(kind, tally.reasons)
            self._rows.append((kind, tally.at_us, tally.topic, tally.offset, total, text, reasons))


def add_markers(connection: sqlite3.Connection, markers: Iterable[Marker]) -> None:
    """Write markers that were not collected by a pass. A marker that the catalog already has changes nothing."""
    _insert(connection, ((one.kind, one.at_us, one.topic, one.offset, one.count, one.text, "") for one in markers))


def markers(connection: sqlite3.Connection, from_us: int, to_us: int, limit: int) -> list[Marker]:
    """Return the markers from `from_us` up to `to_us`, exclusive, in order of time.

    If there are more than `limit`, markers of the most frequent kinds are merged with their neighbours of the same
    kind. The count of a merged marker is the number of its events, and time and record are those of the first one.
    """
    span = "kind = ? AND at_us >= ? AND at_us < ?"
    select = f"SELECT count(*) FROM markers WHERE {span}"
    counts = {kind: connection.execute(select, [kind, from_us, to_us]).fetchone()[0] for kind in KINDS}
    left, found = max(1, min(limit, MARKERS_MAX)), list[Marker]()
    kinds = sorted((kind for kind in KINDS if counts[kind]), key=lambda kind: counts[kind])
    for number, kind in enumerate(kinds):
        share = left // (len(kinds) - number)
        if counts[kind] <= share:
            rows = connection.execute(f"SELECT * FROM markers WHERE {span}", [kind, from_us, to_us])
            some = [_marker(row) for row in rows]
        else:
            some = _merged(connection, kind, from_us, to_us, share) if share else []
        left -= len(some)
        found += some
    return sorted(found, key=lambda one: (one.at_us, one.topic, one.offset))


def remove_before(connection: sqlite3.Connection, now_us: int) -> None:
    for kind in KINDS:
        connection.execute("DELETE FROM markers WHERE kind = ? AND at_us < ?", [kind, now_us])


def _merged(connection: sqlite3.Connection, kind: MarkerKind, from_us: int, to_us: int, share: int) -> list[Marker]:
    width_us = -(-(to_us - from_us) // share)
    # SQLite takes the columns without an aggregate from the row with the minimum.
    rows = connection.execute(
        "SELECT min(at_us), max(at_us), topic, offset, sum(count), count(*), text, reasons FROM markers"
        " WHERE kind = ? AND at_us >= ? AND at_us < ? GROUP BY (at_us - ?) / ?",
        [kind, from_us, to_us, from_us, width_us],
    )
    found = []
    for at_us, last_us, topic, offset, count, merged, text, state in rows:
        together = f"{count:,} {MERGED[kind]} within {_seconds(last_us - at_us)}.", ""
        found.append(_marker((kind, at_us, topic, offset, count, *((text, state) if merged == 1 else together))))
    return found


def _insert(connection: sqlite3.Connection, rows: Iterable[MarkerRow]) -> None:
    connection.executemany("INSERT OR REPLACE INTO markers VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


def _marker(row: MarkerRow) -> Marker:
    kind, at_us, topic, offset, count, text, state = row
    outage_us = msgspec.json.decode(state, type=Takeover).outage_us if kind == "takeover" and state else 0
    return Marker(at_us=at_us, kind=kind, text=text, topic=topic, offset=offset, count=count, outage_us=outage_us)


def _takeover_text(takeover: Takeover) -> str:
    claim, previous_id = takeover.claim, takeover.previous_id
    if not previous_id:
        text = f"Router {claim.owner_id} became the owner"
    elif claim.owner_id == previous_id:
        text = f"Router {claim.owner_id} claimed the group again"
    else:
        text = f"Router {claim.owner_id} took over from {previous_id}"
    text += f" after {takeover.text}." if takeover.outage_us else "."
    if claim.core_version != CORE_VERSION:
        rules = rules_text(claim.core_version, claim.release)
        text += f" It has {rules}, so this console shows no moments of it."
    return text


def _worker_text(
    worker_id: str, phase: WorkerPhase, before: tuple[int, WorkerPhase] | None, worker: FleetWorker | None
) -> str:
    match phase:
        case WorkerPhase.READY if before is not None:
            return f"Worker {worker_id} is ready again"
        case WorkerPhase.READY:
            return f"Worker {worker_id} joined" + ("" if worker is None else f" pool {worker.spec.pool}")
        case WorkerPhase.SUSPECT:
            return f"Worker {worker_id} is suspect"
        case WorkerPhase.DRAINING:
            return f"Worker {worker_id} is draining"
        case WorkerPhase.LOST if before is not None and before[1] is WorkerPhase.DRAINING:
            return f"Worker {worker_id} left after draining"
        case WorkerPhase.LOST:
            return f"Worker {worker_id} was lost"


def _tally_text(kind: MarkerKind, reasons: Counter[str]) -> str:
    total = reasons.total()
    verb = "rejected" if kind == "rejections" else "failed"
    named = [
        f"{reason} ({count})" if len(reasons) > 1 else reason for reason, count in reasons.most_common(REASONS_NAMED)
    ]
    more = len(reasons) - len(named)
    return (
        f"{total:,} request{'s' if total > 1 else ''} {verb}: {', '.join(named)}"
        + (f" and {more} other reasons" if more else "")
        + "."
    )


def _seconds(duration_us: int) -> str:
    return f"{max(1, round(duration_us / SECOND_US)):,} s"


async def add_scaling_markers(store: Store, log: Log, group: str) -> bool:
    """Add the markers of at most `RECORDS_MAX` further records to a catalog. Return whether there were any records.

    Only the pools of `group` count; empty for all groups.
    """
    if not await has_scaling(log):
        return False
    offset = int(store.meta(_POSITION) or 0)
    begin = max(offset, await log.begin(SCALING.name, PARTITION))
    end = max(begin, min(begin + RECORDS_MAX, await log.end(SCALING.name, PARTITION)))
    if end == offset:
        return False
    found = []
    async for record in records_of(log, SCALING, PARTITION, begin, end):
        try:
            event: ScalingEvent = decode(SCALING, record.value)
        except DecodeError:
            continue
        if text := _text(event, group):
            at_us = event.at_us or record.at_us
            found.append(Marker(at_us=at_us, kind="scaling", text=text, topic=SCALING.name, offset=record.offset))
    with store.transaction() as connection:
        add_markers(connection, found)
        store.set_meta(_POSITION, str(end))
    return True


def _text(event: ScalingEvent, group: str) -> str:
    match event:
        case ScalingDecided():
            changes = [
                f"{pool_text((one.group, one.pool))} from {one.from_size} to {one.to_size} ({one.reason})"
                for one in event.pools
                if one.to_size != one.from_size and group in ("", one.group)
            ]
            more = len(changes) - POOLS_MAX
            named = ", ".join(changes[:POOLS_MAX]) + (f" and {more} more pools" if more > 0 else "")
            if changes:
                return f"The planner {'recommends to scale' if event.advisory else 'scales'} {named}."
        case PoolSizeSet() if group in ("", event.group):
            pool = pool_text((event.group, event.pool))
            if event.size is None:
                return _sentence(f"Pool {pool} was released to the planner", event.operator)
            return _sentence(f"Pool {pool} was set to {event.size} workers", event.operator)
        case PlannerPaused():
            return _sentence(f"The planner was {'paused' if event.paused else 'resumed'}", event.operator)
    return ""
