"""Arrival of requests: at fixed times, or after the responses that they depend on."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from forebay.core.step import InputEvent
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import REQUESTS, Topic
from forebay.runtime.errors import ConfigError
from forebay.simulate.workload import Turn

FOREVER_US = 1 << 62
NOT_YET = -1


class Arrival(NamedTuple):
    """Record that reaches the router from outside: a request, or an operator's change."""

    at_us: int  # virtual time at which the record arrives
    topic: Topic
    event: InputEvent
    number: int = 0  # for a request, its number in the workload (`Turn.number`)


class ListedArrivals:
    """Arrivals that are all known in advance.

    Attributes:
        next_us: time of the next arrival. `FOREVER_US` if none remains, or if every remaining one waits for a response.
        think_us: lower bound of the delay between a response and the arrivals that depend on it. `FOREVER_US` if no
            arrival depends on a response.
    """

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._coming = iter(arrivals)
        self._head = next(self._coming, None)
        self.next_us = FOREVER_US if self._head is None else self._head.at_us
        self.think_us = FOREVER_US

    def take(self) -> Arrival:
        """Remove and return the next arrival. Later calls never return an earlier time."""
        taken = self._head
        assert taken is not None, "take() after the last arrival"
        self._head = next(self._coming, None)
        self.next_us = FOREVER_US if self._head is None else self._head.at_us
        return taken

    def ended(self, number: int, at_us: int) -> None:
        """Record that the client of a request has its whole response, or knows that it failed, at `at_us`."""

    def close(self) -> None:
        """Check that every arrival was taken. Call after the end of the run."""


@dataclass(slots=True)
class _Follower:
    """Turn that waits for `missing` more responses. The latest response so far came at `last_us`."""

    turn: Turn
    missing: int
    last_us: int


class WorkloadArrivals(ListedArrivals):
    """Arrivals of the turns of a workload: requests at a fixed time, or after the responses that they depend on.

    The workload is read incrementally: only one turn with a fixed time is read ahead. A turn that depends on other
    turns is queued when it is read. The workload must list it before all turns whose fixed time is later; otherwise the
    turn may arrive too late.
    """

    def __init__(self, turns: Iterator[Turn], submitted: Callable[[Turn], RequestSubmitted]) -> None:
        self._turns = turns
        self._submitted = submitted
        self._waiting: dict[int, list[_Follower]] = {}
        self._followers = 0
        self._ended_us = array("q")  # by number, because a turn may be read long after the turns that it depends on
        self._later: list[tuple[int, int, Turn]] = []
        self._now_us = 0
        self.next_us = FOREVER_US
        self.think_us = FOREVER_US
        self._timed = self._read()
        self._look()

    def take(self) -> Arrival:
        """Remove and return the next turn. Of several turns at one time, return the first in the workload."""
        head, later = self._timed, self._later
        self._now_us = self.next_us
        if head is None or (later and later[0][:2] < (head.at_us, head.number)):
            turn = heappop(later)[2]
        else:
            turn = head
            self._timed = self._read()
        self._look()
        return Arrival(self._now_us, REQUESTS, self._submitted(turn), turn.number)

    def ended(self, number: int, at_us: int) -> None:
        """Schedule the turns that waited only for the response to request `number`, which ended at `at_us`."""
        missing = number + 1 - len(self._ended_us)
        if missing > 0:
            self._ended_us.extend([NOT_YET] * missing)
        self._ended_us[number] = at_us
        followers = self._waiting.pop(number, None)
        if followers is None:
            return
        for follower in followers:
            follower.missing -= 1
            follower.last_us = max(follower.last_us, at_us)
            if not follower.missing:
                self._release(follower)
        self._look()

    def close(self) -> None:
        """Check that no turn still waits for a response. Raises ConfigError if one does."""
        for number in sorted(self._waiting):
            turn = self._waiting[number][0].turn
            reason = f"request {turn.number} depends on request {number}, which does not come before it"
            raise ConfigError(reason)

    def _read(self) -> Turn | None:
        """Return the next turn with a fixed time, and queue the dependent turns before it."""
        for turn in self._turns:
            if not turn.after:
                return turn
            self._wait(turn)
        return None

    def _wait(self, turn: Turn) -> None:
        ended_us = [self._ended_us[one] if one < len(self._ended_us) else NOT_YET for one in turn.after]
        missing = [number for number, at_us in zip(turn.after, ended_us, strict=True) if at_us == NOT_YET]
        follower = _Follower(turn, len(missing), max(ended_us))
        self._followers += 1
        self.think_us = min(self.think_us, turn.delay_us)
        for number in missing:
            self._waiting.setdefault(number, []).append(follower)
        if not missing:
            self._release(follower)

    def _release(self, follower: _Follower) -> None:
        turn = follower.turn
        heappush(self._later, (max(turn.at_us, follower.last_us + turn.delay_us), turn.number, turn))
        self._followers -= 1
        if not self._followers:
            self.think_us = FOREVER_US

    def _look(self) -> None:
        head_us = FOREVER_US if self._timed is None else self._timed.at_us
        first_us = min(head_us, self._later[0][0]) if self._later else head_us
        self.next_us = max(first_us, self._now_us)
