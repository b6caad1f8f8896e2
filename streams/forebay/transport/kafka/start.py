"""Starts aiokafka's clients whole or not at all."""

import asyncio
from collections.abc import Awaitable, Callable

CANCEL_GRACE_S = 1.0  # a broker that answers lets a client in far sooner


async def start_whole(start: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]]) -> None:
    """Start a client, and stop it when that fails or is cancelled. Raises what `start` raises.

    A start that is cancelled in its midst may forget an open connection, so it is given `CANCEL_GRACE_S` to end.
    """
    starting = asyncio.ensure_future(start())
    try:
        await asyncio.shield(starting)
    except BaseException:
        await asyncio.wait([starting], timeout=CANCEL_GRACE_S)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await stop()
        raise
