"""Simulated coordinator of one consumer group, with the eager protocol.

A rebalance begins when a member joins, leaves, or is silent for the session timeout. It ends when every member has
joined again, or at its timeout, and makes a new generation. Members of earlier generations cannot commit.
"""

import asyncio
import contextlib
import itertools
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from aiokafka.errors import (
    BrokerResponseError,
    CommitFailedError,
    IllegalGenerationError,
    KafkaConnectionError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from aiokafka.structs import OffsetAndMetadata, TopicPartition

from tests.faults.broker import Broker
from tests.faults.process import Process

CHECK_S = 0.5
DELAY_S = 0.3  # of the first rebalance, so that members that start together get one generation


@dataclass(frozen=True, slots=True)
class Assignment:
    member_id: str
    generation: int
    places: list[TopicPartition]


@dataclass(slots=True, eq=False)
class _Member:
    process: Process
    session_s: float
    seen_s: float
    joining: "asyncio.Future[Assignment] | None" = None


class GroupCoordinator:
    def __init__(self, broker: Broker, seed: str, name: str, places: list[TopicPartition]) -> None:
        self.offsets: dict[TopicPartition, OffsetAndMetadata] = {}
        self.rebalances = 0
        self._broker = broker
        self._random = Random(f"{seed}/{name}")
        self._places = places
        self._numbers = itertools.count(1)
        self._members: dict[str, _Member] = {}
        self._generation = 0
        self._ends_s: float | None = None  # of the rebalance that is in progress
        broker.loop.call_main_later(CHECK_S, self._check)

    def join(self, member_id: str, process: Process, session_s: float) -> "asyncio.Future[Assignment]":
        """Join, or join again, and return a future for the assignment.

        Raises:
            UnknownMemberIdError: The coordinator has expelled the member.
        """
        now_s = self._broker.loop.time()
        if not member_id:
            member_id = f"{process.label}-{next(self._numbers)}"
            self._members[member_id] = _Member(process, session_s, now_s)
        member = self._require(member_id)
        member.seen_s = now_s
        member.joining = self._broker.loop.create_future()
        if self._ends_s is None:
            self._begin()
        self._broker.loop.call_main_later(DELAY_S, self._end_if_complete)
        return member.joining

    def heartbeat(self, member_id: str, generation: int) -> None:
        """Renew the session of a member. Raises BrokerResponseError if it must join again."""
        member = self._require(member_id)
        member.seen_s = self._broker.loop.time()
        if generation != self._generation:
            raise IllegalGenerationError
        if self._ends_s is not None:
            raise RebalanceInProgressError

    def leave(self, member_id: str) -> None:
        """Remove a member, which causes a rebalance."""
        if self._members.pop(member_id, None) is not None:
            self._begin()

    def commit(self, member_id: str, generation: int, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        """Commit positions. Members may commit while a rebalance begins.

        Raises:
            BrokerResponseError: The sender is not a member of the current generation.
        """
        if member_id or self._members:
            member = self._require(member_id)
            if generation != self._generation:
                raise IllegalGenerationError
            if member.joining is not None:
                raise RebalanceInProgressError
        self.offsets |= offsets

    def rebalance(self) -> None:
        """Make all members join again."""
        if self._members:
            self._begin()

    def expel(self) -> None:
        """Remove a member at random, as after a session timeout, without the member's knowledge."""
        if self._members:
            self.leave(self._random.choice(list(self._members)))

    def _require(self, member_id: str) -> _Member:
        member = self._members.get(member_id)
        if member is None:
            raise UnknownMemberIdError
        return member

    def _begin(self) -> None:
        if self._ends_s is None:
            self.rebalances += 1
            sessions = [member.session_s for member in self._members.values()]
            self._ends_s = self._broker.loop.time() + max(sessions, default=0.0)

    def _check(self) -> None:
        now_s = self._broker.loop.time()
        for member_id, member in list(self._members.items()):
            waits = member.joining is not None and member.process.alive
            if not waits and now_s - member.seen_s > member.session_s:
                self.leave(member_id)
        if self._ends_s is not None and now_s >= self._ends_s:
            self._end()
        else:
            self._end_if_complete()
        self._broker.loop.call_main_later(CHECK_S, self._check)

    def _end_if_complete(self) -> None:
        if self._ends_s is not None and all(member.joining is not None for member in self._members.values()):
            self._end()

    def _end(self) -> None:
        """Expel the members that did not join, and assign the partitions to the others in turn."""
        self._ends_s = None
        self._generation += 1
        self._members = {name: one for name, one in self._members.items() if one.joining is not None}
        names = sorted(self._members)
        now_s = self._broker.loop.time()
        for index, name in enumerate(names):
            member = self._members[name]
            places = [place for number, place in enumerate(self._places) if number % len(names) == index]
            assert member.joining is not None
            member.seen_s = now_s
            if not member.joining.done():
                member.joining.set_result(Assignment(name, self._generation, places))
            member.joining = None


def needs_new_id(error: BrokerResponseError) -> bool:
    """Return whether a member must join as a new one after this error."""
    return isinstance(error, UnknownMemberIdError | IllegalGenerationError)


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
