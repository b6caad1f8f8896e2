"""Reserve TCP ports for engines that must be given a port to listen on."""

import itertools
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress

FIRST, LAST = 15_000, 19_999  # below the ephemeral range, from which a client could take a port before the engine does


def free_ports(count: int, host: str = "127.0.0.1") -> int | None:
    """Return the first of `count` consecutive TCP ports that `reserve_ports` has reserved; None if there are none."""
    # Workers that start together search from different ports.
    begin = FIRST + os.getpid() * 8 % (LAST - FIRST)
    candidates = itertools.chain(range(begin, LAST - count, count), range(FIRST, begin, count))
    return next((first for first in candidates if reserve_ports(range(first, first + count), host)), None)


def reserve_ports(ports: Sequence[int], host: str) -> bool:
    """Reserve TCP ports until this process ends. Return False, without a reservation, if one of them is in use.

    A reserved port cannot be reserved again. On Linux, an engine can still listen on it, because a socket that is bound
    with SO_REUSEADDR, but does not listen, does not prevent that. Elsewhere, another process can still take the port.
    """
    with ExitStack() as opened, suppress(OSError, OverflowError):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = [opened.enter_context(socket.socket(family)) for _ in ports]
        for port, one in zip(ports, bound, strict=True):
            one.bind((host, port))
        if sys.platform == "linux":
            for one in bound:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.detach()  # it stays open until the process ends
        return True
    return False
