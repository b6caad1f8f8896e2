"""Start aiokafka's clients so that a failed or cancelled start leaves no connection open."""

import asyncio
from collections.abc import Awaitable, Callable

CANCEL_GRACE_S = 1.0  # a reachable broker completes a start much faster


async def start_whole(start: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]]) -> None:
    """Start a client, and stop it if the start fails or is cancelled. Raises what `start` raises.

    Cancelling a start may leak an open connection, so a cancelled start gets `CANCEL_GRACE_S` to finish.
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
