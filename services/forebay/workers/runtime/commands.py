"""Commands of an operator to a worker, which its engine executes one after another. The worker itself executes `drain`.

Theory of operation. Commands run in the order of arrival, so `list_loras` includes every adapter that was loaded by an
earlier command. Each command runs once. If a new owner sends it again, the worker sends the same result again. Loaded
adapters belong to the engine, and remain loaded when a worker epoch ends. The router selects workers by adapter, so it
must know them. If an epoch ends during a command, the worker therefore sends the result in its next epoch.

An adapter at a URI is loaded from the cache of this host. It stays in the cache as long as the engine has it, because
an engine may read it again.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from forebay import runtime
from forebay.events.control import LORA_CHANGES, Command
from forebay.events.names import NameInvalid, require_adapter
from forebay.events.work import WorkerCommand
from forebay.transport.base import Draft
from forebay.workers.adapter_cache import AdapterCache, CachedAdapter, is_uri
from forebay.workers.engine import Engine, EngineRefused
from forebay.workers.runtime.outbox import Outbox

logger = logging.getLogger(__name__)

WAITING_MAX = 64  # the owner's limit of commands in flight
SEEN_MAX = 1_024  # more than a new owner sends again after a takeover
ERROR_CHARS_MAX = 500


@dataclass(slots=True)
class ReceivedCommand:
    """A command that the worker has received, and its result.

    The result has the loaded adapters, the digest of the adapter that was loaded from a URI, and an error if it failed.

    It must start before `begin_by_s` of the monotonic clock.
    """

    command_id: str
    command: Command
    owner_epoch: int
    begin_by_s: float
    over: bool = False
    loras: tuple[str, ...] = ()
    lora_digest: str = ""
    error: str | None = None


class CommandRunner:
    """Executes commands on the engine of a worker, and appends their results to the log by `send`.

    No adapter may have the name of the base `model`. `adapters` is the cache of adapters at URIs. `loras` are the
    names of the loaded adapters.
    """

    def __init__(
        self, engine: Engine, model: str, send: Callable[[Sequence[Draft]], object], drain: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._model = model
        self._send = send
        self._drain = drain
        self.adapters = AdapterCache()
        self._used: dict[str, CachedAdapter] = {}
        self._outbox: Outbox | None = None
        self._joined = asyncio.Event()
        self._wake = asyncio.Event()
        self._waiting: deque[ReceivedCommand] = deque()
        self._executing = False
        self._seen: OrderedDict[tuple[str, int], ReceivedCommand] = OrderedDict()
        self.loras: tuple[str, ...] = ()
        self.repeated = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return self._executing or bool(self._waiting)

    def join(self, outbox: Outbox) -> None:
        """Begin a worker epoch, for which `outbox` encodes the results."""
        self._outbox = outbox
        self._joined.set()

    def leave(self) -> None:
        """End the worker epoch and drop the queued commands. The owner no longer waits for their results."""
        self._outbox = None
        self._joined.clear()
        self._waiting.clear()
        self._seen.clear()

    def add(self, event: WorkerCommand) -> None:
        """Queue a command. If the command has already run, send its result again instead."""
        key = event.command_id, event.nonce  # an id may be reused much later
        known = self._seen.get(key)
        if known is not None:
            self.repeated += 1
            known.owner_epoch = max(known.owner_epoch, event.owner_epoch)
            if known.over:
                self._send_result(known)
            return
        begin_by_s = runtime.monotonic_s() + event.timeout_us / 1e6
        received = ReceivedCommand(event.command_id, event.command, event.owner_epoch, begin_by_s)
        self._seen[key] = received
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        if len(self._waiting) >= WAITING_MAX:
            self._end(received, f"the worker's queue of commands is full: {len(self._waiting)} are waiting")
            return
        self._waiting.append(received)
        self._wake.set()

    async def run(self) -> None:
        """Execute queued commands until cancelled. Raises EngineError if the engine is broken."""
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            received = self._waiting.popleft()
            self._executing = True
            error = await self._execute(received)
            while self._outbox is None:
                await self._joined.wait()
            self._executing = False
            self._end(received, error)

    async def _execute(self, received: ReceivedCommand) -> str | None:
        """Execute a command. Return the reason for a failure, None on success."""
        if runtime.monotonic_s() > received.begin_by_s:
            return "it timed out while earlier commands were running"
        command = received.command
        action = command.action
        if action == "drain":
            self._drain()
            return None
        try:
            if action == "load_lora":
                require_adapter(command.lora_name, self._model)
            if action == "load_lora" and is_uri(command.lora_path):
                received.loras = await self._load(received)
            else:
                received.loras = await self._engine.command(command)
        except (EngineRefused, NameInvalid) as refusal:
            logger.warning("engine command %s failed: %s", action, refusal)
            return str(refusal)[:ERROR_CHARS_MAX] or f"the engine does not support {action}"
        if action in LORA_CHANGES:
            self.loras = received.loras
            for name in [name for name in self._used if name not in self.loras]:
                self._used.pop(name).close()
        logger.info("engine command %s done", action)
        return None

    async def _load(self, received: ReceivedCommand) -> tuple[str, ...]:
        """Load an adapter from the cache. Return the names of the loaded adapters. Raises EngineRefused."""
        command = received.command
        adapter = await self.adapters.fetch(command.lora_path, command.lora_digest)
        try:
            local = msgspec.structs.replace(command, lora_path=str(adapter.directory), lora_digest=adapter.digest)
            loras = await self._engine.command(local)
        except BaseException:
            adapter.close()
            raise
        if (earlier := self._used.pop(command.lora_name, None)) is not None:
            earlier.close()
        self._used[command.lora_name] = adapter
        received.lora_digest = adapter.digest
        return loras

    def _end(self, received: ReceivedCommand, error: str | None) -> None:
        received.over, received.error = True, error
        self._send_result(received)

    def _send_result(self, received: ReceivedCommand) -> None:
        assert self._outbox is not None, "commands are only sent to members"
        # A later change may have succeeded meanwhile; the router uses the list of the newest result.
        loras = self.loras if received.command.action in LORA_CHANGES else received.loras
        result = self._outbox.command_result(
            received.command_id, received.command, received.owner_epoch, loras, received.error, received.lora_digest
        )
        self._send([result])
