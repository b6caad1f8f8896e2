"""Asks an engine how it is, every now and then and whenever somebody wants to know."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from forebay.workers.engine import Engine, EngineError

CHECK_S = 2.0  # between two health checks
CHECK_TIMEOUT_S = 10.0  # an engine that is alive answers at once; a machine may be busy


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
