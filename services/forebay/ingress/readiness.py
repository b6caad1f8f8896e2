"""Decide whether an ingress can serve a model now."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from forebay.ingress.errors import ApiError
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import OwnerPresence

POLL_S = 1.0  # seconds between two checks whether prompts must be computed by prefill workers
NO_OWNER = "no router owns this model now: a failover is in progress, or Kafka does not respond; try again soon"
NO_WORKER = "no worker is ready"
NO_PREFILL_WORKER = "no prefill worker is ready, and decode workers must not compute prompts"


class Readiness:
    """Whether an ingress can serve: its group has a partition, an owner and a ready worker that generates responses.

    The owner's heartbeats contain the number of ready workers per role, according to the events of `fleet` that the
    owner has applied. If prompts must be computed by prefill workers (`enforced`), a prefill worker must be ready, too.
    """

    def __init__(self, heartbeats: OwnerPresence, directory: Directory) -> None:
        self._heartbeats = heartbeats
        self._directory = directory
        self._is_enforced = False
        self.enforced: Callable[[], Awaitable[bool]] | None = None

    def __call__(self) -> bool:
        """Return whether the ingress can serve requests now."""
        return self._problem() is None

    def why_not(self) -> str:
        """Return the reason why the ingress cannot serve requests."""
        return self._problem() or NO_WORKER

    def partition(self) -> int | None:
        """Return the control partition of the group; None until a router has assigned one."""
        return self._directory.partition_of(self._heartbeats.group)

    async def run(self) -> None:
        """Read the heartbeats of the group's owner until cancelled. Raises LogError if the log fails."""
        partition = await self._directory.placed(self._heartbeats.group)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeats.follow(partition))
            tasks.create_task(self._look())

    async def _look(self) -> None:
        while True:
            if self.enforced is not None:
                with contextlib.suppress(ApiError):  # if the settings cannot be read, keep the previous ones
                    self._is_enforced = await self.enforced()
            await asyncio.sleep(POLL_S)

    def _problem(self) -> str | None:
        owner = self._heartbeats.owner
        if self.partition() is None:
            return NO_WORKER
        if owner is None or not self._heartbeats.has_owner:
            return NO_OWNER
        if owner.ready_aggregated:
            return None
        if not owner.ready_decode:
            return NO_WORKER
        return NO_PREFILL_WORKER if self._is_enforced and not owner.ready_prefill else None
