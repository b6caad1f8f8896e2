"""Source of recorded events: a log file, a recording or Kafka, and the group to read."""

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
    typer.Argument(help="Log file of `forebay up`, or a recording. Exclusive with --kafka."),
]

GroupOption = Annotated[str, typer.Option(help="Model to read, if the log has several.")]


@dataclass(frozen=True, slots=True)
class Recording:
    """Options that select a source of recorded events. Either `log` or `kafka` is set."""

    log: Path | None
    kafka: str | None
    namespace: str
    kafka_config: Path | None
    group: str

    def require_one_source(self) -> None:
        """End the command with an error unless the options name exactly one source."""
        if (self.log is None) == (self.kafka is None):
            fail("expected either a log file or --kafka")

    @property
    def name(self) -> str:
        """Name of the source for error messages: the path of the log, or the address of Kafka."""
        return str(self.log) if self.log is not None else f"{self.namespace} on {self.kafka}"

    @asynccontextmanager
    async def source(self) -> AsyncIterator[SqliteLog | KafkaLog]:
        """Open the log read-only. Raises LogError if it cannot be read."""
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
        if missing:  # the client would retry forever
            fail(f"{self.kafka} has no topic {settings.topic(missing[0])}; check --namespace")
        log = await KafkaLog.open(settings)
        try:
            yield log
        finally:
            await log.close()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[Log, int]]:
        """Open the log read-only. Yield it with the group's control partition. Raises LogError if it cannot be read."""
        async with self.source() as log:
            yield log, self._partition(await groups_of(log))

    def _partition(self, placed: dict[str, int]) -> int:
        if self.group in placed:
            return placed[self.group]
        if not self.group and len(placed) == 1:
            return next(iter(placed.values()))
        known = ", ".join(sorted(placed)) or "none"
        problem = f"--group {self.group}: unknown group" if self.group else "--group is required"
        fail(f"{problem}; groups of {self.name} are {known}")
