"""Follow the journal of every control partition in one task."""

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Gauge

from forebay.journal.groups import partitions_of
from forebay.transport.base import Log, LogError
from forebay.transport.patience import until_available

logger = logging.getLogger(__name__)

POLL_S = 1.0
RETRY_S = 10.0  # after an error of the log


class PartitionFollower(Protocol):
    """Follows one journal.

    Attributes:
        behind: number of journal records that are not processed yet.
        problem: why the journal cannot be read at present; empty if it can.
    """

    behind: int
    problem: str


Follower = TypeVar("Follower", bound=PartitionFollower)


class Partitions(ABC, Generic[Follower]):
    """Followers of all control partitions. A journal that cannot be read does not stop the followers of the others."""

    def __init__(self, log: Log, registry: CollectorRegistry, name: str) -> None:
        """`name` is part of metrics and messages."""
        self.followers: dict[int, Follower] = {}
        self.log = log
        self._name = name
        self._registry = registry
        self._stopping = asyncio.Event()
        self._behind = self.gauge("behind_records", "journal records that are not processed yet")
        self._stopped = self.gauge("stopped", "1 if the journal cannot be read at present")

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"forebay_{self._name}_{name}", text, ["partition"], registry=self._registry)

    @abstractmethod
    def follow(self, partition: int) -> Follower:
        """Return a follower of a partition."""

    @abstractmethod
    async def advance(self, follower: Follower, *, is_last: bool) -> bool:
        """Process what is new, and return whether there may be more. Raises LogError.

        `is_last` means that the process ends.
        """

    def observe(self, partition: int, follower: Follower) -> None:
        """Set the metrics of a partition."""
        self._behind.labels(partition).set(follower.behind)
        self._stopped.labels(partition).set(bool(follower.problem))

    async def run(self) -> None:
        """Follow until `stop`, and then process what is left. Raises LogError."""
        while not self._stopping.is_set():
            for partition in await until_available(lambda: partitions_of(self.log)):
                if partition not in self.followers:
                    self.followers[partition] = self.follow(partition)
            await self._advance(is_last=False)
            is_stopped = any(follower.problem for follower in self.followers.values())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), RETRY_S if is_stopped else POLL_S)
        await self._advance(is_last=True)

    async def stop(self) -> None:
        """Let `run` end soon."""
        self._stopping.set()

    async def _advance(self, *, is_last: bool) -> None:
        for partition, follower in self.followers.items():
            problem = ""
            try:
                while await self.advance(follower, is_last=is_last):
                    pass
            except LogError as error:
                problem = str(error)
            if problem and problem != follower.problem:
                logger.error("the %s of control partition %d stopped: %s", self._name, partition, problem)
            follower.problem = problem
            self.observe(partition, follower)
