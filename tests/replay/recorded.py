"""Recorded groups in memory: the log that an owner would write for a driver's events and decisions."""

from pathlib import Path

from forebay.core.step import advance
from forebay.core.world import CORE_VERSION
from forebay.events.codec import encode
from forebay.events.decisions import JournalRecord, OwnerClaimed
from forebay.events.topics import DECISIONS, topic_named
from forebay.events.versions import EVENTS_VERSION
from forebay.replay.anonymize.anonymize import ReadOnlyLog
from forebay.transport.base import Draft, Record
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import Driver

GARBAGE = b"\xc1"


class MemoryLog(ReadOnlyLog):
    """Readable records with one partition per topic."""

    def __init__(self) -> None:
        self.topics: dict[str, list[bytes]] = {}

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        values = self.topics.get(topic, [])[offset : offset + limit]
        return [Record(topic, partition, number, 0, value) for number, value in enumerate(values, offset)]

    async def begin(self, topic: str, partition: int) -> int:
        return 0

    async def end(self, topic: str, partition: int) -> int:
        return len(self.topics.get(topic, ()))


def log_of(drive: Driver, undecodable: bytes = GARBAGE, policies: tuple[str, ...] = ()) -> MemoryLog:
    """Return the log of a driver that began with an empty world. Its end is sealed."""
    log = MemoryLog()
    for topic, event, _ in drive.applied:
        value = undecodable if event is None else encode(topic_named(topic), event)
        log.topics.setdefault(topic, []).append(value)
    claimed = OwnerClaimed(owner_id="o", core_version=CORE_VERSION, events_version=EVENTS_VERSION, policies=policies)
    journal: list[JournalRecord] = [claimed, *drive.decided, advance(drive.world)]
    log.topics[DECISIONS.name] = [encode(DECISIONS, record) for record in journal]
    return log


async def write(log: MemoryLog, path: Path) -> None:
    """Write the same records to a log file."""
    file = SqliteLog.open(path)
    try:
        for topic, values in log.topics.items():
            await file.append([Draft(topic, 0, value) for value in values])
    finally:
        file.close()
