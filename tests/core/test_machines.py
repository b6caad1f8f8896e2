"""Block identity, costs, choices, and the tables of the fleet and of a request's life."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from math import exp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.blocks import block_hashes, extend_chain, hash_seed, sequence_hashes
from forebay.core.cost import Option, cost_of, cost_table, table_digest
from forebay.core.fleet import TRANSITIONS as FLEET_TABLE
from forebay.core.fleet import Fleet, WorkerPhase
from forebay.core.lifecycle import TRANSITIONS, Move, Phase, Request, Requests, submitted
from forebay.core.load import Load, RankLoad
from forebay.core.machine import IllegalTransition
from forebay.core.prefix_index import NO_OVERLAP, Overlap
from forebay.core.selection import draw, lowest, mix64, softmax_weights
from forebay.events.base import pack_u32, unpack_u64
from forebay.events.control import RouterConfig
from forebay.events.fleet import (
    OwnershipAnnounced,
    WorkerDraining,
    WorkerFact,
    WorkerLost,
    WorkerRecovered,
    WorkerSuspect,
)
from forebay.events.metrics import LoadReported
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from tests.core.worlds import joined, request

# Block identity: Dynamo's vectors


def test_hash_vectors() -> None:
    tokens = pack_u32(range(1, 13))
    assert block_hashes(tokens, 4) == [14643705804678351452, 16777012769546811212, 483935686894639516]
    chain = [14643705804678351452, 4945711292740353085, 12583592247330656132]
    assert unpack_u64(sequence_hashes(tokens, 4)) == chain
    assert block_hashes(tokens, 4, hash_seed("my-lora"))[0] == 15671544057904749233
    assert block_hashes(tokens, 4, hash_seed(cache_namespace="tenant-a"))[0] == 5738685477468498325
    assert hash_seed("", "") == 1337
    assert hash_seed("my-lora", "tenant-a") < 1 << 64


def test_only_full_blocks_are_hashed_and_chains_go_on() -> None:
    assert block_hashes(pack_u32(range(1, 4)), 4) == []
    blocks = block_hashes(pack_u32(range(1, 13)), 4)
    whole = extend_chain(None, blocks)
    assert whole[:2] + extend_chain(whole[1], blocks[2:]) == whole


# Cost: Dynamo's worked examples


def option(worker: str, overlap: Overlap, load: RankLoad) -> Option:
    return Option(worker, 0, 0, 0, overlap, load)


@pytest.mark.parametrize(("overlap", "decode", "cost"), [(2, 10, 18.0), (5, 5, 10.0), (8, 9, 11.0)])
def test_cost_examples(overlap: int, decode: int, cost: float) -> None:
    found = cost_of(RouterConfig(), 640, 64, Overlap(overlap), RankLoad(0, decode, 0, 0))
    assert (found.cost, found.prefill_blocks) == (cost, 10.0)


def test_every_weight_counts() -> None:
    config = RouterConfig(
        overlap_score_credit=2.0,
        host_cache_hit_weight=0.5,
        disk_cache_hit_weight=0.25,
        prefill_load_scale=3.0,
        decode_active_request_weight=0.125,
    )
    found = cost_of(config, 64 * 9, 64, Overlap(1, 2, 4), RankLoad(64, 7, 8, 3))
    assert found == (3.0 * (10 - 4.0) + 10 + 1.0, 10.0, 4.0, 10, 8)
    assert cost_of(RouterConfig(overlap_score_credit=99.0), 64, 64, Overlap(1), RankLoad(0, 1, 0, 0)).cost == 1.0


def test_the_table_digest_sees_everything() -> None:
    options = [option("a", NO_OVERLAP, RankLoad(0, 0, 0, 1)), option("b", Overlap(1), RankLoad(0, 0, 0, 1))]
    costs = cost_table(RouterConfig(), 100, 64, options)
    digests = {
        table_digest(options, costs),
        table_digest(options[::-1], costs[::-1]),
        table_digest(options[:1], costs[:1]),
        table_digest([options[0], option("b", Overlap(0, 1), RankLoad(0, 0, 0, 1))], costs),
        table_digest(options, [costs[0], costs[1]._replace(cost=0.5)]),
    }
    assert len(digests) == 5


# Selection


def test_softmax_of_the_worked_example() -> None:
    weights = softmax_weights([0.0, 3.0, 9.0], 1.0)
    shares = [weight / sum(weights) for weight in weights]
    expected = [exp(0), exp(-1 / 3), exp(-1)]
    assert shares == pytest.approx([value / sum(expected) for value in expected], rel=1e-12)
    assert len(set(softmax_weights([4.0, 4.0], 0.5))) == 1


def test_draws_follow_the_weights_and_ties_are_spread() -> None:
    seen = Counter(draw([1, 2, 1], mix64(seed)) for seed in range(4_000))
    assert [round(seen[at] / 1_000) for at in range(3)] == [1, 2, 1]
    ties = Counter(lowest([2.0, 1.0, 1.0, 1.0], mix64(seed))[0] for seed in range(3_000))
    assert set(ties) == {1, 2, 3}
    assert min(ties.values()) > 900
    assert lowest([3.0, 1.0, 1.0], 7) == (2, 2)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.integers(0, (1 << 64) - 1), st.floats(0.01, 10))
def test_a_choice_is_always_one_of_the_options(costs: list[float], seed: int, temperature: float) -> None:
    weights = softmax_weights(costs, temperature)
    assert max(weights) == weights[costs.index(min(costs))]
    assert 0 <= draw(weights, seed) < len(costs)
    at, ties = lowest(costs, seed)
    assert costs[at] == min(costs)
    assert ties == costs.count(min(costs))


# The fleet

FACTS = (WorkerSuspect, WorkerRecovered, WorkerDraining, WorkerLost)


def fleet_in(phase: WorkerPhase) -> Fleet:
    fleet = Fleet()
    fleet.apply(joined("w"), 3)
    if phase is WorkerPhase.SUSPECT:
        fleet.apply(WorkerSuspect(owner_epoch=0, worker_id="w", worker_epoch=3), 4)
    if phase is WorkerPhase.DRAINING:
        fleet.apply(WorkerDraining(owner_epoch=0, worker_id="w", worker_epoch=3), 4)
    if phase is WorkerPhase.LOST:
        fleet.apply(WorkerLost(owner_epoch=0, worker_id="w", worker_epoch=3), 4)
    return fleet


@pytest.mark.parametrize(("phase", "kind"), list(product(WorkerPhase, FACTS)))
def test_the_fleets_table(phase: WorkerPhase, kind: type[WorkerFact]) -> None:
    fleet = fleet_in(phase)
    before = fleet.digest(), list(fleet.snapshot())
    fact: Any = kind(owner_epoch=0, worker_id="w", worker_epoch=3)
    expected = FLEET_TABLE[phase].get(kind)
    if expected is None:
        with pytest.raises(IllegalTransition):
            fleet.apply(fact, 9)
        assert (fleet.digest(), list(fleet.snapshot())) == before
        return
    worker = fleet.apply(fact, 9)
    assert worker is not None
    assert worker.phase is expected
    assert (fleet.get("w") is None) == (expected is WorkerPhase.LOST)


def test_facts_of_other_epochs_and_older_owners_are_void() -> None:
    fleet = fleet_in(WorkerPhase.READY)
    fleet.apply(OwnershipAnnounced(owner_epoch=7), 5)
    before = fleet.digest()
    for fact in (
        WorkerLost(owner_epoch=6, worker_id="w", worker_epoch=3),
        WorkerLost(owner_epoch=7, worker_id="w", worker_epoch=2),
        WorkerLost(owner_epoch=7, worker_id="x", worker_epoch=3),
        joined("new"),
        OwnershipAnnounced(owner_epoch=1),
    ):
        with pytest.raises(IllegalTransition):
            fleet.apply(fact, 6)
    with pytest.raises(IllegalTransition, match="member already"):
        fleet_in(WorkerPhase.READY).apply(joined("w"), 8)
    assert (fleet.digest(), fleet.owner_epoch, len(fleet)) == (before, 7, 1)
    restored = Fleet()
    restored.restore_owner(fleet.owner_epoch)
    for chunk in fleet.snapshot():
        restored.restore(chunk)
    assert restored.digest() == before


# A request's life


def life_in(phase: Phase) -> tuple[Requests, Request]:
    requests = Requests()
    one = submitted(request("r", [1, 2]), "default", 0, 1_000)
    requests.add(one)
    if phase is not Phase.SUBMITTED:
        requests.route(one, "w", 3, 0)
    if phase is Phase.DECODE:
        requests.progress(first_token(one), 2_000)
    if phase is Phase.WAITING:
        requests.lose_worker(one)
    assert one.phase is phase
    return requests, one


def first_token(one: Request) -> FirstTokenEmitted:
    return FirstTokenEmitted(
        request_id="r",
        attempt=one.attempt,
        worker_id=one.worker_id or "w",
        worker_epoch=one.worker_epoch,
        owner_epoch=0,
    )


@pytest.mark.parametrize(("phase", "move"), list(product(Phase, Move)))
def test_the_table_of_a_life(phase: Phase, move: Move) -> None:
    requests, one = life_in(phase)
    before = requests.digest(), list(requests.snapshot())
    moves: dict[Move, Callable[[], object]] = {
        Move.ROUTED: lambda: requests.route(one, "w2", 4, 1),
        Move.FIRST_TOKEN: lambda: requests.progress(first_token(one), 3_000),
        Move.WORKER_LOST: lambda: requests.lose_worker(one),
        Move.ENDED: lambda: requests.end(one, 3_000),
    }
    perform = moves[move]
    if move not in TRANSITIONS[phase]:
        with pytest.raises(IllegalTransition):
            perform()
        assert (requests.digest(), list(requests.snapshot())) == before
        return
    perform()
    assert requests.digest() != before[0]
    assert (requests.get("r") is None) == (move is Move.ENDED)
    restored = Requests()
    for chunk in requests.snapshot():
        restored.restore(chunk)
    assert restored.digest() == requests.digest()
    assert restored.next_due_us() == requests.next_due_us()


def test_progress_of_nobody_and_of_another_attempt_is_refused() -> None:
    requests, one = life_in(Phase.PREFILL)
    before = requests.digest()
    other: dict[str, Any] = {"worker_id": "w", "worker_epoch": 3, "owner_epoch": 0, "finish_reason": "stop"}
    for name, attempt in (("x", 1), ("r", 2)):
        with pytest.raises(IllegalTransition):
            requests.progress(RequestFinished(**other, request_id=name, attempt=attempt), 9)
    assert requests.digest() == before
    assert requests.progress(RequestFinished(**other, request_id="r", attempt=1), 9) is one


def test_ended_requests_leave_no_deadline_behind() -> None:
    requests = Requests()
    for number in range(500):
        one = submitted(request(f"r{number}", timeout_us=10_000 + number), "default", number, 0)
        requests.add(one)
        requests.route(one, "w", 3, 0)
        if number % 100:
            requests.end(one, 10)
    assert requests.next_due_us() == 10_000
    assert [one.request_id for one in requests.expired(10_250)] == ["r0", "r100", "r200"]
    assert requests.next_due_us() == 10_300
    # An id that comes back with another deadline is not ended by the old one.
    again = submitted(request("again", timeout_us=50), "default", 900, 0)
    requests.add(again)
    requests.end(again, 10)
    requests.expired(200_000_000)
    requests.add(submitted(request("again", timeout_us=10**9), "default", 901, 200_000_000))
    assert requests.expired(200_000_001) == []


def test_load_is_zero_again_and_shared_blocks_count_once() -> None:
    load = Load()
    load.add_rank("w", 0)
    load.add_rank("v", 0)
    empty = load.digest()
    load.book("r1", ("w", 0), 100, [1, 2, 3])
    load.book("r2", ("w", 0), 50, [1, 2, 9])
    assert load.loads([1, 2, 3, 4]) == {("w", 0): RankLoad(150, 4, 2, 1), ("v", 0): RankLoad(0, 0, 0, 4)}
    load.free("r1")
    assert load.loads([1, 2, 3])["w", 0] == RankLoad(50, 3, 1, 1)
    load.prefill_done("r2")
    load.free("r2")
    assert load.loads([1])["w", 0] == RankLoad(0, 0, 0, 1)
    assert load.digest() == empty
    report = LoadReported(worker_id="w", worker_epoch=1, running=1, waiting=2, kv_blocks_used=3, kv_blocks_total=4)
    load.report(report)
    once = load.digest()
    load.report(report)
    assert load.digest() == once != empty
    reported = load.reported(("w", 0))
    assert reported is not None
    assert reported.waiting == 2
    assert load.reported(("v", 0)) is None
    load.drop_rank("w", 0)
    assert load.digest() == empty
    with pytest.raises(AssertionError):
        load.add_rank("v", 0)
