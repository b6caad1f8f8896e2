"""Some seeds, plans that once violated an invariant, and the search for smaller plans.

`make fuzz` searches with new seeds.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from msgspec import structs

from forebay.events.codec import decode
from forebay.events.decisions import AdapterPlaced, Advanced, OwnerClaimed, RequestHeld, RequestRouted, Sealed
from forebay.events.topics import DECISIONS, work_topic
from forebay.live.indexer.delivered_log import DeliveredRun
from forebay.transport.base import Record
from tests.depth import sampled
from tests.faults.effects import Effects, Violation
from tests.faults.loop import VirtualLoop
from tests.faults.plan import (
    INDEXER_KINDS,
    KAFKA_KINDS,
    KINDS,
    Depth,
    Fault,
    Plan,
    PlannedRequest,
    calm_plan,
    draw_plan,
    read_plan,
    steady_requests,
)
from tests.faults.process import Process
from tests.faults.rules import OTHER_RULES, OWN_RULES
from tests.faults.search import kind_of, shrink, simulate_seed
from tests.faults.services import PARTITION
from tests.faults.simulation import Result, simulate
from tests.harness.samples import example

SEEDS = range(24)
PLANS = Path(__file__).with_name("plans")  # what the shrinker left of seeds that failed
SHRINK_S = 20.0


@pytest.mark.parametrize("seed", sampled(SEEDS, 4))
def test_no_invariant_is_violated(seed: int) -> None:
    assert simulate(draw_plan(seed)).violation == ""


def test_requests_finish_without_faults() -> None:
    result = simulate(calm_plan())
    assert (result.violation, result.outcomes) == ("", {"finished length": 2})


def test_indexers_restore_snapshots_and_equal_the_owner() -> None:
    kinds = ("faust_rebalance", "retention", "kill", "faust_rebalance", "read_failed", "stop")
    faults = [
        Fault(2_500 + 500 * at, kind, "" if kind in INDEXER_KINDS else f"x{at % 2}", 500)
        for at, kind in enumerate(kinds * 2)
    ]
    result = simulate(calm_plan(faults=tuple(faults), requests=steady_requests(30), indexers=2))
    assert (result.violation, result.outcomes) == ("", {"finished length": 30})
    assert (result.fired["faust_rebalance"], result.fired["retention"]) == (4, 2)


def test_an_indexer_that_skips_events_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = DeliveredRun.read

    def read(run: DeliveredRun, offset: int, limit: int) -> list[Record]:
        records = complete(run, offset, limit)
        return records[len(records) // 2 :]

    monkeypatch.setattr(DeliveredRun, "read", read)
    violation = simulate(calm_plan(requests=steady_requests(30), indexers=2)).violation
    assert re.match("an indexer|a standby has another state", violation), violation


def test_a_gateway_carries_requests() -> None:
    requests = [structs.replace(one, external=True) for one in steady_requests(20)]
    requests[5] = structs.replace(requests[5], disconnect_ms=1)
    result = simulate(calm_plan(requests=tuple(requests)))
    assert (result.violation, result.fired["external"]) == ("", 20)
    assert result.fired["moved"] > 0
    assert result.outcomes["disconnected"] == 1
    assert result.outcomes["answered 200"] > len(requests) // 2
    assert result.partitions.get((work_topic("default").name, PARTITION), []) == []


def claimed_rules(result: Result) -> list[int]:
    events = [decode(DECISIONS, record.value) for record in result.partitions[(DECISIONS.name, PARTITION)]]
    return [event.core_version for event in events if isinstance(event, OwnerClaimed)]


def test_routers_are_upgraded_and_rolled_back() -> None:
    upgrades = [Fault(3_000 + 2_000 * at, "upgrade", name, 500) for at, name in enumerate(("r0", "r1", "r0", "r1"))]
    result = simulate(calm_plan(faults=tuple(upgrades), requests=steady_requests(30)))
    assert (result.violation, result.outcomes) == ("", {"finished length": 30})
    claimed = claimed_rules(result)
    assert (claimed[0], set(claimed), claimed[-1]) == (OWN_RULES, {OWN_RULES, OTHER_RULES}, OWN_RULES)


def test_an_operator_starts_the_rules_of_a_lost_owner_again() -> None:
    faults = (Fault(3_000, "upgrade", "r0", 100), Fault(5_000, "loss", "r1"))
    result = simulate(calm_plan(faults=faults, requests=steady_requests(30)))
    assert (result.violation, result.outcomes) == ("", {"finished length": 30})
    rules = claimed_rules(result)
    assert (len(rules) > 1, set(rules)) == (True, {OWN_RULES})


def test_effects_of_aborts_commands_and_queries_follow_the_journal() -> None:
    given_up = [structs.replace(one, disconnect_ms=300) for one in steady_requests(20)]
    kinds = ("command", "route_query")
    faults = tuple(Fault(2_000 + 400 * number, kinds[number % 2]) for number in range(20))
    result = simulate(calm_plan(requests=tuple(given_up), faults=faults, speedup=0.2))
    assert (result.violation, result.outcomes) == ("", {"disconnected": 20})


@pytest.mark.parametrize(("is_held", "sealed_by", "is_lost"), [(True, 2, False), (True, 1, True), (False, 2, True)])
def test_only_a_new_owner_need_not_send_work_that_is_void(*, is_held: bool, sealed_by: int, is_lost: bool) -> None:
    effects = Effects()
    later = RequestHeld if is_held else Advanced
    for second, (kind, epoch) in enumerate([(RequestRouted, 1), (later, 1), (Sealed, sealed_by)]):
        decided = structs.replace(example(kind, full=False), owner_epoch=epoch)
        effects.on_decision(decided, at_us=second * 1_000_000)
    with pytest.raises(Violation, match=r"lost effect: .*WorkItem") if is_lost else nullcontext():
        effects.check_durable(Counter())


def test_a_process_may_be_stopped_before_it_begins() -> None:
    loop = VirtualLoop("7")
    process, steps = Process(loop, "r0", 1, "7"), []

    async def main(_: Process) -> None:
        steps.append("main")
        await asyncio.sleep(0.5)

    async def stop() -> None:
        steps.append("stop")

    async def start() -> None:
        process.start(main)
        process.spawn(stop())
        await asyncio.sleep(1)

    loop.run(start())
    loop.discard()
    assert steps == ["main", "stop"]


def raise_error() -> None:
    raise KeyError("inside the tool")


@pytest.mark.parametrize(
    ("work", "violation"),
    [
        (raise_error, "the simulation crashed at test_regressions.py:"),
        (lambda: asyncio.sleep(1), "a process warned: coroutine 'sleep' was never awaited"),
        (lambda: asyncio.get_running_loop().call_soon(raise_error), "a process failed: KeyError('inside the tool')"),
    ],
)
def test_a_crash_of_the_simulation_is_a_violation(
    work: Callable[[], object], violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def operate(*_: object) -> None:
        work()

    monkeypatch.setattr("tests.faults.cluster.Cluster.operate", operate)
    assert simulate(calm_plan()).violation.startswith(violation)


def test_a_crash_outside_of_the_simulation_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*_: object) -> None:
        raise_error()

    monkeypatch.setattr("tests.faults.search.draw_plan", draw)
    with pytest.raises(KeyError) as caught:
        simulate_seed(4, "log")
    assert caught.value.__notes__ == ["fuzz: this happened in seed 4"]


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.json")), ids=lambda path: path.stem)
def test_a_plan_that_failed_once(path: Path) -> None:
    assert simulate(read_plan(path)).violation == ""


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trace() -> None:
    plan = draw_plan(3)
    first, second = simulate(plan), simulate(plan)
    assert first.trace_hash == second.trace_hash
    assert first.trace_hash != simulate(draw_plan(4)).trace_hash


@pytest.mark.slow
def test_every_kind_of_fault_can_happen() -> None:
    fired: set[str] = set()
    for seed in range(40):
        fired |= simulate(draw_plan(seed)).fired.keys()
    assert fired == set(KINDS) - set(KAFKA_KINDS)


def test_a_failing_plan_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_lost(plan: Plan) -> Result:
        lost = any(fault.kind == "kill" and fault.target == "w1" for fault in plan.faults)
        return Result(plan, violation=f"{len(plan.requests)} requests are lost" if lost and plan.requests else "")

    monkeypatch.setattr("tests.faults.search.simulate", is_lost)
    faults = tuple(Fault(number, "kill", f"w{number % 3}") for number in range(12))
    small = shrink(is_lost(calm_plan(faults=faults)), SHRINK_S).plan
    assert [fault.target for fault in small.faults] == ["w1"]
    assert len(small.requests) == 1


def test_violations_of_one_kind_are_recognised() -> None:
    assert kind_of("q1: the client received [1, 2]") == kind_of("q27: the client received [3]")
    assert kind_of(str(Violation("q1 was accepted"))) != kind_of("q1 ended twice")


# Takeovers while the Kafka API is in use


KILLED_MS = 4_000
DOWN_MS = 60_000  # the killed process does not come back before the end of the faults
CALLS = range(1, 41)  # more than any of these takeovers makes; asserted below
WARM_MS = 2_000


def takeover(call: int, victim: str, heir: str, depth: Depth, requests: tuple[PlannedRequest, ...]) -> Result:
    """Kill `victim`, and let the call with this number fail that `heir` makes from then on."""
    faults = (Fault(KILLED_MS, "kill", victim, DOWN_MS), Fault(KILLED_MS, "call_failed", heir, amount=call))
    plan: Plan = calm_plan(faults=faults, requests=requests, ingresses=2, depth=depth)
    return simulate(plan)


def over_http(count: int) -> tuple[PlannedRequest, ...]:
    times = (WARM_MS + 200 * number for number in range(count))
    return tuple(PlannedRequest(at_ms, f"q{at_ms}", "i0", 0, 16, 4, 40, 15_000) for at_ms in times)


def over_kafka(count: int) -> tuple[PlannedRequest, ...]:
    times = (WARM_MS + 200 * number for number in range(count))
    return tuple(PlannedRequest(at_ms, f"k{at_ms}", "i0", 0, 16, 4, 40, 15_000, on_kafka=True) for at_ms in times)


@pytest.mark.parametrize("depth", ["log", "kafka"])
@pytest.mark.parametrize("call", sampled(CALLS, 3))
def test_a_router_takes_over_although_a_call_fails(call: int, depth: Depth) -> None:
    for victim, heir in (("r0", "r1"), ("r1", "r0")):
        result = takeover(call, victim, heir, depth, over_http(20))
        assert (result.violation, result.failed, result.outcomes) == ("", [], {"finished length": 20})


@pytest.mark.parametrize("call", sampled(CALLS, 5))
def test_an_ingress_takes_a_partition_over_although_a_call_fails(call: int) -> None:
    for victim, heir in (("i0", "i1"), ("i1", "i0")):
        result = takeover(call, victim, heir, "kafka", over_kafka(20))
        assert (result.violation, result.failed, result.outcomes) == ("", [], {"answered 200": 20})


# Adapters that the owner places


@pytest.mark.parametrize("victims", [(), ("w0",), ("w1",), ("r0",), ("r0", "w0"), ("r1", "w1")], ids=repr)
def test_adapters_are_placed_although_workers_and_routers_are_killed(victims: tuple[str, ...]) -> None:
    """Six adapters take turns in four slots, so that loads are in flight whenever a process is killed."""
    added = tuple(Fault(WARM_MS, "adapter", amount=number) for number in range(6))
    killed = tuple(Fault(KILLED_MS + 250 * at, "kill", victim, 1_500) for at, victim in enumerate(victims))
    times = (WARM_MS + 500 + 250 * number for number in range(24))
    requests = tuple(
        PlannedRequest(at_ms, f"q{at_ms}", "i0", 0, 16, 4, 40, 60_000, lora=f"adapter-{at_ms // 250 * 5 % 6}")
        for at_ms in times
    )
    result = simulate(calm_plan(faults=(*added, *killed), requests=requests))
    assert (result.violation, result.failed) == ("", [])
    assert result.outcomes == {"finished length": 24}
    decided = [decode(DECISIONS, record.value) for record in result.partitions[DECISIONS.name, PARTITION]]
    placed = [one for one in decided if isinstance(one, AdapterPlaced)]
    assert len(placed) >= 6 and sum(bool(one.unloaded) for one in placed) >= 2
