"""Seeds that once violated an invariant, seeds of each kind of fault, and the determinism of simulations.

`make fuzz` searches with new seeds.
"""

import subprocess
import sys

import pytest

from tests.depth import sampled
from tests.faults.invariants import Violation
from tests.faults.plan import KINDS, Fault, Plan, PlannedRequest, draw_plan
from tests.faults.shrinking import kind_of, shrink
from tests.faults.simulation import Result, simulate

SEEDS = range(24)
HASH_SEEDS = ("1", "2")
SHRINK_S = 20.0


def calm_plan(**changes: object) -> Plan:
    """Return a plan without faults: two routers, two workers and an ingress get two requests."""
    requests = tuple(PlannedRequest(2_000 + number, f"q{number}", "i0", 0, 16, 4, 40, 10_000) for number in range(2))
    fields: dict[str, object] = {
        "seed": 7,
        "routers": 2,
        "workers": 2,
        "ingresses": 1,
        "kv_blocks": 64,
        "max_num_seqs": 4,
        "speedup": 16.0,
        "snapshot_every": 10,
        "requests": requests,
        "faults": (),
        **changes,
    }
    return Plan(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", sampled(SEEDS, 8))
def test_no_invariant_is_violated(seed: int) -> None:
    assert simulate(draw_plan(seed)).violation == ""


def test_requests_finish_without_faults() -> None:
    result = simulate(calm_plan())
    assert (result.violation, result.outcomes) == ("", {"finished length": 2})


# Each plan is what the shrinker left of a seed that failed.
REGRESSIONS = {
    "the group keeps an owner after a rebalance that its members learn of one after the other": calm_plan(
        faults=tuple(Fault(at_ms, "split_brain", "", 500) for at_ms in (3_000, 3_600, 4_200)),
    ),
    "a lost ingress leaves the lease store after its clock stepped back": calm_plan(
        ingresses=2,
        faults=(Fault(2_500, "lease_clock_jump", "", 0, -3_600_000), Fault(4_000, "loss", "i1")),
    ),
    "a disk that is full for a moment loses no response": calm_plan(
        faults=tuple(Fault(2_000 + 20 * number, "disk_full", "", 100) for number in range(4)),
    ),
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_plan_that_failed_once(name: str) -> None:
    assert simulate(REGRESSIONS[name]).violation == ""


def test_the_same_seed_gives_the_same_trace() -> None:
    plan = draw_plan(3)
    first, second = simulate(plan), simulate(plan)
    assert first.trace_hash == second.trace_hash
    assert first.trace_hash != simulate(draw_plan(4)).trace_hash


def test_traces_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from tests.faults.plan import draw_plan; from tests.faults.simulation import simulate;"
        "print(*(simulate(draw_plan(seed)).trace_hash for seed in (5, 6)))"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in HASH_SEEDS
    }
    assert len(traces) == 1


def test_every_kind_of_fault_can_happen() -> None:
    fired = set()
    for seed in sampled(range(40), 20):
        fired |= simulate(draw_plan(seed)).fired.keys()
    assert fired == set(KINDS)


def test_a_failing_plan_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_lost(plan: Plan) -> Result:
        lost = any(fault.kind == "kill" and fault.target == "w1" for fault in plan.faults)
        return Result(plan, violation=f"{len(plan.requests)} requests are lost" if lost and plan.requests else "")

    monkeypatch.setattr("tests.faults.shrinking.simulate", is_lost)
    faults = tuple(Fault(number, "kill", f"w{number % 3}") for number in range(12))
    small = shrink(is_lost(calm_plan(faults=faults)), SHRINK_S).plan
    assert [fault.target for fault in small.faults] == ["w1"]
    assert len(small.requests) == 1


def test_violations_of_one_kind_are_recognised() -> None:
    assert kind_of("q1: the client received [1, 2]") == kind_of("q27: the client received [3]")
    assert kind_of(str(Violation("q1 was accepted"))) != kind_of("q1 ended twice")
