"""Open an embedded log for writing, after a check of every record that a start depends on.

Theory of operation. The check writes nothing. A starting owner depends on the newest snapshot, the journal and the
input records after it, the prompts and responses of requests in flight, `groups`, `control`, and the end of each
partition. Recovery checks the first three: a standby follows the journal on a read-only connection. The owner then
takes over this standby, so recovery runs only once. The check does not read the history before the snapshot, which can
have any length; `forebay replay verify` does.
"""

import asyncio
from pathlib import Path

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.events.topics import CONTROL, DECISIONS, GROUPS, INPUTS, TOKENS
from forebay.live.owner.recorded_requests import SubmissionReader
from forebay.live.router.standby import RecoveryDiverged, Standby
from forebay.transport.base import LogError, LogSync, PolicyNotAllowed
from forebay.transport.history.reader import PAGE_RECORDS, OtherRules
from forebay.transport.sqlite.log import LogUnusable, SqliteLog
from forebay.transport.sqlite.schema import LogEmpty, WriterLock, check_place


async def open_checked(
    path: Path | None, partition: int, custom: CustomPolicies = ONLY_BUILT_IN, *, sync: LogSync = "normal"
) -> tuple[SqliteLog, Standby | None]:
    """Open a log for writing, and return it with a standby that has followed its journal to the end.

    Args:
        path: File of the log, or None for a log in memory.
        partition: Control partition of the group.
        custom: Custom policies that this process may run.
        sync: Whether an acknowledged append survives a power loss (`full`), or only the death of the process.

    Returns:
        The log, and the standby. The standby is None for a new log and for a log in memory.

    Raises:
        LogUnusable: The file is not a log, or a part that a start depends on is damaged.
        OtherRules: A program with other decision rules wrote the journal.
        RecoveryDiverged: The recorded events lead to other decisions in this version.
        PolicyNotAllowed: A recorded decision was made by a custom policy that this process may not run.
    """
    if path is None:
        return SqliteLog.open(None), None
    check_place(path, readonly=False)
    lock = WriterLock(path)
    try:
        standby = await _check(path, partition, custom)
    except BaseException:
        lock.close()
        raise
    log = SqliteLog.open(path, lock=lock, sync=sync)
    if standby is not None:
        standby.continue_on(log)
    return log, standby


async def _check(path: Path, partition: int, custom: CustomPolicies) -> Standby | None:
    reader = _reader(path)
    if reader is None:
        return None
    try:
        if reader.recording is not None:
            return None  # opening a recording for writing fails with its own message
        return await check_trusted(reader, partition, custom)
    except (OtherRules, RecoveryDiverged, PolicyNotAllowed):
        raise
    except LogError as error:
        reason = str(error).removeprefix(f"{path}: ").removesuffix("restore a copy").rstrip(":; ")
        raise LogUnusable(
            f"{path}: forebay cannot start, because the log is damaged: {reason}; restore a copy of the file or pass a"
            f" new file to --log (`forebay replay verify {path}` shows how far the file is intact)"
        ) from error
    finally:
        reader.close()


def _reader(path: Path) -> SqliteLog | None:
    """Open the file read-only; return None if it holds no log yet."""
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        return SqliteLog.open(path, readonly=True)
    except LogEmpty:
        return None


async def check_trusted(log: SqliteLog, partition: int, custom: CustomPolicies = ONLY_BUILT_IN) -> Standby:
    """Read all records that a start depends on, and return a standby that has followed the journal to its end.

    Raises LogError for the first part that is damaged or missing.
    """
    log.check_ends()
    standby = Standby(log, partition, custom=custom, waits_for_seal=True)
    await standby.catch_up(await log.end(DECISIONS.name, partition))
    await standby.prepare_claim()
    view = standby.world.view
    for topic in INPUTS:
        end, applied = await log.end(topic.name, partition), view.get(topic.name, 0)
        if end < applied:
            place = f"{topic.name}/{partition}"
            raise LogError(f"{place} ends at offset {end}, but the owner applied {applied} records: some were lost")
        await _read(log, topic.name, partition, applied)
    for name, number in ((GROUPS.name, 0), (CONTROL.name, partition)):
        await _read(log, name, number, await log.begin(name, number))
    for slot, first in (await reply_starts(log, partition, standby)).items():
        end = await log.end(TOKENS.name, slot)
        if end < first:
            raise LogError(
                f"{TOKENS.name}/{slot} ends at offset {end}, but the response of a request in flight begins at {first}:"
                " the log lost records"
            )
        await _read(log, TOKENS.name, slot, max(first, await log.begin(TOKENS.name, slot)))
    return standby


async def reply_starts(log: SqliteLog, partition: int, standby: Standby) -> dict[int, int]:
    """Return the reply slots of the requests in flight, each with the lowest offset at which a response may begin.

    Raises LogError if the submission of a request is damaged or missing.
    """
    reader = SubmissionReader(log, partition)
    starts: dict[int, int] = {}
    for request in standby.world.requests.active():
        submitted = await reader.at(request.submitted.offset)
        slot = submitted.reply_slot
        starts[slot] = min(submitted.reply_from, starts.get(slot, submitted.reply_from))
        await asyncio.sleep(0)
    return starts


async def _read(log: SqliteLog, topic: str, partition: int, offset: int) -> None:
    """Read a partition from an offset to its end, which verifies the checksum of every record."""
    end = await log.end(topic, partition)
    while offset < end:
        records = await log.read(topic, partition, offset, min(PAGE_RECORDS, end - offset))
        if not records:
            raise LogError(f"{topic}/{partition}: the records at offsets {offset} to {end - 1} are missing")
        offset = records[-1].offset + 1
        await asyncio.sleep(0)
