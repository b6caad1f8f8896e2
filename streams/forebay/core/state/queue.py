"""Router queue: requests that wait, because every rank that may take them has too much to prefill or no room.

A pool has one line per queue class, ordered by priorities and the policy of the class. Lines take turns by deficit
round robin. A turn adds the quantum of the class to the line's deficit counter. A request that leaves the line
subtracts its uncached tokens. A line is served until its deficit is lower than the cost of its next request.

It may happen that no rank can take the first request of a line, but a rank can take a later one. Requests with equal
routing requirements have the same candidates. So a line offers the first dispatchable request among the first requests
of each requirement. A line without an offer does not take part in the round. The order follows from the queued
requests, the turn and the deficits alone, never from earlier events.

Source: Dynamo's policy-class queues; Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round Robin".
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from forebay.core.state_machine import digest_of, plain
from forebay.events.base import U64_MASK
from forebay.events.control import DEFAULT_CLASS, QueueClass, QueueConfig, QueuePolicy
from forebay.events.snapshots import ClassDeficit, QueueTurns

OFFERS_PER_LINE_MAX = 16  # requirements per line that are tried before the line waits; each try looks at every rank
_US = 1_000_000
# Fractions with denominators below 2**63 differ by more than 2**-126. Scaled by 2**128, integers keep their order.
_SCALE_BITS = 128


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """Request that waits in the router's queue.

    Attributes:
        policy_class: queue class that the client named. It is kept because a change of the configuration may add or
            remove classes.
        uncached_tokens: prompt tokens that even the rank with the largest overlap had to compute on arrival.
        priority: seconds by which the request is moved ahead; may be negative.
        strict_priority: requests with a higher value go first.
        arrival_us: arrival time on the owner's clock, in microseconds.
        demand: routing requirements; requests with equal values have the same candidates.
    """

    request_id: str
    offset: int
    policy_class: str
    uncached_tokens: int
    priority: int
    strict_priority: int
    arrival_us: int
    demand: tuple[object, ...]

    @property
    def cost(self) -> int:
        """Tokens that the request subtracts from the deficit of its queue class when it leaves the queue."""
        return max(1, self.uncached_tokens)


_Entry = tuple[int, int, int, QueuedRequest]


@dataclass(slots=True)
class _Line:
    """Queued requests of one class. `waiting` has them by requirement, `heads` the first one of each, both in order."""

    kind: QueueClass
    policy: QueuePolicy
    deficit: int = 0
    size: int = 0
    waiting: dict[tuple[object, ...], list[_Entry]] = field(default_factory=dict)
    heads: list[_Entry] = field(default_factory=list)

    def push(self, queued: QueuedRequest) -> None:
        entry = (*_order(self.policy, queued), queued)
        alike = self.waiting.setdefault(queued.demand, [])
        insort(alike, entry)
        self.size += 1
        if alike[0] is entry:
            if len(alike) > 1:
                del self.heads[bisect_left(self.heads, alike[1])]
            insort(self.heads, entry)

    def remove(self, queued: QueuedRequest) -> None:
        alike = self.waiting[queued.demand]
        at = bisect_left(alike, _order(self.policy, queued))
        gone = alike.pop(at)
        self.size -= 1
        if not at:
            del self.heads[bisect_left(self.heads, gone)]
            if alike:
                insort(self.heads, alike[0])
            else:
                del self.waiting[queued.demand]
        if not self.size:
            self.deficit = 0  # an empty line does not save up credit

    def all(self) -> Iterator[QueuedRequest]:
        return (one[-1] for alike in self.waiting.values() for one in alike)

    def in_order(self) -> list[QueuedRequest]:
        return sorted(self.all(), key=lambda queued: _order(self.policy, queued))

    def offer(self, is_dispatchable: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        first = (one[-1] for one in islice(self.heads, OFFERS_PER_LINE_MAX))
        return next(filter(is_dispatchable, first), None)

    def take_turn(self, queued: QueuedRequest) -> bool:
        """Give the line its turn; return whether its deficit covers this request then."""
        # Add the quantum only if the deficit is too low. Otherwise a line that often has no offer would save up credit
        # without bound.
        if queued.cost > self.deficit:
            self.deficit += self.kind.quantum
        return queued.cost <= self.deficit


@dataclass(slots=True)
class _Pool:
    """Lines of one pool. `turn` is the index of the line that was served last; it continues while its deficit lasts."""

    config: QueueConfig
    lines: list[_Line]
    turn: int


class Queues:
    """Router queues of all pools. They determine which queued request is served next."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._queued: dict[str, tuple[str, QueuedRequest]] = {}
        self._sum = 0

    def __len__(self) -> int:
        return len(self._queued)

    def configure(self, pool: str, config: QueueConfig) -> None:
        """Set the queue configuration of a pool.

        Queued requests enter the new classes. If the class of a request was removed, the request enters the default
        class. Remaining classes keep their deficits. If the class that was served last is removed, the first
        class is next.
        """
        old = self._pools.get(pool)
        if old is not None and old.config == config:
            return
        lines = [_Line(kind, kind.policy or config.policy) for kind in config.classes]
        new = _Pool(config, lines, len(lines) - 1)
        self._pools[pool] = new
        if old is None:
            return
        deficits = {_key(line.kind): line.deficit for line in old.lines}
        served = _key(old.lines[old.turn].kind)
        for queued in (queued for line in old.lines for queued in line.all()):
            self._line(new, queued).push(queued)
        for at, line in enumerate(lines):
            if line.size:
                line.deficit = deficits.get(_key(line.kind), 0)
            if _key(line.kind) == served:
                new.turn = at

    def push(self, pool: str, queued: QueuedRequest) -> None:
        """Add a request to the queue of `pool`. The pool must be configured, and the request must not be queued yet."""
        assert queued.request_id not in self._queued, "a request waits once"
        self._line(self._pools[pool], queued).push(queued)
        self._queued[queued.request_id] = (pool, queued)
        self._sum += _term(pool, queued)

    def remove(self, request_id: str) -> bool:
        """Remove a cancelled or expired request. Return False if it was not queued."""
        if request_id not in self._queued:
            return False
        pool, queued = self._queued[request_id]
        self._forget(self._line(self._pools[pool], queued), pool, queued)
        return True

    def serve(self, pool: str, is_dispatchable: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        """Remove and return the next request that can be dispatched. Return None and change nothing if there is none.

        `is_dispatchable` depends on the request's requirements alone. It is called in serving order, once per
        requirement in a queue class, and at most `OFFERS_PER_LINE_MAX` times per class.
        """
        state = self._pools[pool]
        found = _next(state, is_dispatchable)
        if found is None:
            return None
        at, queued = found
        state.turn = at
        state.lines[at].deficit -= queued.cost
        self._forget(state.lines[at], pool, queued)
        return queued

    def waiting(self, pool: str) -> int:
        return sum(line.size for line in self._pools[pool].lines)

    def in_order(self, pool: str) -> list[tuple[QueueClass, list[QueuedRequest]]]:
        """Return the queue classes of a pool in configured order, each with its requests in serving order."""
        return [(line.kind, line.in_order()) for line in self._pools[pool].lines]

    def length(self, pool: str, kind: QueueClass) -> int:
        return next(line.size for line in self._pools[pool].lines if _key(line.kind) == _key(kind))

    def digest(self) -> int:
        """Return a 64-bit digest over queued requests, turns and deficits, in time linear in the number of classes."""
        return (self._sum + digest_of(*map(plain, self.snapshot()))) & U64_MASK

    def snapshot(self) -> Iterator[QueueTurns]:
        """Yield turn and deficits of the pools, by name. Queued requests are in the snapshot of `ActiveRequests`."""
        for pool, state in sorted(self._pools.items()):
            classes = (
                ClassDeficit(
                    name=line.kind.name, uncached_tokens_min=line.kind.uncached_tokens_min, deficit=line.deficit
                )
                for line in state.lines
            )
            yield QueueTurns(pool=pool, turn=state.turn, classes=tuple(classes))

    def restore(self, chunk: QueueTurns) -> None:
        """Apply one part of a snapshot. Its pool must have been configured before."""
        state = self._pools[chunk.pool]
        kinds = [(one.name, one.uncached_tokens_min) for one in chunk.classes]
        assert kinds == [_key(line.kind) for line in state.lines], "turns are those of the pool's classes"
        state.turn = chunk.turn
        for line, one in zip(state.lines, chunk.classes, strict=True):
            line.deficit = one.deficit

    @staticmethod
    def _line(state: _Pool, queued: QueuedRequest) -> _Line:
        kind = class_of(state.config, queued.policy_class, queued.uncached_tokens)
        return next(line for line in state.lines if line.kind is kind)

    def _forget(self, line: _Line, pool: str, queued: QueuedRequest) -> None:
        line.remove(queued)
        del self._queued[queued.request_id]
        self._sum -= _term(pool, queued)


def class_of(config: QueueConfig, policy_class: str, uncached_tokens: int) -> QueueClass:
    """Return the queue class of a request.

    Among the classes with the name `policy_class`, it is the one with the highest `uncached_tokens_min` that the
    request reaches. If there is no class with this name, the default classes are used.
    """
    reached = [kind for kind in config.classes if kind.uncached_tokens_min <= uncached_tokens]
    named = [kind for kind in reached if kind.name == policy_class]
    return max(
        named or [kind for kind in reached if kind.name == DEFAULT_CLASS],
        key=lambda kind: kind.uncached_tokens_min,
    )


def _next(state: _Pool, is_dispatchable: Callable[[QueuedRequest], bool]) -> tuple[int, QueuedRequest] | None:
    """Return the position of the line to serve next, and the request that it offers.

    If no deficit covers an offered request, all lines with an offer get the quanta of as many rounds as one of them
    needs.
    """
    lines, turn = state.lines, state.turn
    going_on = lines[turn].offer(is_dispatchable)
    if going_on is not None and going_on.cost <= lines[turn].deficit:
        return turn, going_on
    offers: list[tuple[int, QueuedRequest]] = []
    for at in (*range(turn + 1, len(lines)), *range(turn + 1)):
        queued = going_on if at == turn else lines[at].offer(is_dispatchable)
        if queued is not None:
            if lines[at].take_turn(queued):
                return at, queued
            offers.append((at, queued))
    if not offers:
        return None
    # A request may cost many quanta. Apply all rounds at once, except the last one.
    missing = ((lines[at].kind.quantum, queued.cost - lines[at].deficit) for at, queued in offers)
    rounds = min(-(-tokens // quantum) for quantum, tokens in missing) - 1
    for at, _ in offers:
        lines[at].deficit += rounds * lines[at].kind.quantum
    return next((at, queued) for at, queued in offers if lines[at].take_turn(queued))


def _key(kind: QueueClass) -> tuple[str, int]:
    return kind.name, kind.uncached_tokens_min


def _order(policy: QueuePolicy, queued: QueuedRequest) -> tuple[int, int, int]:
    """Return the sort key of a request in its line, lowest first: strict priority, policy key, submission.

    Policy keys are Dynamo's, highest first, as integers so that the order is the same on every machine. fcfs is
    `priority - arrival` and lcfs is `priority + arrival`, both in seconds; wspt is `(1 + priority) / max(1, uncached)`.
    """
    if policy == "wspt":
        key = ((1 + queued.priority) << _SCALE_BITS) // queued.cost
    elif policy == "fcfs":
        key = queued.priority * _US - queued.arrival_us
    else:
        key = queued.priority * _US + queued.arrival_us
    return -queued.strict_priority, -key, queued.offset


def _term(pool: str, queued: QueuedRequest) -> int:
    return digest_of(
        pool,
        queued.request_id,
        queued.offset,
        queued.policy_class,
        queued.uncached_tokens,
        queued.priority,
        queued.strict_priority,
        queued.arrival_us,
        queued.demand,
    )
