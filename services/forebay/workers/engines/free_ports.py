"""Ports for engines that want to be told where to listen, on loopback or at an address of this machine."""

import itertools
import os
import socket
from contextlib import ExitStack, suppress

FIRST, LAST = 15_000, 19_999  # below what systems hand out to clients, who could take one before the engine does


def free_ports(count: int, host: str = "127.0.0.1") -> int | None:
    """The first of so many ports in a row at which nobody listens now; None where there are none."""
    # Workers that start together begin at different places.
    begin = FIRST + os.getpid() * 8 % (LAST - FIRST)
    for first in itertools.chain(range(begin, LAST - count, count), range(FIRST, begin, count)):
        with ExitStack() as held, suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server((host, port), reuse_port=False))
            return first
    return None
