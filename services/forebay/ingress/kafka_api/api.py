"""Kafka API: clients produce requests to `openai-requests` and consume responses from `openai-responses`.

Ingresses share the partitions of `openai-requests` as one consumer group. Delivery is at least once: after a crash or a
rebalance a response may be sent again with identical records. If the broker fails so that this member cannot continue,
it joins the group again at the committed progress, as another ingress would.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection

from forebay.events.topics import OPENAI_REQUESTS, OPENAI_RESPONSES
from forebay.ingress.kafka_api.partition import PartitionServer
from forebay.ingress.kafka_api.shared import KafkaApiMetrics, SharedState
from forebay.ingress.served_models import ServedModels
from forebay.runtime.errors import cause_of
from forebay.transport.base import LogUnavailable
from forebay.transport.kafka.group import KafkaGroup
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.replies import KafkaReplies

logger = logging.getLogger(__name__)

GROUP = "kafka-api"
COMMIT_S = 0.5
REJOIN_S = 1.0  # pause before joining the group again


class KafkaApi:
    def __init__(self, log: KafkaLog, models: ServedModels, metrics: KafkaApiMetrics, reply_slots: int) -> None:
        self._log = log
        self._models = models
        self._metrics = metrics
        self._reply_slots = reply_slots
        self._servers: dict[int, PartitionServer] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._connect()

    async def run(self) -> None:
        """Serve assigned partitions until cancelled. Raises LogError if Kafka does not let it read or write."""
        while True:
            try:
                await self._serve()
            except LogUnavailable as error:
                logger.warning("the Kafka API joins its consumer group again: %s", error)
            await asyncio.sleep(REJOIN_S)
            self._connect()

    def _connect(self) -> None:
        """Create the clients of one membership. They connect later."""
        log = self._log
        self._group = KafkaGroup(log.settings, OPENAI_REQUESTS.name, GROUP)
        self._replies = KafkaReplies(log.settings, OPENAI_RESPONSES.name)
        self._shared = SharedState(log, self._models, self._group, self._replies, self._metrics, self._reply_slots)

    async def _serve(self) -> None:
        """Serve as a member of the group. Raises LogUnavailable if a new member can continue, otherwise LogError."""
        try:
            await self._replies.start()
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self._group.start(self)
                tasks.create_task(self._poll(), name="Kafka API")
                tasks.create_task(self._commit(), name="Kafka API commits")
                await self._shared.failure
        except BaseExceptionGroup as error:
            raise cause_of(error) from None
        finally:
            self._tasks = None
            await self._leave()

    def assigned(self, partitions: Collection[int]) -> None:
        if self._tasks is None:
            return
        for partition in partitions:
            server = self._servers[partition] = PartitionServer(self._shared, partition)
            self._serving[partition] = self._tasks.create_task(server.run(), name=f"Kafka API partition {partition}")
        self._metrics.partitions.set(len(self._servers))
        logger.info("the Kafka API serves partitions: %s", ", ".join(map(str, partitions)) or "none")

    async def revoked(self, partitions: Collection[int]) -> None:
        offsets = await self._stop_servers(partitions)
        await self._group.commit_last({number: server.progress() for number, server in offsets.items()})

    async def _poll(self) -> None:
        while True:
            for partition, records in (await self._group.take()).items():
                server = self._servers.get(partition)
                if server is not None:
                    server.push(records)
            for partition, server in list(self._servers.items()):
                if server.started:
                    server.advance(await self._group.position(partition))

    async def _commit(self) -> None:
        soon = self._shared.commit_soon
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMMIT_S):
                    await soon.wait()
            soon.clear()
            servers = {number: server for number, server in self._servers.items() if server.started}
            offsets = {number: server.progress() for number, server in servers.items()}
            changed = {number: offset for number, offset in offsets.items() if servers[number].committed != offset}
            if await self._group.commit(changed):
                for number, offset in changed.items():
                    servers[number].on_committed(offset)
            for server in servers.values():
                server.wake()

    async def _stop_servers(self, partitions: Collection[int]) -> dict[int, PartitionServer]:
        """Stop the servers of these partitions and return those that had started."""
        stopped = {number: server for number in partitions if (server := self._servers.pop(number, None)) is not None}
        serving = [task for number in partitions if (task := self._serving.pop(number, None)) is not None]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        self._metrics.partitions.set(len(self._servers))
        return {number: server for number, server in stopped.items() if server.started}

    async def _leave(self) -> None:
        """Wait for responses that are being sent, commit, and leave the group."""
        servers = await self._stop_servers(list(self._servers))
        await self._replies.stop()
        await self._group.commit_last({number: server.progress() for number, server in servers.items()})
        await self._group.stop()
