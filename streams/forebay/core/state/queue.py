"""Router queue: requests that wait, because every rank that may take them has too much to prefill or no room.

A pool has one line per queue class. Lines take turns by deficit round robin (Shreedhar and Varghese; Dynamo). In each
line, tenants take turns in the same way, in the order in which they entered the line. A tenant that is alone is served
without turns. Requests of a tenant are ordered by priorities and the policy of the class.

It may happen that no rank can take the first request of a tenant, but a rank can take a later one. Requests with equal
routing requirements have the same candidates. So a tenant offers the first dispatchable request among the first
requests of each requirement. A tenant or line without an offer does not take part in the round. The order follows from
the queued requests, the turns and the deficits alone, never from earlier events.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TypeVar

from forebay.core.state_machine import digest_of, plain
from forebay.events.base import U64_MASK
from forebay.events.control import DEFAULT_CLASS, QueueClass, QueueConfig, QueuePolicy
from forebay.events.snapshots import ClassDeficit, QueueTurns, TenantDeficit

OFFERS_PER_LINE_MAX = 16  # requirements per line that are tried before the line waits; each try looks at every rank
TENANT_QUANTUM = 64  # tokens of a turn with weight 1, few enough that tenants alternate at short or cached prompts
TENANTS_PER_PART = 4_096  # in all classes of a pool together, so that a part of a snapshot stays below 1 MiB
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
        tenant: tenant of the request; empty for none.
        weight: share of the tenant, relative to the weights of other tenants.
        lora_name: adapter of the request; empty for none.
    """

    request_id: str
    offset: int
    policy_class: str
    uncached_tokens: int
    priority: int
    strict_priority: int
    arrival_us: int
    demand: tuple[object, ...]
    tenant: str = ""
    weight: int = 1
    lora_name: str = ""

    @property
    def cost(self) -> int:
        """Tokens that the request subtracts from the deficit of its class when it leaves the queue."""
        return max(1, self.uncached_tokens)


_Entry = tuple[int, int, int, QueuedRequest]
_Check = Callable[[QueuedRequest], bool]


@dataclass(slots=True)
class _Offer:
    """Request that a tenant or line offers.

    Attributes:
        quantum: tokens that one turn adds to the deficit of the tenant or line.
        cost: tokens that the tenant or line pays.
        grants: tokens that the rounds before the request add to deficits. They are added only if it is served.
    """

    queued: QueuedRequest
    quantum: int
    cost: int
    grants: "tuple[tuple[_Tenant | _Line, int], ...]" = ()


@dataclass(slots=True, eq=False)
class _Tenant:
    """Queued requests of one tenant in a class.

    `waiting` has them by requirement, `heads` the first one of each, both in order.
    """

    quantum: int
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

    def all(self) -> Iterator[QueuedRequest]:
        return (one[-1] for alike in self.waiting.values() for one in alike)

    def offer(self, is_dispatchable: _Check) -> _Offer | None:
        first = (one[-1] for one in islice(self.heads, OFFERS_PER_LINE_MAX))
        queued = next(filter(is_dispatchable, first), None)
        return None if queued is None else _Offer(queued, self.quantum * queued.weight, self.price(queued))

    def price(self, queued: QueuedRequest) -> int:
        """Return what the tenant pays. It is at least a turn of weight 1, because cached prompts take time, too."""
        return max(self.quantum, queued.cost)


@dataclass(slots=True, eq=False)
class _Line:
    """Queued requests of one class. A turn adds its quantum to `deficit`, and a request that leaves subtracts its cost.

    A line is served until its deficit is lower than the cost of its next request. A turn of a tenant adds the quantum
    times the weight of the tenant's next request. Tenants pay at least one quantum for a request.

    Attributes:
        tenants: tenants with queued requests, in the order of their turns.
        continues: whether the first tenant was served last. It continues while its deficit lasts.
    """

    kind: QueueClass
    policy: QueuePolicy
    deficit: int = 0
    size: int = 0
    tenants: OrderedDict[str, _Tenant] = field(default_factory=OrderedDict)
    continues: bool = False

    def push(self, queued: QueuedRequest) -> None:
        tenant = self.tenants.get(queued.tenant)
        (self._add_tenant(queued.tenant) if tenant is None else tenant).push(queued)
        self.size += 1

    def remove(self, queued: QueuedRequest) -> None:
        self.tenants[queued.tenant].remove(queued)
        self.size -= 1
        self._settle(queued.tenant)

    def all(self) -> Iterator[QueuedRequest]:
        return chain.from_iterable(tenant.all() for tenant in self.tenants.values())

    def in_order(self) -> list[QueuedRequest]:
        """Return the requests in the order in which the line serves them if each is dispatchable."""
        copy, order = deepcopy(self), []
        while (offer := copy.offer(lambda _: True)) is not None:
            copy.serve(offer)
            order.append(offer.queued)
        return order

    def offer(self, is_dispatchable: _Check) -> _Offer | None:
        if len(self.tenants) > 1:
            return self._offer_of_tenants(is_dispatchable)
        offer = None
        for alone in self.tenants.values():
            offer = alone.offer(is_dispatchable)
        return None if offer is None else _Offer(offer.queued, self.kind.quantum, offer.queued.cost)

    def _offer_of_tenants(self, is_dispatchable: _Check) -> _Offer | None:
        # A requirement is tried for one tenant, and again for the request that is to be served. A tenant may try only a
        # part of the requirements, so that its blocked requests do not keep those of other tenants from being tried.
        tried: dict[tuple[object, ...], QueuedRequest | None] = {}
        tries: Counter[str] = Counter()
        refused: set[str] = set()
        tries_max = max(1, OFFERS_PER_LINE_MAX // len(self.tenants))

        def is_offered(queued: QueuedRequest) -> bool:
            if queued.demand not in tried and tries[queued.tenant] < tries_max:
                tries[queued.tenant] += 1
                tried[queued.demand] = queued if is_dispatchable(queued) else None
            return tried.get(queued.demand) is not None and queued.request_id not in refused

        while (found := _next(self.tenants.values(), is_offered, continues=self.continues)) is not None:
            offer = found[1]
            queued = offer.queued
            if tried[queued.demand] is queued or is_dispatchable(queued):
                return _Offer(queued, self.kind.quantum, queued.cost, offer.grants)
            refused.add(queued.request_id)
        return None

    def serve(self, offer: _Offer) -> None:
        """Remove an offered request, for which its tenant and the line pay."""
        queued = offer.queued
        for share, tokens in offer.grants:
            share.deficit += tokens
        self.deficit -= queued.cost
        if len(self.tenants) > 1:
            tenant = self.tenants[queued.tenant]
            tenant.deficit -= tenant.price(queued)
            while (first := next(iter(self.tenants))) != queued.tenant:
                self.tenants.move_to_end(first)
            self.continues = True
        self.remove(queued)

    def snapshot(self, start: int, stop: int) -> ClassDeficit:
        """Return the deficit of the line and of a part of its tenants. Omit the usual: one tenant without a deficit."""
        tenants = tuple(
            TenantDeficit(tenant=name, deficit=tenant.deficit)
            for name, tenant in islice(self.tenants.items(), start, stop)
        )
        is_usual = len(self.tenants) < 2 and not self.continues and not any(one.deficit for one in tenants)
        return ClassDeficit(
            name=self.kind.name,
            uncached_tokens_min=self.kind.uncached_tokens_min,
            deficit=self.deficit,
            tenants=() if is_usual else tenants,
            continues=self.continues,
        )

    def restore(self, state: ClassDeficit) -> None:
        """Set deficits and the order of tenants, before the requests are pushed."""
        self.deficit, self.continues = state.deficit, state.continues
        for one in state.tenants:
            self._add_tenant(one.tenant).deficit = one.deficit

    def settle(self) -> None:
        """Forget the state of tenants that have no requests after a change of the classes."""
        for name in list(self.tenants):
            self._settle(name)
        if not self.size:
            self.deficit = 0

    def _add_tenant(self, name: str) -> _Tenant:
        tenant = self.tenants[name] = _Tenant(min(self.kind.quantum, TENANT_QUANTUM), self.policy)
        return tenant

    def _settle(self, name: str) -> None:
        if not self.tenants[name].size:
            self.continues = self.continues and name != next(iter(self.tenants))
            del self.tenants[name]
        if not self.size:
            self.deficit = 0  # an empty line does not save up credit


_Share = TypeVar("_Share", _Tenant, _Line)


@dataclass(slots=True)
class _Pool:
    """Lines of one pool. `turn` is the index of the line that was served last; it continues while its deficit lasts."""

    config: QueueConfig
    lines: list[_Line]
    turn: int


class Queues:
    """Router queues of all pools. They determine which queued request is served next.

    Attributes:
        of_adapters: ids of the queued requests of each adapter, by pool and adapter.
    """

    def __init__(self) -> None:
        self.of_adapters: dict[tuple[str, str], dict[str, None]] = {}
        self._pools: dict[str, _Pool] = {}
        self._queued: dict[str, tuple[str, QueuedRequest]] = {}
        self._sum = 0

    def __len__(self) -> int:
        return len(self._queued)

    def configure(self, pool: str, config: QueueConfig) -> None:
        """Set the queue configuration of a pool.

        Queued requests enter the new classes. If the class of a request was removed, the request enters the default
        class. Remaining classes keep their deficits. If the class that was served last is removed, the first
        class is next. Tenants keep their deficits and their order in remaining classes, and enter others in the order
        of the old classes.
        """
        old = self._pools.get(pool)
        if old is not None and old.config == config:
            return
        lines = [_Line(kind, kind.policy or config.policy) for kind in config.classes]
        new = _Pool(config, lines, len(lines) - 1)
        self._pools[pool] = new
        if old is None:
            return
        states = {_key(line.kind): line.snapshot(0, len(line.tenants)) for line in old.lines}
        served = _key(old.lines[old.turn].kind)
        for at, line in enumerate(lines):
            if _key(line.kind) in states:
                line.restore(states[_key(line.kind)])
            if _key(line.kind) == served:
                new.turn = at
        for queued in (queued for line in old.lines for queued in line.all()):
            self._line(new, queued).push(queued)
        for line in lines:
            line.settle()

    def push(self, pool: str, queued: QueuedRequest) -> None:
        """Add a request to the queue of `pool`. The pool must be configured, and the request must not be queued yet."""
        assert queued.request_id not in self._queued, "a request waits once"
        self._line(self._pools[pool], queued).push(queued)
        self._queued[queued.request_id] = (pool, queued)
        self._sum += _term(pool, queued)
        if queued.lora_name:
            self.of_adapters.setdefault((pool, queued.lora_name), {})[queued.request_id] = None

    def remove(self, request_id: str) -> bool:
        """Remove a cancelled or expired request. Return False if it was not queued."""
        if request_id not in self._queued:
            return False
        pool, queued = self._queued[request_id]
        self._line(self._pools[pool], queued).remove(queued)
        self._forget(pool, queued)
        return True

    def serve(self, pool: str, is_dispatchable: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        """Remove and return the next request that can be dispatched. Return None and change nothing if there is none.

        `is_dispatchable` depends on the request's requirements alone, and its last result for the returned request was
        True. It is called in serving order, once per requirement in a queue class and for the returned request, and for
        at most `OFFERS_PER_LINE_MAX` requirements per class or one per tenant.
        """
        state = self._pools[pool]
        lines, turn = state.lines, state.turn
        found = _next(lines[turn:] + lines[:turn], is_dispatchable, continues=True)
        if found is None:
            return None
        line, offer = found
        state.turn = lines.index(line)
        line.serve(offer)
        self._forget(pool, offer.queued)
        return offer.queued

    def waiting(self, pool: str) -> int:
        return sum(line.size for line in self._pools[pool].lines)

    def in_order(self, pool: str) -> list[tuple[QueueClass, list[QueuedRequest]]]:
        """Return the queue classes of a pool in configured order, each with its requests in serving order."""
        return [(line.kind, line.in_order()) for line in self._pools[pool].lines]

    def length(self, pool: str, kind: QueueClass) -> int:
        return next(line.size for line in self._lines(pool, kind))

    def count_of(self, pool: str, tenant: str, kind: QueueClass | None = None) -> int:
        """Return how many requests of a tenant are queued in a class, or in the pool if `kind` is None."""
        counted = (line.tenants.get(tenant) for line in self._lines(pool, kind))
        return sum(one.size for one in counted if one is not None)

    def has_share(self, pool: str, tenant: str, requests: int, kind: QueueClass | None = None) -> bool:
        """Return whether a tenant has queued less than its equal part of a number of requests.

        All tenants with requests in the queue class, or in the pool if `kind` is None, have equal parts.
        """
        tenants = len({tenant}.union(*(line.tenants for line in self._lines(pool, kind))))
        return self.count_of(pool, tenant, kind) * tenants < requests

    def digest(self) -> int:
        """Return a 64-bit digest over queued requests, turns and deficits, in time linear in classes and tenants."""
        return (self._sum + digest_of(*map(plain, self.snapshot()))) & U64_MASK

    def snapshot(self) -> Iterator[QueueTurns]:
        """Yield turns and deficits of the pools, by name. Queued requests are in the snapshot of `ActiveRequests`."""
        for pool, state in sorted(self._pools.items()):
            size = TENANTS_PER_PART // len(state.lines)
            for start in range(0, max(1, *(len(line.tenants) for line in state.lines)), size):
                classes = tuple(line.snapshot(start, start + size) for line in state.lines)
                yield QueueTurns(pool=pool, turn=state.turn, classes=classes)

    def restore(self, chunk: QueueTurns) -> None:
        """Apply one part of a snapshot. Its pool must have been configured before, and no request may be queued yet."""
        state = self._pools[chunk.pool]
        kinds = [(one.name, one.uncached_tokens_min) for one in chunk.classes]
        assert kinds == [_key(line.kind) for line in state.lines], "turns are those of the pool's classes"
        state.turn = chunk.turn
        for line, one in zip(state.lines, chunk.classes, strict=True):
            line.restore(one)

    def _lines(self, pool: str, kind: QueueClass | None = None) -> list[_Line]:
        """Return the lines of a pool, or only that of a class."""
        return [line for line in self._pools[pool].lines if kind is None or _key(line.kind) == _key(kind)]

    @staticmethod
    def _line(state: _Pool, queued: QueuedRequest) -> _Line:
        kind = class_of(state.config, queued.policy_class, queued.uncached_tokens)
        return next(line for line in state.lines if line.kind is kind)

    def _forget(self, pool: str, queued: QueuedRequest) -> None:
        del self._queued[queued.request_id]
        self._sum -= _term(pool, queued)
        if queued.lora_name:
            ids = self.of_adapters[pool, queued.lora_name]
            del ids[queued.request_id]
            if not ids:
                del self.of_adapters[pool, queued.lora_name]


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


def _next(shares: Iterable[_Share], is_dispatchable: _Check, *, continues: bool) -> tuple[_Share, _Offer] | None:
    """Return the line or tenant to serve next, of those in the order of their turns, and its offer.

    If `continues`, the first of them was served last. It is served again while its deficit lasts, and is the last to
    take a turn otherwise. If no deficit covers an offered request, all with an offer take as many turns as one of them
    needs.
    """
    order = iter(shares)
    last: tuple[tuple[_Share, _Offer | None], ...] = ()
    if continues:
        first = next(order)
        going_on = first.offer(is_dispatchable)
        if going_on is not None and going_on.cost <= first.deficit:
            return first, going_on
        last = ((first, going_on),)
    passed: list[tuple[_Share, _Offer]] = []  # each needs more than one turn
    for share, offer in chain(((one, one.offer(is_dispatchable)) for one in order), last):
        if offer is None:
            continue
        missing = offer.cost - share.deficit
        if missing <= offer.quantum:
            offer.grants += tuple((other, late.quantum) for other, late in passed)
            # Add the quantum only if the deficit is too low. Otherwise a line that often has no offer would save up
            # credit without bound.
            if missing > 0:
                offer.grants += ((share, offer.quantum),)
            return share, offer
        passed.append((share, offer))
    if not passed:
        return None
    # A request may cost many quanta. Grant all turns at once.
    turns = [-((one.deficit - late.cost) // late.quantum) for one, late in passed]
    fewest = min(turns)
    at = turns.index(fewest)
    share, served = passed[at]
    served.grants += tuple((one, (fewest - (n > at)) * late.quantum) for n, (one, late) in enumerate(passed))
    return share, served


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
