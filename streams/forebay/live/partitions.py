"""Follow the journal of every control partition in one task."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import ClassVar, Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from forebay.journal.groups import partitions_of
from forebay.runtime.metrics import gauge
from forebay.transport.base import Log, LogError
from forebay.transport.patience import until_available

logger = logging.getLogger(__name__)

POLL_S = 1.0
RETRY_S = 10.0  # after an error of the log


class PartitionFollower(ABC):
    """Follows one journal.

    Attributes:
        GAUGES: description of further metrics by the name of their attribute.
        behind: number of journal records that are not processed yet.
        problem: why the journal cannot be read at present; empty if it can.
    """

    GAUGES: ClassVar[Mapping[str, str]] = {}
    behind = 0
    problem = ""

    @abstractmethod
    async def advance(self, *, is_last: bool) -> bool:
        """Process what is new, and return whether there may be more. Raises LogError.

        `is_last` means that the process ends.
        """


F = TypeVar("F", bound=PartitionFollower)


class Partitions(Collector, Generic[F]):
    """Followers of all control partitions. A journal that cannot be read does not stop the followers of the others.

    Args:
        name: part of metrics and messages.
        follow: returns a follower of a partition.
    """

    def __init__(self, log: Log, registry: CollectorRegistry, name: str, follow: Callable[[int], F]) -> None:
        self.followers: dict[int, F] = {}
        self._log = log
        self._name = name
        self._follow = follow
        self._stopping = asyncio.Event()
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        found = {str(partition): follower for partition, follower in self.followers.items()}
        behind = {partition: one.behind for partition, one in found.items()}
        yield self._gauge("behind_records", "journal records that are not processed yet", behind)
        stopped = {partition: bool(one.problem) for partition, one in found.items()}
        yield self._gauge("stopped", "1 if the journal cannot be read at present", stopped)
        for name, text in {name: text for one in found.values() for name, text in one.GAUGES.items()}.items():
            yield self._gauge(name, text, {partition: getattr(one, name) for partition, one in found.items()})

    def _gauge(self, name: str, text: str, values: Mapping[str, float]) -> Metric:
        return gauge(f"forebay_{self._name}_{name}", text, values, "partition")

    async def run(self) -> None:
        """Follow until `stop`, and then process what is left. Raises LogError."""
        while not self._stopping.is_set():
            for partition in await until_available(lambda: partitions_of(self._log)):
                if partition not in self.followers:
                    self.followers[partition] = self._follow(partition)
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
                while await follower.advance(is_last=is_last):
                    pass
            except LogError as error:
                problem = str(error)
            if problem and problem != follower.problem:
                logger.error("the %s of control partition %d stopped: %s", self._name, partition, problem)
            follower.problem = problem
