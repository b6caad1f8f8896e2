"""Where a command reads recorded events from: a log file, or the partition of one group on Kafka."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.cluster import kafka_settings
from forebay.cli.errors import fail
from forebay.transport.base import Log
from forebay.transport.directory import Directory
from forebay.transport.kafka_log import KafkaLog
from forebay.transport.kafka_settings import KafkaSettings
from forebay.transport.sqlite_log import SqliteLog

LogArgument = Annotated[
    Path | None, typer.Argument(help="A log file of `forebay up`; it may be in use. Not with --kafka.")
]


@dataclass(frozen=True, slots=True)
class Recording:
    """What the options of a command name; either `log` or `kafka` is set."""

    log: Path | None
    kafka: str | None
    namespace: str
    kafka_config: Path | None
    group: str

    def require_one_source(self) -> None:
        """Ends the command unless there is one."""
        if (self.log is None) == (self.kafka is None):
            fail("give a log file or --kafka")

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[Log, int]]:
        """The log and the control partition, to be read only. Raises LogError."""
        if self.log is not None:
            recording = SqliteLog.open(self.log, readonly=True)
            try:
                yield recording, 0
            finally:
                recording.close()
            return
        assert self.kafka is not None
        settings = kafka_settings(self.kafka, self.namespace, self.kafka_config)
        log = await KafkaLog.open(settings)
        try:
            directory = Directory(log)
            await directory.start()
            directory.close()
            yield log, self._partition(settings, directory.groups.partitions)
        finally:
            await log.close()

    def _partition(self, settings: KafkaSettings, placed: dict[str, int]) -> int:
        if self.group in placed:
            return placed[self.group]
        if not self.group and len(placed) == 1:
            return next(iter(placed.values()))
        known = ", ".join(sorted(placed)) or "none"
        wanted = f"there is no group {self.group}" if self.group else "say which --group"
        fail(f"{wanted}: {settings.namespace} on {settings.bootstrap} has {known}")
