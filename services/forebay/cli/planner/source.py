"""Source of the commands that read the topic `scaling`: a log file, a recording or Kafka."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

from forebay.cli.common.errors import fail
from forebay.cli.common.recording import KafkaSource
from forebay.cli.common.terminal import bar
from forebay.planner.orders import OrderInvalid, scaling_on_kafka
from forebay.replay.scaling.journal import OnProgress
from forebay.transport.base import Log
from forebay.transport.sqlite.log import SqliteLog


@asynccontextmanager
async def scaling_log(source: KafkaSource, path: Path | None) -> AsyncIterator[Log]:
    """Open the log file `path`, or else Kafka, to read. Raises LogError if it is unreadable."""
    if path is not None:
        with closing(SqliteLog.open(path, readonly=True)) as log:
            yield log
        return
    try:
        async with scaling_on_kafka(source.settings()) as kafka:
            yield kafka
    except OrderInvalid as error:
        fail(str(error))


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
