"""Find free TCP ports for engines that must be given a port to listen on."""

import itertools
import os
import socket
from contextlib import ExitStack, suppress

FIRST, LAST = 15_000, 19_999  # below the ephemeral range, from which a client could take a port before the engine does


def free_ports(count: int, host: str = "127.0.0.1") -> int | None:
    """Return the first of `count` consecutive TCP ports that are free at `host`; None if there are none.

    Another process can still take a port before the engine listens on it.
    """
    # Workers that start together search from different ports.
    begin = FIRST + os.getpid() * 8 % (LAST - FIRST)
    for first in itertools.chain(range(begin, LAST - count, count), range(FIRST, begin, count)):
        with ExitStack() as held, suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server((host, port), reuse_port=False))
            return first
    return None
