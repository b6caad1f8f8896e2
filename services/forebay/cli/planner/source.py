"""Source of the commands that read the topic `scaling`: a log file, a recording or Kafka."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

from forebay.cli.common.errors import fail
from forebay.cli.common.recording import KafkaSource
from forebay.cli.common.terminal import bar
from forebay.events.topics import SCALING
from forebay.replay.scaling.journal import OnProgress, has_scaling
from forebay.transport.base import Log
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.sqlite.log import SqliteLog


@asynccontextmanager
async def scaling_log(source: KafkaSource, path: Path | None) -> AsyncIterator[Log]:
    """Open the log file `path`, or else Kafka, to read. Raises LogError if it is unreadable."""
    if path is not None:
        with closing(SqliteLog.open(path, readonly=True)) as log:
            yield log
        return
    async with scaling_on_kafka(source.settings()) as kafka:
        yield kafka


@asynccontextmanager
async def scaling_on_kafka(settings: KafkaSettings) -> AsyncIterator[KafkaLog]:
    """Open Kafka. A missing topic `scaling` ends the command. Raises LogError if Kafka cannot be used."""
    log = await KafkaLog.open(settings)
    try:
        if not await has_scaling(log):
            name = settings.topic(SCALING.name)
            fail(f"{settings.bootstrap} has no topic {name}; check --namespace, or use `forebay topics create`")
        yield log
    finally:
        await log.close()


def require_one_source(source: KafkaSource, path: Path | None) -> None:
    """End the command with an error unless the options name exactly one source."""
    if (path is None) == (source.kafka is None):
        fail("expected either a log file or --kafka")


@contextmanager
def shown_reading() -> Iterator[OnProgress]:
    """Show on stderr how many records of the topic were read, if stderr is a terminal."""
    with bar() as progress:
        task = progress.add_task("deriving decisions", total=None)

        def on_progress(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield on_progress
