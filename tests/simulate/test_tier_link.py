"""The shared bandwidth of a tier, and the shared store, against slow implementations."""

from collections.abc import Callable
from fractions import Fraction
from heapq import heappop, heappush

from hypothesis import given
from hypothesis import strategies as st

from forebay.simulate.tiers.link import SharedLink
from forebay.simulate.tiers.rank_tiers import SharedStore
from tests.depth import examples


class Clock:
    """Scheduler that runs actions in order of time."""

    def __init__(self) -> None:
        self.now_us = 0
        self._queue: list[tuple[int, int, Callable[[], object]]] = []
        self._put = 0

    def at(self, at_us: int, action: Callable[[], object]) -> None:
        self._put += 1
        heappush(self._queue, (at_us, self._put, action))

    def later(self, at_us: int, action: Callable[[], object]) -> None:
        self.at(at_us, action)

    def run(self) -> None:
        while self._queue:
            self.now_us, _, action = heappop(self._queue)
            action()


def shares(rate: int, transfers: list[tuple[int, int]]) -> list[Fraction]:
    """Return the end of each transfer (begin, size) if all that are in flight get equal shares of the bandwidth."""
    left = {number: Fraction(size) for number, (_, size) in enumerate(transfers) if size}
    ends = [Fraction(begin) for begin, _ in transfers]
    now = Fraction(0)
    while left:
        active = [number for number in left if transfers[number][0] <= now]
        coming = [Fraction(begin) for number, (begin, _) in enumerate(transfers) if number in left and begin > now]
        if not active:
            now = min(coming)
            continue
        each = Fraction(rate, len(active))
        step = min([min(left[number] for number in active) / each, *(begin - now for begin in coming)])
        now += step
        for number in active:
            left[number] -= each * step
            if not left[number]:
                ends[number] = now
                del left[number]
    return ends


@examples(2)
@given(
    rate=st.integers(1, 5_000),
    latency_us=st.integers(0, 50),
    transfers=st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 1_000_000)), max_size=12),
)
def test_transfers_get_equal_shares(rate: int, latency_us: int, transfers: list[tuple[int, int]]) -> None:
    clock = Clock()
    link = SharedLink(float(rate), latency_us, clock)
    ended: dict[int, int] = {}

    def begin(number: int, size: int) -> None:
        link.begin(size, lambda: ended.setdefault(number, clock.now_us), is_load=True, owner=None)

    for number, (at_us, size) in enumerate(transfers):
        clock.at(at_us, lambda number=number, size=size: begin(number, size))  # type: ignore[misc]
    clock.run()
    expected = shares(rate, [(at_us + latency_us, size) for at_us, size in transfers])
    # The clock has whole microseconds, so each end may be late, and delay the ends after it.
    for number, end in enumerate(expected):
        assert end - 1 <= ended[number] <= end + 1 + len(transfers)


def test_an_unlimited_bandwidth_takes_the_latency() -> None:
    clock = Clock()
    link = SharedLink(0.0, 30, clock)
    ended: list[int] = []
    for _ in range(3):
        link.begin(1 << 40, lambda: ended.append(clock.now_us), is_load=True, owner=None)
    clock.run()
    assert ended == [30, 30, 30]


def test_the_transfers_of_a_dead_rank_leave_their_bandwidth_to_others() -> None:
    clock = Clock()
    link = SharedLink(10.0, 0, clock)
    ended: list[str] = []
    for owner in ("dead", "alive"):
        link.begin(1_000, lambda owner=owner: ended.append(f"{owner} {clock.now_us}"), is_load=True, owner=owner)  # type: ignore[misc]
    clock.at(100, lambda: link.drop("dead"))
    clock.run()
    assert ended == ["alive 150"]  # 500 bytes in the first 100 us, and 500 in the next 50


@given(
    limit=st.integers(1, 8),
    actions=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 20), unique=True, min_size=1, max_size=6)), max_size=30
    ),
)
def test_a_store_keeps_the_blocks_that_were_used_last(limit: int, actions: list[tuple[bool, list[int]]]) -> None:
    store = SharedStore(limit)
    expected: list[int] = []  # oldest first
    for is_use, keys in actions:
        if is_use:
            store.use(keys)
            for key in keys:
                if key in expected:
                    expected.remove(key)
                    expected.append(key)
        else:
            before = set(expected)
            expected = [key for key in expected if key not in keys] + keys[::-1]
            expected = expected[-limit:]
            stored, removed = store.add(keys)
            assert set(stored) == set(expected) - before
            assert set(removed) == before - set(expected)
        assert [key in store for key in range(21)] == [key in expected for key in range(21)]
        assert len(store) == len(expected)
