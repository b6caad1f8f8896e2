"""Which LoRA adapters are served as models: those of the ingress's settings, and those that workers have loaded.

Theory of operation. Adapters change when a worker joins or leaves, or is commanded to load or unload one. `fleet` and
`control` hold these, and little else, so they are followed; progress, which holds the outcomes, is most of a log and
is not. After a change the workers are asked what they have, by a command of its own: they do commands in order, so
what was commanded before is part of what they say. The answer stands until the next change.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from forebay.events.codec import DecodeError, decode
from forebay.events.control import LORA_CHANGES, Command, WorkerCommanded
from forebay.events.fleet import WorkerJoined, WorkerLost, WorkerRecovered
from forebay.events.topics import CONTROL, FLEET, Topic
from forebay.ingress.commands import CommandClient
from forebay.ingress.errors import ApiError
from forebay.ingress.openai.requests import adapter_of
from forebay.transport.base import Log, LogError, Tail

logger = logging.getLogger(__name__)

READ_MAX = 256
LIST_S = 5.0  # a worker that is this busy with another command is asked again
RETRY_S = 2.0  # between two times that not everybody answered
CATCH_UP_S = 5.0


class Adapters:
    """The adapters of `model`, of which `static` are there from the start; `place` is as for `Ingress`."""

    def __init__(
        self, log: Log, commands: CommandClient, model: str, static: Sequence[str], place: Callable[[], int | None]
    ) -> None:
        self._log = log
        self._commands = commands
        self._model = model
        self._static = tuple(static)
        self._place = place
        self._wake = asyncio.Event()
        self._tails: dict[Topic, Tail] = {}
        self._positions: dict[Topic, int] = {}
        self._changes = self._listed_changes = 0
        self._loaded: tuple[str, ...] = ()
        self._retry_at_s = 0.0
        self._turn = asyncio.Lock()

    def close(self) -> None:
        """Follow the log no more."""
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()

    async def of(self, name: str) -> str:
        """The adapter that a request's `model` names, empty for the model itself. Raises ApiError for other names."""
        if name == self._model:
            return ""
        if name in self._static:
            return name
        return adapter_of(name, self._model, await self.names())

    async def names(self) -> tuple[str, ...]:
        """All of them, sorted behind those of the settings. Raises ApiError when the log fails."""
        partition = self._place()
        if partition is not None:
            async with self._turn:
                await self._catch_up(partition)
                if self._changes > self._listed_changes and time.monotonic() >= self._retry_at_s:
                    await self._list()
        return (*self._static, *self._loaded)

    async def _list(self) -> None:
        """Ask the workers; where not all of them answer, those that do are believed for a while."""
        changes = self._changes
        try:
            told = await self._commands.run(Command(action="list_loras"), timeout_s=LIST_S)
        except ApiError as error:
            logger.warning("the adapters of %s cannot be listed, trying again: %s", self._model, error)
            self._retry_at_s = time.monotonic() + RETRY_S
            return
        found = {name for outcome in told.outcomes for name in outcome.loras}
        if any(outcome.status == "timed_out" for outcome in told.outcomes):
            found.update(self._loaded)  # which those who are late may have
            self._retry_at_s = time.monotonic() + RETRY_S
        else:
            self._listed_changes = changes
        self._loaded = tuple(sorted(found.difference((self._model, *self._static))))

    async def _catch_up(self, partition: int) -> None:
        """Read what both topics hold by now."""
        try:
            async with asyncio.timeout(CATCH_UP_S):
                if not self._tails:
                    await self._open(partition)
                ends = {topic: await self._log.end(topic.name, partition) for topic in self._tails}
                while True:
                    self._wake.clear()
                    self._read()
                    if all(self._positions[topic] >= end for topic, end in ends.items()):
                        return
                    await self._wake.wait()
        except TimeoutError as error:
            raise ApiError(503, "log_unavailable", f"the log did not answer within {CATCH_UP_S:g} s") from error
        except LogError as error:
            raise ApiError(503, "log_unavailable", str(error)) from error

    async def _open(self, partition: int) -> None:
        begins = {topic: await self._log.begin(topic.name, partition) for topic in (CONTROL, FLEET)}
        for topic, begin in begins.items():
            self._tails[topic] = self._log.tail(topic.name, partition, begin, self._wake)
            self._positions[topic] = begin
            self._changes += begin > 0  # what retention took may have told of some

    def _read(self) -> None:
        for topic, tail in self._tails.items():
            while records := tail.take(READ_MAX):
                for record in records:
                    self._apply(topic, record.value)
                self._positions[topic] = records[-1].offset + 1

    def _apply(self, topic: Topic, value: bytes) -> None:
        """Count a record after which other adapters may be loaded."""
        try:
            event = decode(topic, value)
        except DecodeError:
            return  # its owner says so
        match event:
            case WorkerCommanded():
                self._changes += event.command.action in LORA_CHANGES
            case WorkerJoined():
                self._changes += bool(event.spec.loras)
            case WorkerLost() | WorkerRecovered():  # who is suspect is not asked
                self._changes += self._changes > 0
            case _:
                pass
