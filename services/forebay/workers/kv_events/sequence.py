"""Put the numbered batches of an engine's KV event publisher in order, and detect gaps and restarts. Performs no I/O.

Theory of operation. A publisher numbers its batches from 0 and publishes each once. On request it replays the batches
that it has buffered, from a number on. Live batches (those that are not replayed) arrive in order. So if a number does
not increase, the batch belongs to a new publisher, which began at 0. Every replay request except the first begins with
the last delivered batch. If that batch is missing in the replay, or differs, the replay is from a new publisher, too.

During a replay, live batches are queued. If there is a gap between the replay and the queued batches, a replay is
requested once more, because the publisher may have read its buffer before it published them. If the gap remains, the
batches in it are lost.
"""

from collections import deque

import msgspec
from xxhash import xxh3_64_intdigest

HELD_MAX = 4_096  # live batches queued during a replay: half a minute of a busy engine
FAILURES_MAX = 3


class Deliver(msgspec.Struct, frozen=True):
    """Instruction to the caller: process this batch of KV events, the next one in order."""

    seq: int
    payload: bytes


class RequestReplay(msgspec.Struct, frozen=True):
    """Instruction to the caller: request a replay from the publisher, and ignore an earlier replay in progress."""

    from_seq: int


class Lost(msgspec.Struct, frozen=True):
    """Instruction to the caller: batches before the next delivered one are lost, so the known blocks are incomplete."""

    reason: str


class Restarted(msgspec.Struct, frozen=True):
    """Instruction to the caller: the engine has restarted, so forget all its blocks.

    The next delivered batch is the first one that the new publisher still has.
    """


Step = Deliver | RequestReplay | Lost | Restarted


class Sequence:
    """State machine that orders the batches of one publisher. Its methods return instructions to execute in order.

    If the publisher cannot replay batches, the batches of every gap are lost. During a replay, at most `held_max` live
    batches are queued. `late` counts batches that arrived after a later batch, and were dropped.
    """

    def __init__(self, *, replays: bool, held_max: int = HELD_MAX) -> None:
        self.next_seq = 0
        self.asking = False
        self.gaps = 0
        self.late = 0
        self._replays = replays
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_max = held_max
        self._live_seq = -1  # highest number of a live batch
        self._known: int | None = None  # digest of the last delivered batch
        self._known_awaited = False
        self._again = False
        self._requested_from = -1  # value of `next_seq` when a replay was last requested because of a gap
        self._failures = 0

    def check(self) -> list[Step]:
        """Request a replay to find missed batches: at the start, after a reconnection, and after a silence."""
        if not self._replays:
            return []
        if self.asking:
            self._again = True  # the replay in flight may have been read before this call
            return []
        return [self._request_replay()]

    def live(self, seq: int, payload: bytes) -> list[Step]:
        """Handle a batch that the publisher has just published."""
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
        """Handle a batch of the requested replay. The caller drops batches of earlier replays."""
        steps: list[Step] = []
        if self._known_awaited:
            self._known_awaited = False
            if seq < self.next_seq:
                return [] if seq == self.next_seq - 1 and _digest(payload) == self._known else self._restart()
            # The replay may also come from a new publisher.
            steps.append(self._lose(seq, "the replay does not begin with the last known batch"))
        if seq < self.next_seq:
            return steps
        if seq > self.next_seq:
            self.gaps += 1
            steps.append(self._lose(seq, "the publisher no longer has them"))
        return [*steps, self._deliver(seq, payload)]

    def replay_ended(self) -> list[Step]:
        if self._known_awaited:
            return self._restart()
        self._failures = 0
        return [self._request_replay()] if self._again else self._go_on()

    def failed(self) -> list[Step]:
        """Handle a timeout of the requested replay: request it again, or continue without it after several timeouts."""
        self._failures += 1
        if self._failures < FAILURES_MAX:
            return [self._request_replay()]
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
        elif self._live_seq >= self.next_seq:  # the queue was full
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
        if self._replays and self._requested_from != self.next_seq:
            self._requested_from = self.next_seq
            return [self._request_replay()]
        return [self._lose(seq, "the publisher does not have them" if self._replays else "replays are not available")]

    def _deliver(self, seq: int, payload: bytes) -> Deliver:
        self.next_seq = seq + 1
        self._known = _digest(payload)
        return Deliver(seq, payload)

    def _lose(self, seq: int, why: str) -> Lost:
        first, self.next_seq = self.next_seq, seq
        self._known = None
        which = f"{first} to {seq - 1}" if seq > first else f"around {seq}"
        return Lost(f"KV events are missing, batches {which}: {why}")

    def _request_replay(self) -> RequestReplay:
        self.asking = True
        self._again = False
        self._known_awaited = self._known is not None
        return RequestReplay(self.next_seq - self._known_awaited)

    def _restart(self) -> list[Step]:
        self.next_seq = 0
        self._known = None
        self._live_seq = -1
        self._requested_from = -1
        self._failures = 0
        self._held.clear()
        return [Restarted(), self._request_replay()] if self._replays else [Restarted()]


def _digest(payload: bytes) -> int:
    return xxh3_64_intdigest(payload)
