"""How an engine is: asked every now and then and whenever somebody wants to know; and why it is no more, on the log."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from forebay.events.codec import encode
from forebay.events.fleet import WorkerSpec
from forebay.events.progress import EngineFailed
from forebay.events.topics import PROGRESS
from forebay.transport.base import Draft, Log, LogError
from forebay.workers.engine import Engine, EngineError

CHECK_S = 2.0  # between two health checks
CHECK_TIMEOUT_S = 10.0  # an engine that is alive answers at once; a machine may be busy
TELL_S = 5.0  # to say on the log what an engine died of; its lease is held for as long
ERROR_CHARS_MAX = 2_000


async def tell_failure(
    log: Log, partition: int, spec: WorkerSpec, worker_epoch: int | None, error: BaseException
) -> None:
    """Say on the log which EngineError a worker ends with, if there is one in `error`, a group or not."""
    if isinstance(error, BaseExceptionGroup):
        error = error.subgroup(EngineError) or error
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, EngineError):
        return
    event = EngineFailed(
        worker_id=spec.worker_id,
        pool=spec.pool,
        engine=spec.engine,
        error=str(error)[:ERROR_CHARS_MAX],
        worker_epoch=worker_epoch,
        at_us=time.time_ns() // 1000,
    )
    # A log that fails, too, is told by whoever waits for it.
    with contextlib.suppress(LogError, TimeoutError):
        async with asyncio.timeout(TELL_S):
            await log.append([Draft(PROGRESS.name, partition, encode(PROGRESS, event))])


class HealthWatch:
    """`checked_s` is when the engine was last known to be alive, on the monotonic clock."""

    def __init__(self, engine: Engine) -> None:
        self.checked_s = time.monotonic()
        self._engine = engine
        self._wanted = asyncio.Event()

    def ask(self) -> None:
        """Have the next check at once."""
        self._wanted.set()

    async def run(self, passed: Callable[[], None]) -> None:
        """Call `passed` after each check, until cancelled. Raises EngineError when the engine is broken."""
        while True:
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    await self._engine.check()
            except TimeoutError:
                text = f"the engine did not answer a health check within {CHECK_TIMEOUT_S:g} s"
                raise EngineError(text) from None
            self.checked_s = time.monotonic()
            passed()
            self._wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._wanted.wait()
