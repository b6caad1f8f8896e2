"""Forward TCP connections with a delay in each direction: `python -m tests.harness.delay_proxy MS LISTEN:TARGET ...`.

This takes the place of `tc netem` on kernels that lack it. Ports are of the loopback address. The order of the bytes
stays the same, and the bandwidth is not limited.
"""

import asyncio
import selectors
import sys
from collections import deque
from functools import partial
from typing import cast

from infra.kafka.kafka import HOST

# The other selectors round timers up to whole milliseconds.
SELECTOR = selectors.SelectSelector


class End(asyncio.Protocol):
    """One end of a forwarded connection, which writes received bytes to the other end after `delay_s`."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._waiting: deque[bytes] = deque()
        self._transport: asyncio.Transport | None = None
        self.other: End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._waiting.append(data)
        asyncio.get_running_loop().call_later(self._delay_s, self._forward)

    def _forward(self) -> None:
        assert self.other is not None
        assert self.other._transport is not None
        self.other._transport.write(self._waiting.popleft())

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other._transport is not None:
            self.other._transport.close()


class Accepted(End):
    """The end of the client, which is read once the target is connected."""

    def __init__(self, delay_s: float, target: int) -> None:
        super().__init__(delay_s)
        self._target = target
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast(asyncio.Transport, transport).pause_reading()
        self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        assert self._transport is not None
        try:
            _, other = await asyncio.get_running_loop().create_connection(
                partial(End, self._delay_s), HOST, self._target
            )
        except OSError:  # the target does not run yet, or no longer
            self._transport.abort()
            return
        self.other, other.other = other, self
        self._transport.resume_reading()


async def _serve(delay_s: float, pairs: list[tuple[int, int]]) -> None:
    loop = asyncio.get_running_loop()
    for listen, target in pairs:
        await loop.create_server(partial(Accepted, delay_s, target), HOST, listen)
    await asyncio.Event().wait()


def main() -> None:
    """Forward until killed."""
    delay_ms, *pairs = sys.argv[1:]
    ports = [(int(listen), int(target)) for listen, _, target in (pair.partition(":") for pair in pairs)]
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(SELECTOR())) as runner:
        runner.run(_serve(float(delay_ms) / 1000, ports))


if __name__ == "__main__":
    main()
