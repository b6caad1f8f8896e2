"""Bandwidth that the transfers of one tier share, in virtual time.

All transfers in flight get an equal share. Instead of the remaining bytes of every transfer, the link keeps the bytes
that each of them would have got since the link was idle; a transfer ends when that number reaches its own. So the
begin and end of a transfer do not depend on the number of others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Protocol

LEFT_MAX = 1.0  # a transfer with less than one byte left has ended, because the clock has whole microseconds


class Scheduler(Protocol):
    """Clock and queue of a simulation."""

    now_us: int  # current virtual time in microseconds

    def at(self, at_us: int, action: Callable[[], object]) -> None:
        """Schedule an action that may give work to an engine."""

    def later(self, at_us: int, action: Callable[[], object]) -> None:
        """Schedule an action that gives no work to an engine."""


class SharedLink:
    """Link to a tier. The bandwidth 0 is unlimited. The first byte of a transfer takes `latency_us` to arrive."""

    def __init__(self, bytes_per_us: float, latency_us: int, scheduler: Scheduler) -> None:
        self._bytes_per_us = bytes_per_us
        self._latency_us = latency_us
        self._scheduler = scheduler
        self._begun = 0
        self._served = 0.0  # bytes that a transfer would have got that began when the link was idle
        self._served_at_us = 0
        self._active: list[tuple[float, int, _LinkTransfer]] = []  # heap by the value of `_served` at the end
        self._loads = 0
        self._version = 0  # of the schedule; an event of an earlier version is void

    def begin(self, size: int, done: Callable[[], object], *, is_load: bool, owner: object) -> None:
        """Begin a transfer of `size` bytes. If `is_load`, its end may give work to an engine. `drop` uses `owner`."""
        self._begun += 1
        transfer = _LinkTransfer(self._begun, size, done, is_load, owner)
        self._put(self._scheduler.now_us + self._latency_us, partial(self._start, transfer), is_load)

    def drop(self, owner: object) -> None:
        """Stop the transfers of an owner that has died. Their ends are not reported; those in their latency go on."""
        self._advance()
        self._active = [one for one in self._active if one[2].owner is not owner]
        heapify(self._active)
        self._loads = sum(transfer.is_load for _, _, transfer in self._active)
        self._schedule()

    def _start(self, transfer: "_LinkTransfer") -> None:
        if not self._bytes_per_us or not transfer.size:
            transfer.done()
            return
        self._advance()
        heappush(self._active, (self._served + transfer.size, transfer.number, transfer))
        self._loads += transfer.is_load
        self._schedule()

    def _advance(self) -> None:
        now_us = self._scheduler.now_us
        if self._active:
            self._served += (now_us - self._served_at_us) * self._bytes_per_us / len(self._active)
        else:
            self._served = 0.0
        self._served_at_us = now_us

    def _schedule(self) -> None:
        self._version += 1
        if self._active:
            left = (self._active[0][0] - self._served) * len(self._active)
            at_us = self._served_at_us + max(1, math.ceil(left / self._bytes_per_us))
            self._put(at_us, partial(self._end, self._version), bool(self._loads))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended: list[_LinkTransfer] = []
        while self._active and self._active[0][0] - self._served < LEFT_MAX:
            ended.append(heappop(self._active)[2])
        self._loads -= sum(transfer.is_load for transfer in ended)
        self._schedule()
        for transfer in ended:
            transfer.done()

    def _put(self, at_us: int, action: Callable[[], object], is_load: bool) -> None:
        (self._scheduler.at if is_load else self._scheduler.later)(at_us, action)


@dataclass(slots=True, eq=False)
class _LinkTransfer:
    number: int
    size: int
    done: Callable[[], object]
    is_load: bool
    owner: object
