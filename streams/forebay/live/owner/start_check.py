"""Opens an embedded log to write, after a check of all that a start trusts: nothing is written before it has passed.

Theory of operation. An owner that starts trusts the newest snapshot, the journal after it, the input records after
it, the prompts and answers of requests in flight, `groups`, `control`, and the end of each partition, where it
appends. Recovery itself is the check of the first three: a standby follows the journal on a read-only connection and
is handed to the owner, so that the check costs no second recovery. The history before the snapshot is not read: it
may be of any length, and `forebay replay verify` checks it.
"""

import asyncio
from pathlib import Path

from forebay.events.topics import CONTROL, DECISIONS, GROUPS, INPUTS, TOKENS
from forebay.live.owner.recorded_requests import AskedReader
from forebay.live.router.standby import RecoveryDiverged, Standby
from forebay.transport.base import LogError
from forebay.transport.history.reader import PAGE_RECORDS, OtherRules
from forebay.transport.sqlite.log import LogUnusable, SqliteLog
from forebay.transport.sqlite.schema import LogEmpty, WriterLock, check_place


async def open_checked(path: Path | None, partition: int) -> tuple[SqliteLog, Standby | None]:
    """Open a log to write, and return it with a standby that has followed its journal to the end.

    The standby is None for a new log and for a log in memory.

    Raises:
        LogUnusable: the file is not a log that can be opened, or a part that a start trusts is damaged.
        OtherRules: the journal was decided by another version of the rules.
        RecoveryDiverged: the rules of this version lead to other decisions.
    """
    if path is None:
        return SqliteLog.open(None), None
    check_place(path, readonly=False)
    lock = WriterLock(path)
    try:
        standby = await _check(path, partition)
    except BaseException:
        lock.close()
        raise
    log = SqliteLog.open(path, lock=lock)
    if standby is not None:
        standby.continue_on(log)
    return log, standby


async def _check(path: Path, partition: int) -> Standby | None:
    reader = _reader(path)
    if reader is None:
        return None
    try:
        if reader.recording is not None:
            return None  # which is refused, with its own reason, when it is opened to write
        return await check_trusted(reader, partition)
    except (OtherRules, RecoveryDiverged):
        raise
    except LogError as error:
        reason = str(error).removeprefix(f"{path}: ").removesuffix("restore a copy").rstrip(":; ")
        raise LogUnusable(
            f"{path}: a part that a start needs is damaged: {reason}; restore a copy of the file or give --log a new"
            f" one (`forebay replay verify {path}` shows how far it is intact)"
        ) from error
    finally:
        reader.close()


def _reader(path: Path) -> SqliteLog | None:
    """Open the file to read; None if it holds no log yet."""
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        return SqliteLog.open(path, readonly=True)
    except LogEmpty:
        return None


async def check_trusted(log: SqliteLog, partition: int) -> Standby:
    """Read all that a start trusts, and return a standby that has followed the journal to its end.

    Raises LogError for the first part that is damaged or missing.
    """
    log.check_ends()
    standby = Standby(log, partition)
    await standby.catch_up(await log.end(DECISIONS.name, partition))
    view = standby.world.view
    for topic in INPUTS:
        end, applied = await log.end(topic.name, partition), view.get(topic.name, 0)
        if end < applied:
            raise LogError(f"{topic.name}/{partition} ends at offset {end}, but {applied} records of it were applied")
        await _read(log, topic.name, partition, applied)
    for name, number in ((GROUPS.name, 0), (CONTROL.name, partition)):
        await _read(log, name, number, await log.begin(name, number))
    for slot, first in (await reply_starts(log, partition, standby)).items():
        end = await log.end(TOKENS.name, slot)
        if end < first:
            raise LogError(f"{TOKENS.name}/{slot} ends at offset {end}, but a request in flight began at {first}")
        await _read(log, TOKENS.name, slot, max(first, await log.begin(TOKENS.name, slot)))
    return standby


async def reply_starts(log: SqliteLog, partition: int, standby: Standby) -> dict[int, int]:
    """Return the reply slots of the requests in flight, with the lowest offset at which one of the answers may begin.

    Raises LogError when the submission of a request is damaged or missing.
    """
    asked = AskedReader(log, partition)
    starts: dict[int, int] = {}
    for request in standby.world.requests.active():
        submitted = await asked.at(request.offset)
        slot = submitted.reply_slot
        starts[slot] = min(submitted.reply_from, starts.get(slot, submitted.reply_from))
        await asyncio.sleep(0)
    return starts


async def _read(log: SqliteLog, topic: str, partition: int, offset: int) -> None:
    """Read a partition from an offset to its end, which checks every record."""
    end = await log.end(topic, partition)
    while offset < end:
        records = await log.read(topic, partition, offset, min(PAGE_RECORDS, end - offset))
        if not records:
            raise LogError(f"{topic}/{partition}: the records at offsets {offset} to {end - 1} are missing")
        offset = records[-1].offset + 1
        await asyncio.sleep(0)
