"""What operators command, done by the engine one after another.

Theory of operation. Commands run in the order in which they came, so that a list of adapters includes what was loaded
before it was asked for. Each is done once: a new owner may send it again, and is told what came of it. The adapters
that are loaded belong to the engine and outlive an epoch, so an answer that an epoch's end overtook is said in the
next one: whoever routes by adapters must know of it.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.events.control import LORA_CHANGES, Command
from forebay.events.names import NameInvalid, require_adapter
from forebay.events.work import WorkerCommand
from forebay.transport.base import Draft
from forebay.workers.engine import Engine, EngineRefused
from forebay.workers.runtime.outbox import Outbox

logger = logging.getLogger(__name__)

WAITING_MAX = 64  # as many as an owner has under way
SEEN_MAX = 1_024  # remembered: an owner that takes over sends again what is under way, which is less
ERROR_CHARS_MAX = 500


@dataclass(slots=True)
class Given:
    """A command that came, on whose order, and what became of it: `error` is why it was not done."""

    command_id: str
    command: Command
    owner_epoch: int
    begin_by_s: float
    over: bool = False
    loras: tuple[str, ...] = ()
    error: str | None = None


class CommandRunner:
    """Has `engine`, which serves `model`, do what is commanded, and says what came of it through `send`.

    Attributes:
        loras: the adapters that are loaded now.
        repeated: commands that came again.
    """

    def __init__(self, engine: Engine, model: str, send: Callable[[Sequence[Draft]], object]) -> None:
        self._engine = engine
        self._model = model
        self._send = send
        self._outbox: Outbox | None = None
        self._joined = asyncio.Event()
        self._wake = asyncio.Event()
        self._waiting: deque[Given] = deque()
        self._obeying = False
        self._seen: OrderedDict[tuple[str, int], Given] = OrderedDict()
        self.loras: tuple[str, ...] = ()
        self.repeated = 0

    @property
    def busy(self) -> bool:
        """Whether something is not answered yet."""
        return self._obeying or bool(self._waiting)

    def join(self, outbox: Outbox) -> None:
        """An epoch begins: answers are said by `outbox`."""
        self._outbox = outbox
        self._joined.set()

    def leave(self) -> None:
        """The epoch is over: the owner gave up what waited, and it is not done any more."""
        self._outbox = None
        self._joined.clear()
        self._waiting.clear()
        self._seen.clear()

    def add(self, event: WorkerCommand) -> None:
        """A command came, perhaps again."""
        key = event.command_id, event.nonce  # an id may be used again, long after
        known = self._seen.get(key)
        if known is not None:
            self.repeated += 1
            known.owner_epoch = max(known.owner_epoch, event.owner_epoch)
            if known.over:
                self._tell(known)
            return
        begin_by_s = time.monotonic() + event.timeout_us / 1e6
        given = Given(event.command_id, event.command, event.owner_epoch, begin_by_s)
        self._seen[key] = given
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        if len(self._waiting) >= WAITING_MAX:
            self._end(given, f"{len(self._waiting)} commands wait already")
            return
        self._waiting.append(given)
        self._wake.set()

    async def run(self) -> None:
        """Do what comes until cancelled. Raises what the engine raises when it breaks."""
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            given = self._waiting.popleft()
            self._obeying = True
            error = await self._obey(given)
            while self._outbox is None:
                await self._joined.wait()
            self._obeying = False
            self._end(given, error)

    async def _obey(self, given: Given) -> str | None:
        """Why it is not done; None if it is."""
        if time.monotonic() > given.begin_by_s:
            return "its time was over before the commands before it were done"
        action = given.command.action
        try:
            if action == "load_lora":
                require_adapter(given.command.lora_name, self._model)
            given.loras = await self._engine.command(given.command)
        except (EngineRefused, NameInvalid) as refusal:
            logger.warning("the engine does not %s: %s", action, refusal)
            return str(refusal)[:ERROR_CHARS_MAX] or f"the engine does not {action}"
        if action in LORA_CHANGES:
            self.loras = given.loras
        logger.info("the engine was told to %s, and did", action)
        return None

    def _end(self, given: Given, error: str | None) -> None:
        given.over, given.error = True, error
        self._tell(given)

    def _tell(self, given: Given) -> None:
        assert self._outbox is not None, "commands come to members"
        # A change that came later is part of what is loaded: the newest answer is what others go by.
        loras = self.loras if given.command.action in LORA_CHANGES else given.loras
        answer = self._outbox.command_answer(given.command_id, given.command, given.owner_epoch, loras, given.error)
        self._send([answer])
