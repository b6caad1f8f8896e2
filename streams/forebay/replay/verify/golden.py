"""Recordings as tests: an incident of yesterday, verified by every program of tomorrow.

RECORDINGS = sorted(Path("tests/logs").glob("*.rec"))

@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_recorded_decisions(recording: Path) -> None:
check_recording(recording)
"""

import asyncio
from collections.abc import Iterator, Set
from pathlib import Path

import msgspec

from forebay.core.routing.policies import PolicyUnusable, policy_class
from forebay.events.decisions import CostTerms
from forebay.replay.verify.cost_tables import Row, Table
from forebay.replay.verify.divergence import Told
from forebay.replay.verify.verify import Report, verify
from forebay.transport.base import Log
from forebay.transport.history.groups import groups_of, pools_of
from forebay.transport.history.reader import OtherRules
from forebay.transport.sqlite.log import SqliteLog

ROWS_SHOWN = 16  # of a cost table


def check_recording(path: Path | str, allow: Set[str] = frozenset()) -> dict[str, Report]:
    """Derive every decision of a recording again; what was found, by group. Not for use inside an event loop.

    `allow` holds names of what may stay unverified, as of `forebay replay verify --allow`.

    Raises:
        AssertionError: a decision comes out otherwise, or cannot be derived by this program. The text has the first
            such decision, the fields that differ and both cost tables; or says `OtherRules` and what to do, when the
            program decides by other rules than the one that wrote it.
        LogError: the file is damaged, cut off, or no recording.
    """
    return asyncio.run(_check(Path(path), allow))


async def _check(path: Path, allow: Set[str]) -> dict[str, Report]:
    log = SqliteLog.open(path, readonly=True)
    try:
        log.check()
        reports = {name: await _verified(path, log, at, allow) for name, at in (await groups_of(log)).items()}
    finally:
        log.close()
    if not any(report.decisions for report in reports.values()):
        raise AssertionError(f"{path}: holds no decision")
    return reports


async def _verified(path: Path, log: Log, partition: int, allow: Set[str]) -> Report:
    for pool in await pools_of(log, partition):
        try:
            policy_class(pool.router.mode)
        except PolicyUnusable as unusable:
            raise AssertionError(f"{path}: its pool {pool.pool} has a policy of its own: {unusable}") from unusable
    try:
        report = await verify(log, partition, allow=allow)
    except OtherRules as other:
        text = f"{path}: OtherRules: {other}. Record it again, or keep the program that wrote it to verify it with"
        raise AssertionError(text) from other
    if report.divergence is not None:
        raise AssertionError("\n".join([f"{path}: {_headline(report.divergence)}", *_lines(report.divergence)]))
    if report.failed:
        found = ", ".join(f"{count} {name}" for name, count in report.failed.items())
        raise AssertionError(f"{path}: not verified: {found}; allow that by name, if it is meant to be so")
    return report


def _headline(told: Told) -> str:
    return f"divergence at journal offset {told.offset}, a {told.recorded['type']}: {told.reason}"


def _lines(told: Told) -> Iterator[str]:
    if told.hint:
        yield f"  {told.hint}"
    for name, values in told.differs.items():
        yield f"  {name}: recorded {_short(values['recorded'])}, derived {_short(values['derived'])}"
    if told.derived is None:
        yield f"  recorded {_short(told.recorded)}, derived nothing"
    if told.table is not None:
        yield from _table_lines(told.table)
    for event in told.events:
        yield f"  applied before: {event.topic} {event.offset} {event.type}: {event.text}"
    yield "  more: forebay replay verify, replay explain"


def _table_lines(table: Table) -> Iterator[str]:
    yield f"  cost table of {table.request_id}: derived {table.digest}, recorded {table.recorded_digest}"
    ordered = sorted(table.rows, key=lambda row: not (row.place or row.recorded_place))
    for row in ordered[:ROWS_SHOWN]:
        yield f"    derived  {_row(row, row.derived, row.place)}"
        if row.recorded is not None:
            yield f"    recorded {_row(row, row.recorded, row.recorded_place)}"
    if len(ordered) > ROWS_SHOWN:
        yield f"    and {len(ordered) - ROWS_SHOWN} more candidates"


def _row(row: Row, terms: CostTerms | None, place: str) -> str:
    told = "no candidate" if terms is None else _short(terms)
    return f"{row.worker_id}/{row.rank} {told} {place}".rstrip()


def _short(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
