"""The order of a publisher's numbered batches: gaps, what to ask again, late ones, another publisher. Pure.

Theory of operation. A publisher numbers its batches from 0, sends each once, and answers from a buffer what is asked
for by number. Its live batches come in order, so a number that does not rise is another publisher's, which began at 0.
Every question but the first begins with the last batch that is known: an answer that has another one there, or none,
is another publisher's, too. While an answer is awaited live batches wait; what they show to be missing after it is
asked for once more, for the answer may be older than they are, and is then lost.
"""

from collections import deque

import msgspec
from xxhash import xxh3_64_intdigest

HELD_MAX = 4_096  # live batches that wait for an answer: half a minute of a busy engine
FAILURES_MAX = 3


class Deliver(msgspec.Struct, frozen=True):
    """The next batch."""

    seq: int
    payload: bytes


class Ask(msgspec.Struct, frozen=True):
    """Ask the publisher for its batches from this number on; an answer under way is not wanted any more."""

    from_seq: int


class Lost(msgspec.Struct, frozen=True):
    """Batches before the next one are missing, and cannot be had. The reason is fit for a log."""

    reason: str


class Restarted(msgspec.Struct, frozen=True):
    """The next batch is another publisher's first, or whatever it still has."""


Step = Deliver | Ask | Lost | Restarted


class Sequence:
    """One publisher's numbers. Every method returns what to do, in order.

    `replays` is whether anybody answers; without that every gap is a loss. `next_seq` is the number that is due;
    `gaps` and `late` count what came out of turn.
    """

    def __init__(self, *, replays: bool, held_max: int = HELD_MAX) -> None:
        self.next_seq = 0
        self.asking = False
        self.gaps = 0
        self.late = 0
        self._replays = replays
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_max = held_max
        self._live_seq = -1  # the highest that came live
        self._known: int | None = None  # a digest of the batch before the one that is due
        self._known_awaited = False
        self._again = False
        self._asked_for = -1  # what was due when a gap was last asked for
        self._failures = 0

    def check(self) -> list[Step]:
        """Ask whether there is more than what came: at the start, after a reconnection, and when it is quiet."""
        if not self._replays:
            return []
        if self.asking:
            self._again = True  # the answer under way may have been given before
            return []
        return [self._ask()]

    def live(self, seq: int, payload: bytes) -> list[Step]:
        """A batch that was just published."""
        steps: list[Step] = []
        if seq <= self._live_seq:
            steps += self._restart()
        self._live_seq = seq
        if not self.asking:
            return steps + self._take(seq, payload)
        if len(self._held) < self._held_max:
            self._held.append((seq, payload))
        return steps

    def replayed(self, seq: int, payload: bytes) -> list[Step]:
        """A batch of the answer; the feed drops those of answers that are not wanted."""
        steps: list[Step] = []
        if self._known_awaited:
            self._known_awaited = False
            if seq < self.next_seq:
                return [] if seq == self.next_seq - 1 and _digest(payload) == self._known else self._restart()
            # It could be another publisher's just as well.
            steps.append(self._lose(seq, "it answered without the last batch that is known"))
        if seq < self.next_seq:
            return steps
        if seq > self.next_seq:
            self.gaps += 1
            steps.append(self._lose(seq, "the publisher has them no more"))
        return [*steps, self._deliver(seq, payload)]

    def answered(self) -> list[Step]:
        """The answer has ended."""
        if self._known_awaited:
            return self._restart()
        self._failures = 0
        return [self._ask()] if self._again else self._go_on()

    def failed(self) -> list[Step]:
        """No answer, or no end of it, came in time."""
        self._failures += 1
        if self._failures < FAILURES_MAX:
            return [self._ask()]
        self._failures = 0
        return self._go_on()

    def _go_on(self) -> list[Step]:
        self.asking = False
        steps: list[Step] = []
        held, self._held = self._held, deque()
        while held and not self.asking:
            steps += self._take(*held.popleft())
        if self.asking:
            self._held.extend(held)
        elif self._live_seq >= self.next_seq:  # there was no room for it
            steps += self._missing(self._live_seq + 1)
        return steps

    def _take(self, seq: int, payload: bytes) -> list[Step]:
        if seq < self.next_seq:
            self.late += 1
            return []
        steps: list[Step] = []
        if seq > self.next_seq:
            self.gaps += 1
            steps = self._missing(seq)
            if self.asking:
                self._held.append((seq, payload))
                return steps
        return [*steps, self._deliver(seq, payload)]

    def _missing(self, seq: int) -> list[Step]:
        if self._replays and self._asked_for != self.next_seq:
            self._asked_for = self.next_seq
            return [self._ask()]
        return [self._lose(seq, "the publisher does not have them" if self._replays else "there is nobody to ask")]

    def _deliver(self, seq: int, payload: bytes) -> Deliver:
        self.next_seq = seq + 1
        self._known = _digest(payload)
        return Deliver(seq, payload)

    def _lose(self, seq: int, why: str) -> Lost:
        first, self.next_seq = self.next_seq, seq
        self._known = None
        which = f"{first} to {seq - 1}" if seq > first else f"around {seq}"
        return Lost(f"KV events are missing, batches {which}: {why}")

    def _ask(self) -> Ask:
        self.asking = True
        self._again = False
        self._known_awaited = self._known is not None
        return Ask(self.next_seq - self._known_awaited)

    def _restart(self) -> list[Step]:
        self.next_seq = 0
        self._known = None
        self._live_seq = -1
        self._asked_for = -1
        self._failures = 0
        self._held.clear()
        return [Restarted(), self._ask()] if self._replays else [Restarted()]


def _digest(payload: bytes) -> int:
    return xxh3_64_intdigest(payload)
