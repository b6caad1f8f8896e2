"""Source of recorded events: a log file, a recording or Kafka, and the group to read."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from forebay.cli.common.cluster_options import NAMESPACE, NamespaceOption, PropertiesOption, kafka_settings
from forebay.cli.common.errors import fail
from forebay.cli.common.options import Argument, Option
from forebay.events.names import unknown_name
from forebay.processes.notices import complain
from forebay.transport.base import Log
from forebay.transport.kafka.settings import KafkaSettings

if TYPE_CHECKING:
    from forebay.core.routing.policies import CustomPolicies
    from forebay.transport.kafka.log import KafkaLog
    from forebay.transport.sqlite.log import SqliteLog

LogArgument = Annotated[Path | None, Argument(help="Log file of `forebay up`, or a recording. Exclusive with --kafka.")]
GroupOption = Annotated[str, Option(help="Model to read, if the log has several.")]


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """Options that select Kafka as the source of recorded events, unless `kafka` is None."""

    kafka: Annotated[
        str | None, Option("--kafka", metavar="HOST:PORT", help="Kafka bootstrap server to read from, as host:port.")
    ] = None
    namespace: NamespaceOption = NAMESPACE
    kafka_config: PropertiesOption = None

    def settings(self) -> KafkaSettings:
        """Return the Kafka settings. Raises KafkaUnusable if an option is invalid."""
        assert self.kafka is not None
        return kafka_settings(self.kafka, self.namespace, self.kafka_config)

    def recording(self, where: Sequence[str], last: str, group: str = "") -> "Recording":
        """Return the source that the arguments `[LOG] LAST` and these options name. Otherwise end the command."""
        if len(where) != (1 if self.kafka else 2):
            fail(f"expected LOG and {last}, or {last} and --kafka")
        log = None if self.kafka else Path(where[0])
        return Recording(self.kafka, self.namespace, self.kafka_config, log, group)


@asynccontextmanager
async def kafka_log(settings: KafkaSettings) -> "AsyncIterator[KafkaLog]":
    """Open a log on Kafka, and close it after the body. Raises LogError if Kafka does not respond."""
    from forebay.transport.kafka.log import KafkaLog  # noqa: PLC0415 - --help does not wait for the client of Kafka

    log = await KafkaLog.open(settings)
    try:
        yield log
    finally:
        await log.close()


@dataclass(frozen=True, slots=True)
class Source(KafkaSource):
    """Options that select a source of recorded events. Either `log` or `kafka` is set."""

    log: LogArgument = None

    def require_one_source(self) -> None:
        """End the command with an error unless the options name exactly one source."""
        if (self.log is None) == (self.kafka is None):
            fail("expected either a log file or --kafka")

    @property
    def name(self) -> str:
        """Name of the source for error messages: the path of the log, or the address of Kafka."""
        return str(self.log) if self.log is not None else f"{self.namespace} on {self.kafka}"

    @asynccontextmanager
    async def source(self, *, is_complete: bool = True) -> "AsyncIterator[SqliteLog | KafkaLog]":
        """Open the log read-only. Raises LogError if the log is unreadable.

        A namespace on Kafka that lacks topics ends the command, if the log must be `is_complete`.
        """
        if self.log is not None:
            from forebay.transport.sqlite.log import SqliteLog  # noqa: PLC0415 - --help does not wait for SQLite

            with closing(SqliteLog.open(self.log, readonly=True)) as recording:
                yield recording
            return
        # Imported here, because neither --help nor a command that reads a file should wait for the client of Kafka.
        from forebay.events.topics import DECISIONS, GROUPS, INPUTS, SNAPSHOTS  # noqa: PLC0415
        from forebay.transport.kafka.topics import partitions_of  # noqa: PLC0415

        settings = self.settings()
        there = await partitions_of(settings) if is_complete else ()
        missing = [topic.name for topic in (GROUPS, DECISIONS, SNAPSHOTS, *INPUTS) if topic.name not in there]
        if is_complete and missing:  # the client would retry forever
            fail(f"{self.kafka} has no topic {settings.topic(missing[0])}; check --namespace")
        async with kafka_log(settings) as log:
            yield log


@dataclass(frozen=True, slots=True)
class Recording(Source):
    """Options that select a group in a source of recorded events."""

    group: GroupOption = ""

    @asynccontextmanager
    async def opened(self, custom: "CustomPolicies") -> AsyncIterator[tuple[Log, int]]:
        """Open the log read-only. Yield the log and the group's control partition.

        Raises LogError if the log is unreadable, or names policies that are not among `custom`.
        """
        from forebay.journal.groups import groups_of  # noqa: PLC0415 - as above
        from forebay.replay.policies import require_allowed  # noqa: PLC0415 - imports the state machine of an owner

        async with self.source() as log:
            placed = await groups_of(log)
            partition = placed[await self.group_among(log, placed)]
            await require_allowed(log, partition, custom)
            yield log, partition

    async def group_among(self, log: Log, placed: Mapping[str, int]) -> str:
        """Return the group to read, of the log's groups `placed`. If there are several, end the command."""
        found = await self.groups_among(log, placed)
        if len(found) != 1:
            fail(f"--group is required; groups of {self.name} are: {', '.join(sorted(placed)) or 'none'}")
        if not self.group and len(placed) > 1:
            complain(f"reading {found[0]}, the only group with workers; --group selects one of: {', '.join(placed)}")
        return found[0]

    async def groups_among(self, log: Log, placed: Mapping[str, int]) -> list[str]:
        """Return the group of `--group`, or all with workers. If `placed` lacks the group, end the command."""
        from forebay.journal.groups import groups_with_workers  # noqa: PLC0415 - as above

        if self.group in placed:
            return [self.group]
        if self.group:
            fail(f"{self.name}: {unknown_name('group', self.group, sorted(placed))}")
        return await groups_with_workers(log, placed) if len(placed) > 1 else list(placed)
