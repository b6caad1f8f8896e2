"""Start aiokafka's clients so that a failed or cancelled start leaves no connection open, and stop them in time."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

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


async def stop_within(seconds: float, *stops: Coroutine[None, None, None]) -> None:
    """Run the coroutines that stop clients, and cancel those that take longer. Raises none of their errors.

    aiokafka may wait for a broker that is away. It may also raise the error of one of its tasks again, or the
    CancelledError of a task that it cancelled itself.
    """
    stopping = [asyncio.ensure_future(stop) for stop in stops]
    _, hanging = await asyncio.wait(stopping, timeout=seconds)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*stopping, return_exceptions=True)
