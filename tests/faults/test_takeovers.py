"""The owner or an ingress is killed, and each broker call of the process that takes over fails once.

No process may end, the group has an owner again, and every request gets its response.
"""

import pytest

from tests.depth import sampled
from tests.faults.plan import Depth, Fault, Plan, PlannedRequest, calm_plan
from tests.faults.simulation import Result, simulate

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
