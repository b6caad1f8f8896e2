"""Open an embedded log for writing, after a check of every record that a start depends on, and place its groups.

Theory of operation. The check writes nothing. A starting owner depends on the newest snapshot, the journal and the
input records after it, the prompts and responses of requests in flight, `groups`, `control`, and the end of each
partition. Recovery checks the first three: a standby follows the journal on a read-only connection. The owner then
takes over this standby, so recovery runs only once. The check does not read the journal before the snapshot, which can
have any length; `forebay verify` does.

A log of one model has no records on `groups`. Once a log has several models, `groups` has the control partition of
each of them, as on Kafka. The model that the log had alone keeps partition 0.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from forebay import runtime
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.events.codec import encode
from forebay.events.groups import GroupPlaced
from forebay.events.topics import CONTROL, DECISIONS, GROUPS, INPUTS, TOKENS
from forebay.journal.groups import groups_of
from forebay.journal.records import OtherRules, last_append_us
from forebay.live.owner.submissions import SubmissionReader
from forebay.live.standby import RecoveryDiverged, Standby
from forebay.transport.base import PAGE_RECORDS, Draft, LogError, LogSync, PolicyNotAllowed
from forebay.transport.directory import PARTITION as DIRECTORY
from forebay.transport.sqlite.log import LogUnusable, SqliteLog
from forebay.transport.sqlite.schema import LogEmpty, WriterLock, check_place

GROUPS_MAX = 64  # control partitions of a log with several models; each can use every 64th slot of a pool


class CheckedGroup(NamedTuple):
    """Group of a checked log, with a standby at the end of its journal; None for a new log and for a log in memory."""

    partition: int
    standby: Standby | None


class CheckedLog(NamedTuple):
    """Log opened for writing, and the number of control partitions that share the work slots."""

    log: SqliteLog
    groups: dict[str, CheckedGroup]
    partitions: int


async def open_checked(
    path: Path | None, models: Sequence[str], custom: CustomPolicies = ONLY_BUILT_IN, *, sync: LogSync = "normal"
) -> CheckedLog:
    """Open a log for writing, and assign a control partition to each model that has none.

    Without a path, the log is in memory. Raises LogUnusable if the file is not a log, a part that a start depends on is
    damaged, or no partition is free, and otherwise OtherRules, RecoveryDiverged or PolicyNotAllowed.
    """
    if path is None:
        return await _placed(SqliteLog.open(None), models, {})
    check_place(path, readonly=False)
    lock = WriterLock(path)
    try:
        standbys = await _check(path, models, custom)
    except BaseException:
        lock.close()
        raise
    log = SqliteLog.open(path, lock=lock, sync=sync)
    try:
        return await _placed(log, models, standbys)
    except BaseException:
        log.close()
        raise


async def _placed(log: SqliteLog, models: Sequence[str], standbys: dict[int, Standby]) -> CheckedLog:
    """Append the placements that the log lacks."""
    partitions = await _partitions_of(log, models)
    has_placements = await log.end(GROUPS.name, DIRECTORY) > 0
    if has_placements or len(models) > 1:
        known = await groups_of(log) if has_placements else models
        # The placements of this start are repeated: `groups_with_workers` finds its models by the last append.
        for names in ([name for name in partitions if name not in {*known, *models}], models):
            events = [GroupPlaced(group=one, partition=partitions[one], at_us=runtime.wall_us()) for one in names]
            await log.append([Draft(GROUPS.name, DIRECTORY, encode(GROUPS, one), one.group.encode()) for one in events])
        has_placements = True
    for standby in standbys.values():
        standby.continue_on(log)
    groups = {model: CheckedGroup(partitions[model], standbys.get(partitions[model])) for model in models}
    return CheckedLog(log, groups, GROUPS_MAX if has_placements else 1)


async def _partitions_of(log: SqliteLog, models: Sequence[str]) -> dict[str, int]:
    """Return the control partitions of all groups of a log and of `models`. Partitions are permanent."""
    if len(models) == 1 and not await log.end(GROUPS.name, DIRECTORY):
        return {models[0]: 0}  # also if the log had another model before
    partitions = {name: number for name, number in (await groups_of(log)).items() if name}
    for model in models:
        if model not in partitions:
            taken = set(partitions.values())
            free = next((number for number in range(GROUPS_MAX) if number not in taken), None)
            if free is None:
                raise LogUnusable(
                    f"the log has no control partition for the model {model}: all {GROUPS_MAX} belong to other models;"
                    " pass a new file to --log"
                )
            partitions[model] = free
    return partitions


async def _check(path: Path, models: Sequence[str], custom: CustomPolicies) -> dict[int, Standby]:
    reader = _reader(path)
    if reader is None:
        return {}
    try:
        if reader.recording is not None:
            return {}  # opening a recording for writing fails with its own message
        reader.check_ends()
        partitions = await _partitions_of(reader, models)
        return {partitions[model]: await check_trusted(reader, partitions[model], custom) for model in models}
    except (OtherRules, RecoveryDiverged, PolicyNotAllowed):
        raise
    except LogError as error:
        reason = str(error).removeprefix(f"{path}: ").removesuffix("restore a copy").rstrip(":; ")
        raise LogUnusable(
            f"{path}: forebay cannot start, because the log is damaged: {reason}; restore a copy of the file or pass a"
            f" new file to --log (`forebay verify {path}` shows how far the file is intact)"
        ) from error
    finally:
        reader.close()


def _reader(path: Path) -> SqliteLog | None:
    """Open the file read-only, None if it holds no log yet."""
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        return SqliteLog.open(path, readonly=True)
    except LogEmpty:
        return None


async def check_trusted(log: SqliteLog, partition: int, custom: CustomPolicies = ONLY_BUILT_IN) -> Standby:
    """Return a standby at the end of the journal after reading all records that a start depends on. Raises LogError."""
    standby = Standby(log, partition, custom=custom, waits_for_seal=True)
    await standby.catch_up(await log.end(DECISIONS.name, partition))
    await standby.prepare_claim()
    standby.owner_seen_us = await last_append_us(log, partition)  # by the process of the previous owner
    view = standby.world.view
    for topic in INPUTS:
        end, applied = await log.end(topic.name, partition), view.get(topic.name, 0)
        if end < applied:
            place = f"{topic.name}/{partition}"
            raise LogError(f"{place} ends at offset {end}, but the owner applied {applied} records: some were lost")
        await _read(log, topic.name, partition, applied)
    for name, number in ((GROUPS.name, 0), (CONTROL.name, partition)):
        await _read(log, name, number, await log.begin(name, number))
    for reply_slot, first in (await reply_starts(log, partition, standby)).items():
        end = await log.end(TOKENS.name, reply_slot)
        if end < first:
            raise LogError(
                f"{TOKENS.name}/{reply_slot} ends at offset {end}, but the response of a request in flight begins at"
                f" {first}: the log lost records"
            )
        await _read(log, TOKENS.name, reply_slot, max(first, await log.begin(TOKENS.name, reply_slot)))
    return standby


async def reply_starts(log: SqliteLog, partition: int, standby: Standby) -> dict[int, int]:
    """Return the lowest offset at which a response in flight may begin, by reply slot. Raises LogError."""
    reader = SubmissionReader(log, partition)
    starts: dict[int, int] = {}
    for request in standby.world.requests.active():
        submitted = await reader.at(request.submitted.offset)
        reply_slot = submitted.reply_slot
        starts[reply_slot] = min(submitted.reply_from, starts.get(reply_slot, submitted.reply_from))
        await asyncio.sleep(0)
    return starts


async def _read(log: SqliteLog, topic: str, partition: int, offset: int) -> None:
    """Read a partition to its end, which verifies the checksum of every record."""
    end = await log.end(topic, partition)
    while offset < end:
        records = await log.read(topic, partition, offset, min(PAGE_RECORDS, end - offset))
        if not records:
            raise LogError(f"{topic}/{partition}: the records at offsets {offset} to {end - 1} are missing")
        offset = records[-1].offset + 1
        await asyncio.sleep(0)
