"""Read the log from tasks that must not end because the log cannot be read for a while."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from forebay.transport.base import LogUnavailable

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

RETRY_S = 0.2  # a read of a broker that is away takes up to 10 s by itself


async def until_available(read: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of a read, repeated while the log is unavailable. Raises LogError after a permanent error."""
    while True:
        try:
            return await read()
        except LogUnavailable as error:
            logger.warning("%s; trying again", error)
            await asyncio.sleep(RETRY_S)
