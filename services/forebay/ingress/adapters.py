"""Directory of the LoRA adapters that are served as models: configured ones, and ones that workers have loaded.

Theory of operation. The set of loaded adapters changes when a worker joins or leaves, or executes a command to load or
unload an adapter. The topics `fleet` and `control` carry these events, so the directory follows both. It does not
follow `progress`, which has the outcomes of commands, because most records of a log belong to it. After a change the
directory sends the command `list_loras`. Workers execute commands in order, so the result includes all earlier ones. It
is cached until the next change.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from forebay import runtime
from forebay.events.base import Event
from forebay.events.control import LORA_CHANGES, Command, WorkerCommanded
from forebay.events.fleet import WorkerJoined, WorkerLost, WorkerRecovered
from forebay.events.topics import CONTROL, FLEET, Topic
from forebay.ingress.commands import CommandClient
from forebay.ingress.errors import ApiError
from forebay.ingress.openai.requests import adapter_of
from forebay.transport.base import Log, LogError, Record, event_of
from forebay.transport.follower import Follower

logger = logging.getLogger(__name__)

LIST_S = 5.0  # a worker may still execute another command; the list is requested again
RETRY_S = 2.0  # pause before the list is requested again because a worker did not respond
CATCH_UP_S = 5.0


class _Events(Follower):
    """Passes the events of a topic to a function."""

    def __init__(self, log: Log, topic: Topic, on_event: Callable[[Event], None]) -> None:
        super().__init__(log, topic)
        self._on_event = on_event

    def apply(self, record: Record) -> None:
        self._on_event(event_of(self._topic, record))


class Adapters:
    """Directory of the LoRA adapters of one model."""

    def __init__(
        self,
        log: Log,
        commands: CommandClient,
        model: str,
        static: Sequence[str],
        find_partition: Callable[[], int | None],
    ) -> None:
        self._log = log
        self._commands = commands
        self._model = model
        self._static = tuple(static)
        self._find_partition = find_partition
        self._followers = [_Events(log, topic, self._apply) for topic in (CONTROL, FLEET)]
        self._changes = self._listed_changes = 0
        self._has_caught_up = False
        self._loaded: tuple[str, ...] = ()
        self._retry_at_s = 0.0
        self._lock = asyncio.Lock()

    def close(self) -> None:
        for follower in self._followers:
            follower.close()

    @property
    def known(self) -> tuple[str, ...]:
        """Names of the adapters according to the last list, without reading the log."""
        return (*self._static, *self._loaded)

    @property
    def is_current(self) -> bool:
        """Whether the log was read, and no worker has joined, left or changed its adapters since the last list."""
        return self._has_caught_up and self._changes <= self._listed_changes

    async def resolve(self, name: str) -> str:
        """Return the adapter that the field `model` of a request names; empty for the base model.

        Raises ApiError: 404 for an unknown name, 503 if the log fails.
        """
        if name == self._model:
            return ""
        if name in self._static:
            return name
        return adapter_of(name, self._model, await self.names())

    async def names(self) -> tuple[str, ...]:
        """Return the configured adapters, then the sorted loaded adapters. Raises ApiError (503) if the log fails."""
        partition = self._find_partition()
        if partition is not None:
            async with self._lock:
                await self._catch_up(partition)
                if self._changes > self._listed_changes and runtime.monotonic_s() >= self._retry_at_s:
                    await self._list()
        return self.known

    async def _list(self) -> None:
        """List the adapters of all workers. If some workers do not respond, keep a partial list and retry later."""
        changes = self._changes
        try:
            result = await self._commands.run(Command(action="list_loras"), timeout_s=LIST_S)
        except ApiError as error:
            logger.warning("cannot list the adapters of %s, trying again: %s", self._model, error)
            self._retry_at_s = runtime.monotonic_s() + RETRY_S
            return
        found = {name for outcome in result.outcomes for name in outcome.loras}.union(result.placed)
        if any(outcome.status == "timed_out" for outcome in result.outcomes):
            found.update(self._loaded)  # workers that did not respond may still have these adapters
            self._retry_at_s = runtime.monotonic_s() + RETRY_S
        else:
            self._listed_changes = changes
        self._loaded = tuple(sorted(found.difference((self._model, *self._static))))

    async def _catch_up(self, partition: int) -> None:
        try:
            async with asyncio.timeout(CATCH_UP_S):
                if not self._has_caught_up:  # records removed by retention may have been changes
                    begins = [await self._log.begin(topic.name, partition) for topic in (CONTROL, FLEET)]
                    self._changes += any(begins)
                for follower in self._followers:
                    await follower.read_all(partition)
        except TimeoutError as error:
            raise ApiError(503, "log_unavailable", f"the log did not respond within {CATCH_UP_S:g} s") from error
        except LogError as error:
            raise ApiError(503, "log_unavailable", str(error)) from error
        self._has_caught_up = True

    def _apply(self, event: Event) -> None:
        match event:
            case WorkerCommanded():
                self._changes += event.command.action in LORA_CHANGES
            case WorkerJoined():
                self._changes += bool(event.spec.loras)
            case WorkerLost() | WorkerRecovered():  # a suspect worker receives no commands
                self._changes += self._changes > 0
            case _:
                pass
