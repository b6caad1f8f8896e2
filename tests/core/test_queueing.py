"""The router's queue against a plain model of deficit round robin, and the load of ranks against a count of blocks."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.msgpack import decode, encode

from forebay.core.block_hashes import extend_chain
from forebay.core.state import queue as queue_module
from forebay.core.state.holder_bits import HolderKey
from forebay.core.state.load import FleetLoad
from forebay.core.state.queue import OFFERS_PER_LINE_MAX, TENANT_QUANTUM, QueuedRequest, Queues, class_of
from forebay.core.state.rank_load import BLOCK_UNITS
from forebay.events.control import QueueClass, QueueConfig, QueuePolicy
from forebay.events.metrics import LoadReported
from forebay.events.snapshots import QueueTurns
from tests.core.worlds import depths_by_rank

POLICIES: list[QueuePolicy] = ["fcfs", "wspt", "lcfs"]
DEFAULT = QueueClass(quantum=10)
BATCH = QueueClass(name="batch", quantum=30)
LONG = QueueClass(name="batch", quantum=5, uncached_tokens_min=100, policy="wspt")
CLASSES = QueueConfig(threshold=1.0, classes=(DEFAULT, BATCH, LONG))


def held(offset: int, **changes: Any) -> QueuedRequest:
    order: dict[str, Any] = {"priority": 0, "strict_priority": 0, "arrival_us": offset, "demand": (offset,)}
    fields = {"request_id": f"r{offset}", "policy_class": "", "uncached_tokens": 10, **order, **changes}
    return QueuedRequest(offset=offset, **fields)


def anyone(_: QueuedRequest) -> bool:
    return True


def queue(*waiting: QueuedRequest, config: QueueConfig = CLASSES) -> Queues:
    queues = Queues()
    queues.configure("p", config)
    for one in waiting:
        queues.push("p", one)
    return queues


def drained(queues: Queues, is_dispatchable: Callable[[QueuedRequest], bool] = anyone) -> list[int]:
    served = []
    while (one := queues.serve("p", is_dispatchable)) is not None:
        served.append(one.offset)
    return served


def deficits(queues: Queues) -> list[int]:
    (chunk,) = queues.snapshot()
    return [one.deficit for one in chunk.classes]


def test_queued_requests_are_listed_by_class_in_policy_order() -> None:
    queues = queue(
        held(1),
        held(2, priority=1),
        held(3, policy_class="batch", uncached_tokens=300),
        held(4, policy_class="batch", uncached_tokens=200),
        held(5, policy_class="batch"),
        held(6, policy_class="batch"),
    )
    order = [(kind, [one.offset for one in waiting]) for kind, waiting in queues.in_order("p")]
    assert order == [(DEFAULT, [2, 1]), (BATCH, [5, 6]), (LONG, [4, 3])]


def naive_key(policy: QueuePolicy, one: QueuedRequest) -> Fraction:
    priority = Fraction(one.priority)
    if policy == "wspt":
        return (1 + priority) / max(1, one.uncached_tokens)
    arrival = Fraction(one.arrival_us, 1_000_000)
    return priority - arrival if policy == "fcfs" else priority + arrival


def naive_order(policy: QueuePolicy, waiting: list[QueuedRequest]) -> list[QueuedRequest]:
    return sorted(waiting, key=lambda one: (-one.strict_priority, -naive_key(policy, one), one.offset))


waiting_ones = st.lists(
    st.builds(
        held,
        st.integers(0, 1_000),
        uncached_tokens=st.integers(0, 30) | st.integers((1 << 62) - 3, (1 << 63) - 1),
        priority=st.integers(-3, 3) | st.integers(-(1 << 31), (1 << 31) - 1),
        strict_priority=st.integers(0, 2),
        arrival_us=st.integers(0, 3) | st.integers(0, 5_000_000),
        policy_class=st.sampled_from(["", "batch", "unknown"]),
    ),
    unique_by=lambda one: one.offset,
    max_size=25,
)


@given(st.sampled_from(POLICIES), waiting_ones)
def test_one_class_is_served_in_sort_order(policy: QueuePolicy, waiting: list[QueuedRequest]) -> None:
    expected = [one.offset for one in naive_order(policy, waiting)]
    assert drained(queue(*waiting, config=QueueConfig(policy=policy))) == expected


@pytest.mark.parametrize(
    ("name", "tokens", "kind"),
    [
        ("batch", 99, BATCH),
        ("batch", 100, LONG),
        ("", 10**9, DEFAULT),
        ("unknown", 0, DEFAULT),
        ("default", 0, DEFAULT),
    ],
)
def test_a_request_enters_the_highest_class_that_it_reaches(name: str, tokens: int, kind: QueueClass) -> None:
    assert class_of(CLASSES, name, tokens) is kind
    queues = queue(held(1, policy_class=name, uncached_tokens=tokens))
    assert [queues.length("p", one) for one in CLASSES.classes] == [int(one is kind) for one in CLASSES.classes]


@given(st.lists(st.tuples(st.sampled_from(["", "batch"]), st.integers(0, 60)), min_size=1, max_size=60))
def test_backlogged_classes_get_their_shares(requests: list[tuple[str, int]]) -> None:
    """Served tokens by quantum differ by less than two turns and the dearest request."""
    config = QueueConfig(classes=(DEFAULT, BATCH))
    waiting = [held(at, policy_class=name, uncached_tokens=tokens) for at, (name, tokens) in enumerate(requests)]
    queues = queue(*waiting, config=config)
    dearest = max(one.cost for one in waiting)
    served = {"": 0, "batch": 0}
    while queues.length("p", DEFAULT) and queues.length("p", BATCH):
        one = queues.serve("p", anyone)
        assert one is not None
        served[one.policy_class] += one.cost
        shares = Fraction(served[""], DEFAULT.quantum), Fraction(served["batch"], BATCH.quantum)
        assert abs(shares[0] - shares[1]) < 2 + Fraction(dearest, DEFAULT.quantum)


def test_nearly_equal_shares_are_told_apart() -> None:
    many = (1 << 63) - 1
    waiting = [held(1, uncached_tokens=many), held(2, uncached_tokens=many - 1)]
    assert drained(queue(*waiting, config=QueueConfig(policy="wspt"))) == [2, 1]


def test_skipping_blocked_requests_is_bounded() -> None:
    waiting = [held(at) for at in range(OFFERS_PER_LINE_MAX + 1)]
    offered: list[int] = []

    def last_only(one: QueuedRequest) -> bool:
        offered.append(one.offset)
        return one.offset == OFFERS_PER_LINE_MAX

    queues = queue(*waiting)
    assert queues.serve("p", last_only) is None
    assert offered == list(range(OFFERS_PER_LINE_MAX))
    assert queues.remove("r0")
    assert queues.serve("p", last_only) == held(OFFERS_PER_LINE_MAX)


def test_those_with_the_same_demands_are_tried_once() -> None:
    stuck = [held(at, demand=("stuck",), strict_priority=at % 3) for at in range(3 * OFFERS_PER_LINE_MAX)]
    queues = queue(*stuck, held(100))
    offered: list[int] = []

    def not_stuck(one: QueuedRequest) -> bool:
        offered.append(one.offset)
        return one.demand != ("stuck",)

    assert queues.serve("p", not_stuck) == held(100)
    assert offered == [2, 100], "the first of those that are stuck, for all of them"
    for gone in (2, 5):
        assert queues.remove(f"r{gone}")
        assert queues.serve("p", lambda one: False) is None
    assert drained(queues) == [one.offset for one in naive_order("fcfs", stuck) if one.offset not in (2, 5)]


def test_all_requests_survive_a_class_change() -> None:
    queues = queue(held(1), *(held(at, policy_class="batch", uncached_tokens=100) for at in (2, 3)))
    fewer = QueueConfig(policy="lcfs", classes=(DEFAULT,))
    queues.configure("p", fewer)
    assert queues.length("p", DEFAULT) == 3
    assert queues.serve("p", anyone) == held(3, policy_class="batch", uncached_tokens=100)
    queues.configure("p", CLASSES)
    assert (queues.length("p", DEFAULT), queues.length("p", LONG)) == (1, 1)
    assert sorted(drained(queues)) == [1, 2]


def test_a_change_of_other_things_changes_no_turn() -> None:
    queues = queue(*(held(at, policy_class="batch") for at in range(4)), held(9))
    assert queues.serve("p", anyone) == held(9)
    assert queues.serve("p", anyone) == held(0, policy_class="batch")
    before = queues.digest()
    queues.configure("p", QueueConfig(threshold=1.0, classes=(DEFAULT, BATCH, LONG)))
    assert queues.digest() == before
    queues.configure("p", QueueConfig(threshold=2.0, classes=(DEFAULT, BATCH, LONG)))
    queues.push("p", held(10))
    assert drained(queues) == [1, 2, 10, 3], "the class whose turn it was goes on with what it had left"


def test_a_class_that_all_leave_for_another_saves_nothing_up() -> None:
    one = held(1, policy_class="batch", uncached_tokens=100)
    queues = queue(held(0, policy_class="batch"), one, config=QueueConfig(classes=(DEFAULT, BATCH)))
    assert queues.serve("p", anyone) == held(0, policy_class="batch")
    assert deficits(queues) == [0, 20]
    queues.configure("p", CLASSES)
    assert deficits(queues) == [0, 0, 0]
    assert drained(queues) == [1]


CONFIGS = [
    CLASSES,
    QueueConfig(policy="lcfs", classes=(LONG, BATCH, DEFAULT)),
    QueueConfig(policy="wspt"),
    QueueConfig(classes=(QueueClass(quantum=1), QueueClass(name="batch", quantum=3))),
]


@dataclass
class Ring:
    """Deficits of the tenants of a class, in the order of their turns."""

    deficits: dict[str, int] = field(default_factory=dict)
    continues: bool = False

    def turned(self) -> "Ring":
        (first, deficit), *others = self.deficits.items()
        return Ring({**dict(others), first: deficit})


class Model:
    """Rounds one by one, of classes and of tenants, and sorted anew each time."""

    def __init__(self, config: QueueConfig) -> None:
        self.config = config
        self.waiting: list[QueuedRequest] = []
        self.deficits: dict[QueueClass, int] = dict.fromkeys(config.classes, 0)
        self.rings = {kind: Ring() for kind in config.classes}
        self.turn = config.classes[-1]

    def push(self, one: QueuedRequest) -> None:
        self.waiting.append(one)
        kind = class_of(self.config, one.policy_class, one.uncached_tokens)
        self.rings[kind].deficits.setdefault(one.tenant, 0)

    def line(self, kind: QueueClass) -> list[QueuedRequest]:
        mine = [one for one in self.waiting if class_of(self.config, one.policy_class, one.uncached_tokens) is kind]
        return naive_order(kind.policy or self.config.policy, mine)

    def remove(self, one: QueuedRequest) -> None:
        self.waiting.remove(one)
        for kind, ring in self.rings.items():
            if not self.line(kind):
                self.deficits[kind] = 0
            for gone in set(ring.deficits) - {left.tenant for left in self.line(kind)}:
                ring.continues = ring.continues and gone != next(iter(ring.deficits))
                del ring.deficits[gone]

    def offer(self, kind: QueueClass, is_dispatchable: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        """Return what the class serves next, and leave the state of its tenants after that in `after`."""
        first: dict[str, QueuedRequest] = {}
        for one in filter(is_dispatchable, self.line(kind)):
            first.setdefault(one.tenant, one)
        least = min(kind.quantum, TENANT_QUANTUM)
        ring = self.after[kind] = Ring(dict(self.rings[kind].deficits), self.rings[kind].continues)
        if not first or len(ring.deficits) == 1:
            return next(iter(first.values()), None)
        continues = ring.continues
        while True:
            tenant = next(iter(ring.deficits))
            one_offered = first.get(tenant)
            if one_offered is not None:
                price = max(least, one_offered.cost)
                if not continues and price > ring.deficits[tenant]:
                    ring.deficits[tenant] += least * one_offered.weight
                if price <= ring.deficits[tenant]:
                    ring.deficits[tenant] -= price
                    ring.continues = True
                    self.after[kind] = ring
                    return one_offered
            continues = False
            ring = ring.turned()

    def serve(self, is_dispatchable: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        self.after: dict[QueueClass, Ring] = {}
        offers = {kind: self.offer(kind, is_dispatchable) for kind in self.config.classes}
        if not any(offers.values()):
            return None
        going_on = offers[self.turn]
        if going_on is not None and going_on.cost <= self.deficits[self.turn]:
            return self._serve(self.turn, going_on)
        kinds = list(self.config.classes)
        first = kinds.index(self.turn) + 1
        while True:
            for kind in kinds[first:] + kinds[:first]:
                one = offers[kind]
                if one is None:
                    continue
                if one.cost > self.deficits[kind]:
                    self.deficits[kind] += kind.quantum
                if one.cost <= self.deficits[kind]:
                    return self._serve(kind, one)

    def _serve(self, kind: QueueClass, one: QueuedRequest) -> QueuedRequest:
        self.turn = kind
        self.deficits[kind] -= one.cost
        self.rings[kind] = self.after[kind]
        self.remove(one)
        return one


operations = st.tuples(
    st.sampled_from(["push", "push", "push", "serve", "serve", "remove", "restore"]),
    st.integers(0, 150),
    st.sampled_from(["", "batch", "unknown"]),
    st.integers(0, 2),
    st.sampled_from(["", "a", "b"]),
)
RENAMED = {"": "", "a": "z", "b": "y"}  # sorted in another order


@given(st.sampled_from(CONFIGS), st.lists(operations, max_size=60), st.integers(1, 5))
def test_the_queue_equals_a_reference_model(
    config: QueueConfig, history: list[tuple[str, int, str, int, str]], blocked: int
) -> None:
    queues, model, renamed = queue(config=config), Model(config), queue(config=config)
    pushed: list[int] = []
    gone: list[int] = []

    def is_dispatchable(one: QueuedRequest) -> bool:
        return one.demand in [(number,) for number in range(blocked)]

    for at, (kind, number, name, strict, tenant) in enumerate(history):
        if kind == "push":
            one = held(
                at,
                policy_class=name,
                uncached_tokens=number,
                strict_priority=strict,
                priority=number % 7 - 3,
                demand=(number % 5,),
                tenant=tenant,
                weight=1 + number % 3,
            )
            queues.push("p", one)
            renamed.push("p", replace(one, tenant=RENAMED[tenant]))
            model.push(one)
            pushed.append(at)
        elif kind == "serve":
            served = queues.serve("p", is_dispatchable)
            assert served == model.serve(is_dispatchable)
            other = renamed.serve("p", is_dispatchable)
            assert (served and served.offset) == (other and other.offset), "names of tenants do not count"
            gone += [served.offset] if served else []
        elif kind == "restore":
            queues = restored(queues, config, model.waiting)
        elif model.waiting:
            one = model.waiting[number % len(model.waiting)]
            assert queues.remove(one.request_id)
            assert renamed.remove(one.request_id)
            model.remove(one)
            gone.append(one.offset)
        assert deficits(queues) == list(model.deficits.values())
        assert tenants(queues) == [list(ring.deficits.items()) for ring in model.rings.values()]
        assert queues.waiting("p") == len(model.waiting)
    copy = restored(queues, config, model.waiting)
    assert copy.digest() == queues.digest()
    expected = [[one.offset for one in waiting] for _, waiting in queues.in_order("p")]
    rest = drained(queues)
    assert [[at for at in rest if at in line] for line in expected] == expected
    assert drained(copy) == rest
    assert sorted(gone + rest) == pushed


def restored(queues: Queues, config: QueueConfig, waiting: list[QueuedRequest]) -> Queues:
    copy = queue(config=config)
    for chunk in queues.snapshot():
        copy.restore(decode(encode(chunk), type=QueueTurns))
    for one in waiting:
        copy.push("p", one)
    return copy


def tenants(queues: Queues) -> list[list[tuple[str, int]]]:
    """Return the tenants of each class with their deficits, in the order of their turns."""
    (chunk,) = queues.snapshot()
    waiting = [[one.tenant for one in line] for _, line in queues.in_order("p")]
    shown = [[(one.tenant, one.deficit) for one in kind.tenants] for kind in chunk.classes]
    usual = [[(name, 0) for name in dict.fromkeys(line)] for line in waiting]
    assert all(few or len(only) < 2 for few, only in zip(shown, usual, strict=True))
    return [few or only for few, only in zip(shown, usual, strict=True)]


@given(st.lists(operations, max_size=40), st.lists(st.sampled_from(CONFIGS), min_size=1, max_size=3))
def test_a_change_of_classes_follows_from_the_state_alone(
    history: list[tuple[str, int, str, int, str]], configs: list[QueueConfig]
) -> None:
    queues = queue()
    waiting: dict[int, QueuedRequest] = {}
    for at, (kind, number, name, _, tenant) in enumerate(history):
        if kind == "push":
            waiting[at] = held(at, policy_class=name, uncached_tokens=number, tenant=tenant)
            queues.push("p", waiting[at])
        elif (served := queues.serve("p", anyone)) is not None:
            del waiting[served.offset]
    copy = restored(queues, CLASSES, list(waiting.values()))
    for config in configs:
        queues.configure("p", config)
        copy.configure("p", config)
        assert copy.digest() == queues.digest()
    order = drained(queues)
    assert drained(copy) == order
    assert sorted(order) == sorted(waiting)
    assert deficits(queues) == [0] * len(configs[-1].classes)


costs = st.integers(0, 60)
WEIGHTS = {"a": 1, "b": 3, "c": 2}


def price(one: QueuedRequest) -> int:
    return max(DEFAULT.quantum, one.uncached_tokens)


@given(st.lists(st.tuples(st.sampled_from("abc"), costs), min_size=1, max_size=80))
def test_backlogged_tenants_get_their_shares(requests: list[tuple[str, int]]) -> None:
    """What tenants paid, by weight, differs by less than two turns and the dearest request."""
    waiting = [
        held(at, uncached_tokens=tokens, tenant=name, weight=WEIGHTS[name])
        for at, (name, tokens) in enumerate(requests)
    ]
    queues = queue(*waiting)
    dearest, served = max(map(price, waiting)), dict.fromkeys(WEIGHTS, 0)
    while all(queues.count_of("p", name) for name in served):
        one = queues.serve("p", anyone)
        assert one is not None
        served[one.tenant] += price(one)
        shares = [Fraction(tokens, DEFAULT.quantum * WEIGHTS[name]) for name, tokens in served.items()]
        assert max(shares) - min(shares) < 2 + Fraction(dearest, DEFAULT.quantum)


def test_tenants_alternate_within_a_long_turn_of_their_class() -> None:
    queues = queue(config=QueueConfig(classes=(QueueClass(quantum=1 << 20),)))
    for at in range(400):
        queues.push("p", held(at, uncached_tokens=10, tenant="ab"[at % 2], weight=(3, 1)[at % 2]))
    served = [queues.serve("p", anyone) for _ in range(100)]
    assert 70 <= sum(one is not None and one.tenant == "a" for one in served) <= 80


@given(
    st.lists(st.tuples(costs, costs, st.integers(0, 2)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_a_flood_delays_another_tenant_by_its_share_only(
    rounds: list[tuple[int, int, int]], flooding: int, weight: int
) -> None:
    """A tenant with one request at a time waits for its turns, and does not take those of the tenant that floods."""
    queues, turns, flood, total = queue(), 0, 0, 0
    dearest = max(DEFAULT.quantum, *chain.from_iterable(rounds))
    for number, (_, cost, alone) in enumerate(rounds):
        while queues.count_of("p", "flood") < 30:
            tokens = rounds[flood % len(rounds)][0]
            queues.push("p", held(1_000 + flood, uncached_tokens=tokens, tenant="flood", weight=flooding))
            flood += 1
        for _ in range(alone):
            served = queues.serve("p", anyone)
            assert served is not None
            total += price(served)
        queues.push("p", held(number, uncached_tokens=cost, tenant="slow", weight=weight))
        needed, ahead = -(-max(DEFAULT.quantum, cost) // (DEFAULT.quantum * weight)), 0
        while (one := queues.serve("p", anyone)) is not None and one.tenant == "flood":
            ahead += price(one)
        assert one is not None
        assert ahead < needed * DEFAULT.quantum * flooding + dearest
        turns, total = turns + needed, total + ahead
        assert total > (turns - 1) * DEFAULT.quantum * flooding - dearest


def test_blocked_requests_of_a_tenant_do_not_hide_those_of_another() -> None:
    stuck = [held(at, tenant="a", demand=("stuck", at)) for at in range(OFFERS_PER_LINE_MAX)]
    queues = queue(*stuck, held(100, tenant="b"), held(101, tenant="b"))
    assert drained(queues, lambda one: one.tenant == "b") == [100, 101]


def test_a_requirement_is_tried_once_for_all_tenants() -> None:
    dear = [held(at, tenant=f"t{at}", uncached_tokens=100 - 10 * at, demand=("same",)) for at in range(8)]
    tried: list[int] = []

    def is_even(one: QueuedRequest) -> bool:
        tried.append(one.offset)
        return one.offset % 2 == 0

    queues = queue(*dear)
    assert queues.serve("p", is_even) == dear[6], "the tenant of 7 needs the fewest turns, but 7 is refused"
    assert tried == [0, 7, 6]

    def is_stuck(one: QueuedRequest) -> bool:
        tried.append(one.offset)
        return False

    assert queues.serve("p", is_stuck) is None
    assert tried == [0, 7, 6, 7], "the first one was tried, and all have the same candidates"


def test_many_tenants_take_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "TENANTS_PER_PART", 2 * len(CLASSES.classes))
    waiting = [held(at, tenant=f"t{at % 5}", policy_class="batch" if at % 2 else "") for at in range(30)]
    queues = queue(*waiting)
    served = queues.serve("p", anyone)
    assert served == waiting[0]
    assert len(list(queues.snapshot())) == 3
    copy = restored(queues, CLASSES, waiting[1:])
    assert copy.digest() == queues.digest()
    assert drained(copy) == drained(queues)


@pytest.mark.parametrize("tenant", ["", "a"])
def test_a_tenant_alone_has_the_state_of_a_queue_without_tenants(tenant: str) -> None:
    queues, plain_queues = queue(), queue()
    for at in range(20):
        one = held(at, uncached_tokens=at, policy_class="batch" if at % 3 else "")
        plain_queues.push("p", one)
        queues.push("p", replace(one, tenant=tenant, weight=7))
    while (served := plain_queues.serve("p", anyone)) is not None:
        other = queues.serve("p", anyone)
        assert other is not None
        assert other.offset == served.offset
        assert list(map(encode, queues.snapshot())) == list(map(encode, plain_queues.snapshot()))
        assert queues.digest() == plain_queues.digest()
        (chunk,) = queues.snapshot()
        assert b"tenants" not in encode(chunk)
        assert b"continues" not in encode(chunk)


def test_turns_of_other_classes_do_not_fit_in() -> None:
    (chunk,) = queue().snapshot()
    with pytest.raises(AssertionError):
        queue(config=CONFIGS[1]).restore(chunk)


# What ranks have to do, against a model that counts every block


BLOCK = 4
RANKS: list[HolderKey] = [("v", 0), ("w", 0), ("w", 1)]


def loaded(*ranks: HolderKey) -> FleetLoad:
    load = FleetLoad()
    for worker_id, rank in ranks or RANKS:
        load.add_rank(worker_id, rank, BLOCK)
    return load


def now(load: FleetLoad, key: HolderKey = ("w", 0)) -> tuple[int, float, int]:
    rank = load.rank_load(*key)
    return rank.prefill_tokens, rank.decode_blocks, rank.active_requests


def test_a_rank_with_requests_cannot_be_dropped() -> None:
    load = loaded()
    load.book("r", ("w", 0), prefill_tokens=0, blocks=[])
    with pytest.raises(AssertionError):
        load.drop_rank("w", 0)
    load.drop_rank("w", 1)
    assert [(rank.worker_id, rank.rank) for rank in load.ranks()] == RANKS[:2]


def test_a_new_rank_starts_at_the_lowest_computed_total() -> None:
    load = FleetLoad()
    load.add_rank("v", 0, 4)
    load.add_rank("w", 0, 4)
    empty = load.digest()
    for number, (worker, tokens) in enumerate([("v", 7), ("w", 5), ("w", 4)]):
        load.book(str(number), (worker, 0), prefill_tokens=tokens, blocks=[])
        load.free(str(number))
    assert load.digest() != empty
    assert load.add_rank("x", 0, 4).computed_tokens == 7
    assert [rank.computed_tokens for rank in load.ranks()] == [7, 9, 7]
    copy = FleetLoad()
    for rank in load.ranks():
        copy.add_rank(rank.worker_id, rank.rank, 4)
    for chunk in load.snapshot():
        copy.restore(chunk)
    assert copy.digest() == load.digest()
    assert [rank.computed_tokens for rank in copy.ranks()] == [7, 9, 7]
    for rank in load.ranks():
        load.drop_rank(rank.worker_id, rank.rank)
    assert load.digest() == FleetLoad().digest()


def test_the_newest_report_counts() -> None:
    load = loaded()
    empty = load.digest()
    report = LoadReported(worker_id="w", worker_epoch=1, running=1, waiting=2, kv_blocks_used=3, kv_blocks_total=4)
    load.report(report)
    once = load.digest()
    load.report(report)
    assert load.digest() == once != empty
    reported = load.rank_load("w", 0).reported
    assert reported is not None
    assert reported.waiting == 2
    assert load.rank_load("v", 0).reported is None
    copy = restored_load(load)
    assert copy.digest() == once
    assert copy.rank_load("w", 0).reported == reported
    load.drop_rank("w", 0)
    assert load.digest() == empty


PROMPTS = [
    extend_chain(None, [1, 2, 3, 4, 5, 6, 7, 8]),
    extend_chain(None, [1, 2, 3, 40, 50, 60]),
    extend_chain(None, [1, 2, 3, 40, 51]),
    extend_chain(None, [9, 10, 11]),
]


@dataclass
class BookedRequest:
    """One request, as simply as possible."""

    key: HolderKey
    tokens: int
    blocks: list[int]
    reuse: bool
    expected: int
    output: int = 0
    alone: list[int] = field(default_factory=list)


def blocks_of(key: HolderKey, requests: list[BookedRequest]) -> Fraction:
    total = Fraction(0)
    held: dict[int, list[BookedRequest]] = {}
    for one in requests:
        if one.key != key:
            continue
        own = -(-one.output // BLOCK)
        if one.reuse:
            for block in one.blocks:
                held.setdefault(block, []).append(one)
        else:
            own += len(one.blocks)
        total += own * weight(one)
    return total + sum(weight(who[0]) if len(who) == 1 else 1 for who in held.values())


def weight(one: BookedRequest) -> Fraction:
    if not one.expected or not one.output:
        return Fraction(1)
    share = max(Fraction(0), 1 - Fraction(one.output, one.expected))
    return Fraction(int(share * BLOCK_UNITS), BLOCK_UNITS)


def depth_of(key: HolderKey, query: list[int], requests: list[BookedRequest]) -> int:
    held = {block for one in requests if one.key == key and one.reuse for block in one.blocks}
    depth = 0
    while depth < len(query) and query[depth] in held:
        depth += 1
    return depth


def restored_load(load: FleetLoad) -> FleetLoad:
    copy = loaded(*((rank.worker_id, rank.rank) for rank in load.ranks()))
    for chunk in load.snapshot():
        copy.restore(chunk)
    return copy


prompts = st.tuples(st.sampled_from(PROMPTS), st.integers(0, 8)).map(lambda drawn: drawn[0][: drawn[1]])
bookings = st.tuples(
    st.sampled_from(["book", "book", "book", "first", "grow", "grow", "free"]),
    st.integers(0, 99),
    prompts,
    st.booleans() | st.just(True),
    st.sampled_from([0, 1, 7, 40]),
)


SHARED = [("book", number, PROMPTS[0], True, 0) for number in range(2)]  # two ranks with the same prompt


@given(st.lists(bookings, max_size=60), prompts)
@example([*SHARED, ("free", 0, [], True, 0)], [])
def test_load_equals_a_count_of_every_block(
    history: list[tuple[str, int, list[int], bool, int]], query: list[int]
) -> None:
    load = loaded()
    plain: dict[str, BookedRequest] = {}
    booked_tokens: Counter[HolderKey] = Counter()
    for at, (kind, number, blocks, reuse, expected) in enumerate(history):
        name = list(plain)[number % len(plain)] if plain else ""
        if kind == "book":
            key = RANKS[number % 3]
            plain[f"r{at}"] = BookedRequest(key, number, blocks, reuse, expected)
            booked_tokens[key] += number
            load.book(f"r{at}", key, prefill_tokens=number, blocks=blocks, reuse=reuse, expected_output_tokens=expected)
        elif name and kind == "first":
            plain[name].tokens = 0
            load.prefill_done(name)
        elif name and kind == "grow":
            plain[name].output = max(plain[name].output, number)
            load.grow(name, number)
        elif name:
            del plain[name]
            load.free(name)
    requests = list(plain.values())
    for key in RANKS:
        mine = [one for one in requests if one.key == key]
        assert now(load, key) == (sum(one.tokens for one in mine), float(blocks_of(key, requests)), len(mine))
        assert load.rank_load(*key).computed_tokens == booked_tokens[key]
    for asked in (query, *PROMPTS):
        depths = {key: depth_of(key, asked, requests) for key in RANKS}
        assert depths_by_rank(load, asked) == {key: depth for key, depth in depths.items() if depth}
    copy = restored_load(load)
    assert copy.digest() == load.digest()
    assert [now(copy, key) for key in RANKS] == [now(load, key) for key in RANKS]
    assert depths_by_rank(copy, query) == depths_by_rank(load, query)
    assert list(copy.snapshot()) == list(load.snapshot())
    for name in plain:
        load.free(name)
        copy.free(name)
    assert load.digest() == copy.digest() == restored_load(load).digest()
    assert all(now(one, key) == (0, 0.0, 0) for one in (load, copy) for key in RANKS)


def test_a_prefix_that_others_left_at_many_places_is_one_stretch_again() -> None:
    load = loaded()
    prompt = extend_chain(None, list(range(64)))
    load.book("hot", ("w", 0), prefill_tokens=0, blocks=prompt)
    for at in range(1, 64):
        load.book(f"r{at}", ("v", 0), prefill_tokens=0, blocks=[*prompt[:at], at])
    # Nodes bound the memory of the tree and the work of a query.
    assert load.count_nodes() == 2 * 63 + 1
    for at in range(1, 64):
        load.free(f"r{at}")
    assert load.count_nodes() == 1
    load.free("hot")
    assert load.count_nodes() == 0


def test_a_prefix_with_a_request_of_its_own_stays_a_stretch_of_its_own() -> None:
    load = loaded()
    prompt = extend_chain(None, list(range(8)))
    for name, blocks in (("short", prompt[:4]), ("long", prompt), ("other", [*prompt[:4], 4])):
        load.book(name, ("w", 0), prefill_tokens=0, blocks=blocks)
    load.free("other")
    assert load.count_nodes() == 2
    load.free("short")
    assert load.count_nodes() == 1


def test_a_class_that_can_pay_earns_nothing_more() -> None:
    blocked = [held(at, policy_class="batch") for at in (1, 2)]
    queues = queue(held(0), *blocked)
    assert drained(queues, lambda one: one.offset < 2) == [0, 1]
    queues.push("p", held(3))
    assert queues.serve("p", lambda one: one.offset == 3) == held(3)
    assert deficits(queues) == [0, 20, 0]
    assert queues.serve("p", anyone) == blocked[1]
