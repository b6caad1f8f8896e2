"""Child process that follows the log of a console and writes the catalog.

It sends an empty frame when it begins to follow, and a frame if it cannot continue: the reason as a sentence.
`forebay.ingress.child_process` describes frames; the first message has the settings of the console.
"""

import asyncio
from collections.abc import Callable

import msgspec

from forebay.console.log_file import LogFile
from forebay.console.settings import ConsoleSettings
from forebay.ingress.child_process import ChildConnection
from forebay.ingress.explain_worker import opened_log
from forebay.replay.catalog.contents import SCHEMAS, new_observers
from forebay.replay.catalog.follow import Follower
from forebay.replay.catalog.live import LivePublisher, follow
from forebay.replay.catalog.store import CatalogError, Store
from forebay.replay.policies import load_policies
from forebay.replay.status import with_heartbeats
from forebay.transport.base import LogError
from forebay.transport.heartbeats import RouterHeartbeats


def main() -> None:
    connection = ChildConnection()
    connection.end_with_parent()
    settings = msgspec.json.decode(connection.setup, type=ConsoleSettings)
    try:
        asyncio.run(_follow(settings, lambda: connection.send(b"")))
    except* (CatalogError, LogError) as errors:
        connection.send("; ".join(_sentences(errors)).encode())


def _sentences(errors: BaseException) -> list[str]:
    if isinstance(errors, BaseExceptionGroup):
        return [text for error in errors.exceptions for text in _sentences(error)]
    return [str(errors)]


async def _follow(settings: ConsoleSettings, on_begin: Callable[[], object]) -> None:
    custom, partition = load_policies(settings.source.policies), settings.partition
    file = LogFile(settings.source)
    async with opened_log(settings.source) as log:
        store = await Store.open(settings.catalog_path, log, partition, SCHEMAS)
        on_begin()
        try:
            follower = Follower(log, partition, store, new_observers, custom=custom)
            publisher = LivePublisher(log, partition, settings.group, follower, custom)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(file.watch())
                if settings.kind == "kafka":
                    heartbeats = RouterHeartbeats(log, settings.group)
                    publisher.complete = lambda status: with_heartbeats(status, heartbeats)
                    tasks.create_task(heartbeats.follow(partition))
                tasks.create_task(follow(follower, publisher))
        finally:
            store.close()


if __name__ == "__main__":
    main()
