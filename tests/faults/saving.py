"""Write the log of a simulation to a file of the embedded log, which the commands of forebay read."""

import asyncio
from pathlib import Path

from forebay.transport.base import Draft, Record
from forebay.transport.sqlite.log import SqliteLog

APPEND_MAX = 500


def save_log(partitions: dict[tuple[str, int], list[Record]], path: Path) -> None:
    """Write the records of all partitions at their offsets to a new file. The times of the appends are not kept."""
    path.unlink(missing_ok=True)
    asyncio.run(_save(partitions, path))


async def _save(partitions: dict[tuple[str, int], list[Record]], path: Path) -> None:
    log = SqliteLog.open(path)
    try:
        for (topic, partition), records in partitions.items():
            drafts = [Draft(topic, partition, record.value, record.key, record.headers) for record in records]
            for begin in range(0, len(drafts), APPEND_MAX):
                await log.append(drafts[begin : begin + APPEND_MAX])
    finally:
        log.close()
