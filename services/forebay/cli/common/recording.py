"""Where a command reads recorded events from: a log file, a recording or Kafka, and one group in it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.cluster import kafka_settings
from forebay.cli.common.errors import fail
from forebay.events.topics import DECISIONS, GROUPS, INPUTS, SNAPSHOTS
from forebay.transport.base import Log
from forebay.transport.history.groups import groups_of
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.topics import partitions_of
from forebay.transport.sqlite.log import SqliteLog

LogArgument = Annotated[
    Path | None,
    typer.Argument(help="A log file of `forebay up`, which may be in use, or a recording. Not with --kafka."),
]

GroupOption = Annotated[str, typer.Option(help="The model in question, if there are several.")]


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

    @property
    def name(self) -> str:
        """What errors call it."""
        return str(self.log) if self.log is not None else f"{self.namespace} on {self.kafka}"

    @asynccontextmanager
    async def source(self) -> AsyncIterator[SqliteLog | KafkaLog]:
        """The log, to be read only. Raises LogError."""
        if self.log is not None:
            recording = SqliteLog.open(self.log, readonly=True)
            try:
                yield recording
            finally:
                recording.close()
            return
        assert self.kafka is not None
        settings = kafka_settings(self.kafka, self.namespace, self.kafka_config)
        there = await partitions_of(settings)
        missing = [topic.name for topic in (GROUPS, DECISIONS, SNAPSHOTS, *INPUTS) if topic.name not in there]
        if missing:  # the client would ask for them again and again
            fail(f"{self.kafka} has no {settings.topic(missing[0])}; does --namespace say where the services write?")
        log = await KafkaLog.open(settings)
        try:
            yield log
        finally:
            await log.close()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[Log, int]]:
        """The log and the control partition of the group, to be read only. Raises LogError."""
        async with self.source() as log:
            yield log, self._partition(await groups_of(log))

    def _partition(self, placed: dict[str, int]) -> int:
        if self.group in placed:
            return placed[self.group]
        if not self.group and len(placed) == 1:
            return next(iter(placed.values()))
        known = ", ".join(sorted(placed)) or "none"
        wanted = f"there is no group {self.group}" if self.group else "say which --group"
        fail(f"{wanted}: {self.name} has {known}")
