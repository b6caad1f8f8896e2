"""Check the health of an engine periodically, and report its failure on the log."""

import asyncio
import contextlib
from collections.abc import Callable

from forebay import runtime
from forebay.events.codec import encode
from forebay.events.fleet import WorkerSpec
from forebay.events.progress import EngineFailed
from forebay.events.topics import PROGRESS
from forebay.transport.base import Draft, Log, LogError
from forebay.workers.engine import Engine, EngineError

CHECK_S = 2.0  # interval between two health checks
CHECK_TIMEOUT_S = 10.0  # a live engine replies at once; the machine may be busy
REPORT_TIMEOUT_S = 5.0  # timeout for reporting the cause of the failure; the lease is kept as long
ERROR_CHARS_MAX = 2_000


async def report_failure(
    log: Log, partition: int, spec: WorkerSpec, worker_epoch: int | None, error: BaseException
) -> None:
    """Append an `EngineFailed` event if an EngineError has ended a worker. Other errors are not reported.

    Args:
        partition: partition of the control topics of the worker's group.
        worker_epoch: epoch of the worker; None if it was not a member of the fleet.
        error: exception that ended the worker. It may be an exception group that contains an EngineError.
    """
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
        at_us=runtime.wall_us(),
    )
    # If the log fails, other tasks of the worker report that.
    with contextlib.suppress(LogError, TimeoutError):
        async with asyncio.timeout(REPORT_TIMEOUT_S):
            await log.append([Draft(PROGRESS.name, partition, encode(PROGRESS, event))])


class HealthWatch:
    """Checks the health of one engine periodically.

    Attributes:
        checked_s: time of the last successful check, in seconds of the monotonic clock.
        healthy_s: seconds from the first to the last successful check of `run`.
    """

    def __init__(self, engine: Engine) -> None:
        self.checked_s = runtime.monotonic_s()
        self.healthy_s = 0.0
        self._engine = engine
        self._wanted = asyncio.Event()

    def check_now(self) -> None:
        """Make `run` perform the next check immediately."""
        self._wanted.set()

    async def run(self, passed: Callable[[], None]) -> None:
        """Check the engine until cancelled, and call `passed` after each successful check.

        Raises:
            EngineError: the engine is broken or does not reply in time.
        """
        first_s: float | None = None
        while True:
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    await self._engine.check()
            except TimeoutError:
                text = f"the engine did not reply to a health check within {CHECK_TIMEOUT_S:g} s"
                raise EngineError(text) from None
            self.checked_s = runtime.monotonic_s()
            first_s = self.checked_s if first_s is None else first_s
            self.healthy_s = self.checked_s - first_s
            passed()
            self._wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._wanted.wait()
