"""Requests that wait in the router because every rank that may take them has too much to prefill.

Theory of operation. A pool's queue has one line for each of its classes, in order of priorities and the class's
policy. Lines take turns by deficit round robin: a turn adds the class's quantum to what the line may spend, a
request costs its uncached tokens, and a line that is served goes on until it cannot pay for its next request.
The first of a line may have nowhere to go while others have, but those with the same demands go nowhere either: a
line offers the first that may go of those that are the first with their demands, and one that offers nothing takes no
part in the round. Where a request stands follows from who waits, whose turn it is and what lines may spend, never
from what happened before.

Source: Dynamo's policy-class queues; Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round Robin".
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_MASK
from forebay.events.control import DEFAULT_CLASS, QueueClass, QueueConfig, QueuePolicy
from forebay.events.snapshots import ClassDeficit, QueueTurns

LOOK_PAST_MAX = 16  # demands of a line that are tried before it waits: each try looks at every rank
_US = 1_000_000
# Fractions whose denominators are below 2**63 differ by more than 2**-126: scaled so, whole numbers order them.
_SCALE_BITS = 128


@dataclass(frozen=True, slots=True)
class Held:
    """A request that waits.

    Attributes:
        offset: of its submission; no two have the same.
        policy_class: as its client named it, so that it finds its class again when classes change.
        uncached_tokens: prompt tokens that the best rank has not in its cache, when it came.
        priority: seconds by which it goes before its time; may be negative.
        strict_priority: higher ones go first.
        arrival_us: when it came.
        demand: what decides where it may go; who has the same may go to the same ranks.
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
        """What serving it takes from its line, in tokens."""
        return max(1, self.uncached_tokens)


_Entry = tuple[int, int, int, Held]


@dataclass(slots=True)
class _Line:
    """`waiting` holds by demand who waits, in order; `heads` the first of each demand, in order."""

    kind: QueueClass
    policy: QueuePolicy
    deficit: int = 0
    size: int = 0
    waiting: dict[tuple[object, ...], list[_Entry]] = field(default_factory=dict)
    heads: list[_Entry] = field(default_factory=list)

    def push(self, held: Held) -> None:
        entry = (*_order(self.policy, held), held)
        alike = self.waiting.setdefault(held.demand, [])
        insort(alike, entry)
        self.size += 1
        if alike[0] is entry:
            if len(alike) > 1:
                del self.heads[bisect_left(self.heads, alike[1])]
            insort(self.heads, entry)

    def remove(self, held: Held) -> None:
        alike = self.waiting[held.demand]
        at = bisect_left(alike, _order(self.policy, held))
        gone = alike.pop(at)
        self.size -= 1
        if not at:
            del self.heads[bisect_left(self.heads, gone)]
            if alike:
                insort(self.heads, alike[0])
            else:
                del self.waiting[held.demand]
        if not self.size:
            self.deficit = 0  # who had nothing to send saves nothing up

    def all(self) -> Iterator[Held]:
        return (one[-1] for alike in self.waiting.values() for one in alike)

    def in_order(self) -> list[Held]:
        return sorted(self.all(), key=lambda held: _order(self.policy, held))

    def offer(self, may_go: Callable[[Held], bool]) -> Held | None:
        first = (one[-1] for one in islice(self.heads, LOOK_PAST_MAX))
        return next(filter(may_go, first), None)

    def earn(self, held: Held) -> bool:
        """It is the line's turn: whether it can pay for this request then."""
        # Only who cannot pay earns, so that a line that often has nothing to offer does not save up without end.
        if held.cost > self.deficit:
            self.deficit += self.kind.quantum
        return held.cost <= self.deficit


@dataclass(slots=True)
class _Pool:
    """`turn` is the line that was served last: it goes on while it can pay."""

    config: QueueConfig
    lines: list[_Line]
    turn: int


class Queues:
    """The queues of all pools."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._held: dict[str, tuple[str, Held]] = {}
        self._sum = 0

    def __len__(self) -> int:
        """Requests that wait, in all pools."""
        return len(self._held)

    def configure(self, pool: str, config: QueueConfig) -> None:
        """A pool queues by this from now on.

        Whoever waits there enters its line anew, that of the default class where its own is gone. Classes that stay
        keep what they may spend; if the class whose turn it was is gone, the first is next.
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
        for held in (held for line in old.lines for held in line.all()):
            self._line(new, held).push(held)
        for at, line in enumerate(lines):
            if line.size:
                line.deficit = deficits.get(_key(line.kind), 0)
            if _key(line.kind) == served:
                new.turn = at

    def push(self, pool: str, held: Held) -> None:
        """A request waits from now on; its pool was configured before."""
        assert held.request_id not in self._held, "a request waits once"
        self._line(self._pools[pool], held).push(held)
        self._held[held.request_id] = (pool, held)
        self._sum += _term(pool, held)

    def remove(self, request_id: str) -> bool:
        """A request waits no longer: cancelled, or past its deadline. False if it did not wait."""
        if request_id not in self._held:
            return False
        pool, held = self._held[request_id]
        self._forget(self._line(self._pools[pool], held), pool, held)
        return True

    def serve(self, pool: str, may_go: Callable[[Held], bool]) -> Held | None:
        """Take out the request that is next of those that may go now; None, and nothing changes, if none may.

        `may_go` says whether a rank would take a request, which depends on its demand alone. It is asked for at most
        `LOOK_PAST_MAX` of each line, in serving order, and for no demand of a line twice.
        """
        state = self._pools[pool]
        found = _next(state, may_go)
        if found is None:
            return None
        at, held = found
        state.turn = at
        state.lines[at].deficit -= held.cost
        self._forget(state.lines[at], pool, held)
        return held

    def waiting(self, pool: str) -> int:
        """How many requests wait in a pool."""
        return sum(line.size for line in self._pools[pool].lines)

    def in_order(self, pool: str) -> list[tuple[QueueClass, list[Held]]]:
        """Who waits in a pool: its classes as they are configured, each from its first request to its last."""
        return [(line.kind, line.in_order()) for line in self._pools[pool].lines]

    def length(self, pool: str, kind: QueueClass) -> int:
        """How many requests wait in one class of a pool, as it is configured now."""
        return next(line.size for line in self._pools[pool].lines if _key(line.kind) == _key(kind))

    def digest(self) -> int:
        """64 bits over who waits, the turns and the deficits; costs a look at every class."""
        turns = "".join(map(repr, self.snapshot()))
        return (self._sum + xxh3_64_intdigest(turns.encode())) & U64_MASK

    def snapshot(self) -> Iterator[QueueTurns]:
        """Turns and deficits of every pool, by name; who waits is told with the requests."""
        for pool, state in sorted(self._pools.items()):
            classes = (
                ClassDeficit(
                    name=line.kind.name, uncached_tokens_min=line.kind.uncached_tokens_min, deficit=line.deficit
                )
                for line in state.lines
            )
            yield QueueTurns(pool=pool, turn=state.turn, classes=tuple(classes))

    def restore(self, chunk: QueueTurns) -> None:
        """Take in one chunk of a snapshot; the pool was configured before."""
        state = self._pools[chunk.pool]
        kinds = [(one.name, one.uncached_tokens_min) for one in chunk.classes]
        assert kinds == [_key(line.kind) for line in state.lines], "turns are those of the pool's classes"
        state.turn = chunk.turn
        for line, one in zip(state.lines, chunk.classes, strict=True):
            line.deficit = one.deficit

    @staticmethod
    def _line(state: _Pool, held: Held) -> _Line:
        kind = class_of(state.config, held.policy_class, held.uncached_tokens)
        return next(line for line in state.lines if line.kind is kind)

    def _forget(self, line: _Line, pool: str, held: Held) -> None:
        line.remove(held)
        del self._held[held.request_id]
        self._sum -= _term(pool, held)


def class_of(config: QueueConfig, policy_class: str, uncached_tokens: int) -> QueueClass:
    """The class that a request waits in: of those with its name, or the default one, the highest that it reaches."""
    reached = [kind for kind in config.classes if kind.uncached_tokens_min <= uncached_tokens]
    named = [kind for kind in reached if kind.name == policy_class]
    return max(
        named or [kind for kind in reached if kind.name == DEFAULT_CLASS],
        key=lambda kind: kind.uncached_tokens_min,
    )


def _next(state: _Pool, may_go: Callable[[Held], bool]) -> tuple[int, Held] | None:
    """The next line to be served and what it offers, after the rounds that it takes until a line can pay."""
    lines, turn = state.lines, state.turn
    going_on = lines[turn].offer(may_go)
    if going_on is not None and going_on.cost <= lines[turn].deficit:
        return turn, going_on
    offers: list[tuple[int, Held]] = []
    for at in (*range(turn + 1, len(lines)), *range(turn + 1)):
        held = going_on if at == turn else lines[at].offer(may_go)
        if held is not None:
            if lines[at].earn(held):
                return at, held
            offers.append((at, held))
    if not offers:
        return None
    # All rounds at once but the one in which somebody can pay: a request may cost many quanta.
    missing = ((lines[at].kind.quantum, held.cost - lines[at].deficit) for at, held in offers)
    rounds = min(-(-tokens // quantum) for quantum, tokens in missing) - 1
    for at, _ in offers:
        lines[at].deficit += rounds * lines[at].kind.quantum
    return next((at, held) for at, held in offers if lines[at].earn(held))


def _key(kind: QueueClass) -> tuple[str, int]:
    return kind.name, kind.uncached_tokens_min


def _order(policy: QueuePolicy, held: Held) -> tuple[int, int, int]:
    """Where a request stands in its line, lowest first: strict priority, policy key, submission.

    The keys, highest first, are Dynamo's, here as whole numbers so that the order is the same everywhere:
    fcfs `priority - arrival` and lcfs `priority + arrival` in seconds, wspt `(1 + priority) / max(1, uncached)`.
    """
    if policy == "wspt":
        key = ((1 + held.priority) << _SCALE_BITS) // held.cost
    elif policy == "fcfs":
        key = held.priority * _US - held.arrival_us
    else:
        key = held.priority * _US + held.arrival_us
    return -held.strict_priority, -key, held.offset


def _term(pool: str, held: Held) -> int:
    return xxh3_64_intdigest(f"{pool}\0{held!r}".encode())
