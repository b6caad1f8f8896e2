"""Membership of a consumer in a group: joins, sends heartbeats, and reports revoked and assigned partitions."""

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from aiokafka.errors import BrokerResponseError, CommitFailedError, KafkaConnectionError, RebalanceInProgressError
from aiokafka.structs import OffsetAndMetadata, TopicPartition

from tests.faults.kafka.coordinator import Assignment, GroupCoordinator, needs_new_id

if TYPE_CHECKING:
    from tests.faults.kafka.consumer import FakeConsumer


class Membership:
    """Membership of one consumer in one group. Without `begin` it only commits."""

    def __init__(self, consumer: "FakeConsumer", group: GroupCoordinator, session_s: float, heartbeat_s: float) -> None:
        self.group = group
        self._consumer = consumer
        self._session_s = session_s
        self._heartbeat_s = heartbeat_s
        self._member_id = ""
        self._generation = -1
        self._task: asyncio.Task[Any] | None = None
        self._assigned = asyncio.Event()
        self._assigned.set()
        self._should_join = asyncio.Event()

    def begin(self, listener: Any) -> None:
        """Join the group in the background."""
        self._task = self._consumer.start_task(self._run(listener))

    async def assigned(self) -> None:
        """Wait until no rebalance is in progress."""
        await self._assigned.wait()

    async def leave(self) -> None:
        """Leave the group, as far as the cluster can be reached."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait((self._task,))
        with contextlib.suppress(KafkaConnectionError):
            await self._consumer.round_trip()
            self.group.leave(self._member_id)

    async def commit(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        """Commit positions, and retry while the cluster cannot be reached.

        Raises:
            CommitFailedError: The group was rebalanced.
        """
        while True:
            try:
                await self._consumer.round_trip()
                self.group.commit(self._member_id, self._generation, offsets)
            except KafkaConnectionError:
                await asyncio.sleep(self._consumer.backoff_s)
            except BrokerResponseError as error:
                self._rejoin(error)
                raise CommitFailedError("the group has already rebalanced") from error
            else:
                return

    def _rejoin(self, error: BrokerResponseError) -> None:
        if needs_new_id(error):
            self._member_id, self._generation = "", -1
        self._should_join.set()

    async def _run(self, listener: Any) -> None:
        consumer = self._consumer
        while True:
            self._assigned.clear()
            revoking = asyncio.ensure_future(listener.on_partitions_revoked(set(consumer.assignment())))
            await self._until_done(revoking)
            assignment = await self._joined()
            self._should_join.clear()
            self._member_id, self._generation = assignment.member_id, assignment.generation
            consumer.assign(assignment.places)
            self._assigned.set()
            with contextlib.suppress(Exception):  # aiokafka logs it and goes on
                await listener.on_partitions_assigned(set(assignment.places))
            await self._until_rebalanced()

    async def _until_done(self, revoking: "asyncio.Future[None]") -> None:
        """Send heartbeats while the listener releases its partitions."""
        try:
            while True:
                done, _ = await asyncio.wait((revoking,), timeout=self._heartbeat_s)
                if done:
                    return
                await self._beat()
        finally:
            revoking.cancel()

    async def _joined(self) -> Assignment:
        consumer = self._consumer
        while True:
            try:
                await consumer.round_trip()
                joining = self.group.join(self._member_id, consumer.process, self._session_s)
                assignment = await asyncio.wait_for(joining, self._session_s + consumer.request_timeout_s)
                await consumer.round_trip()
            except (KafkaConnectionError, TimeoutError):
                await asyncio.sleep(consumer.backoff_s)
            except BrokerResponseError as error:
                self._rejoin(error)
            else:
                return assignment

    async def _until_rebalanced(self) -> None:
        """Send heartbeats until the group rebalances."""
        while not self._should_join.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._should_join.wait()
            await self._beat()

    async def _beat(self) -> None:
        if not self._member_id:
            return
        try:
            await self._consumer.round_trip()
            self.group.heartbeat(self._member_id, self._generation)
            await self._consumer.round_trip()
        except KafkaConnectionError:
            return
        except BrokerResponseError as error:
            if not isinstance(error, RebalanceInProgressError) or self._assigned.is_set():
                self._rejoin(error)
