"""When requests come: at their times, or when those that they follow on have their answers."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from forebay.core.step import InputEvent
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import REQUESTS, Topic
from forebay.simulate.workload import Turn, WorkloadUnusable

FOREVER_US = 1 << 62
NOT_YET = -1


class Arrival(NamedTuple):
    """A record that comes from outside: requests, and what operators say. `number` is that of its turn."""

    at_us: int
    topic: Topic
    event: InputEvent
    number: int = 0


class Arrivals(Protocol):
    """What comes from outside, in the order of time.

    Attributes:
        next_us: when the next comes; `FOREVER_US` when nobody comes any more, or only after an answer.
        think_us: whoever waits for an answer comes at least so long after it; `FOREVER_US` if nobody does.
    """

    next_us: int
    think_us: int

    def take(self) -> Arrival:
        """The next one. Nothing of a time before it can come any more."""
        ...

    def ended(self, number: int, at_us: int) -> None:
        """The client of a request has all of its answer, or knows that there will be none."""
        ...

    def close(self) -> None:
        """Everything has ended."""
        ...


class Listed:
    """Arrivals that are all known, none of which waits for an answer."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._coming = iter(arrivals)
        self._head = next(self._coming, None)
        self.next_us = FOREVER_US if self._head is None else self._head.at_us
        self.think_us = FOREVER_US

    def take(self) -> Arrival:
        """The next one, as listed."""
        taken = self._head
        assert taken is not None, "there is a next one"
        self._head = next(self._coming, None)
        self.next_us = FOREVER_US if self._head is None else self._head.at_us
        return taken

    def ended(self, number: int, at_us: int) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """All have come."""


@dataclass(slots=True)
class _Follower:
    """A turn that waits for `missing` answers; the last of the others came at `last_us`."""

    turn: Turn
    missing: int
    last_us: int


class Turns:
    """The turns of a workload, which is read as time goes by: one turn that comes at its time is held ahead.

    Those that follow on others are held from the time at which they are read. That is early enough where every turn
    stands before all that come at their times, and later than it may come.
    """

    def __init__(self, turns: Iterator[Turn], submitted: Callable[[Turn], RequestSubmitted]) -> None:
        self._turns = turns
        self._submitted = submitted
        self._waiting: dict[int, list[_Follower]] = {}
        self._followers = 0
        self._ended_us = array("q")  # by number; a turn may be read long after what it follows on
        self._later: list[tuple[int, int, Turn]] = []
        self._now_us = 0
        self.next_us = FOREVER_US
        self.think_us = FOREVER_US
        self._head = self._read()
        self._look()

    def take(self) -> Arrival:
        """The next turn; of one time, the one that stands first."""
        head, later = self._head, self._later
        self._now_us = self.next_us
        if head is None or (later and later[0][:2] < (head.at_us, head.number)):
            turn = heappop(later)[2]
        else:
            turn = head
            self._head = self._read()
        self._look()
        return Arrival(self._now_us, REQUESTS, self._submitted(turn), turn.number)

    def ended(self, number: int, at_us: int) -> None:
        """Who waited for this answer, and for no other, comes now or later."""
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
        """Raises WorkloadUnusable if somebody waits for an answer that nobody asked for."""
        for number in sorted(self._waiting):
            turn = self._waiting[number][0].turn
            raise WorkloadUnusable(f"request {turn.number} follows on request {number}, which does not come before it")

    def _read(self) -> Turn | None:
        """The next turn that comes at its time; those before it wait for others."""
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
        head_us = FOREVER_US if self._head is None else self._head.at_us
        first_us = min(head_us, self._later[0][0]) if self._later else head_us
        self.next_us = max(first_us, self._now_us)
