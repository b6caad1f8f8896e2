"""Sessions that need more cache than one worker has do not stay on one worker."""

import pytest

from forebay.simulate.outcome import summary
from forebay.simulate.settings import engine_config, one_pool, policy
from forebay.simulate.simulation import Simulation
from tests.simulate.pressure_traces import PRESSURES, Pressure
from tests.simulate.traces import Rows

IN_TURN = 1.2  # round-robin returns every session to its worker from the first turn on, so no policy does much better


def measured(pressure: Pressure, name: str) -> tuple[float, float]:
    """Return prefix reuse and mean TTFT in milliseconds."""
    fleet = one_pool(pressure.workers, engine_config(kv_blocks=pressure.kv_blocks))
    outcome = Simulation(fleet, policy(name)).run(Rows(pressure.rows(seed=2), 1.0), lambda _: None)
    found = summary(outcome, pressure.workers)
    return found["prefix_reuse"], found["ttft_ms"]["mean"]


@pytest.mark.parametrize(
    "pressure",
    [
        Pressure(gap_ms=1_000, turns=24, kv_blocks=1_100),
        Pressure(gap_ms=1_000, turns=24, kv_blocks=1_100, warm=100),
        Pressure(sessions=6, turns=24, shared=16, order="shuffled", gap_ms=2_000, workers=4, kv_blocks=1_000),
        PRESSURES["5 sessions, 3 workers, every 300 ms"],
    ],
    ids=["in turn", "in turn, after other prompts", "long system prompt", "concurrent"],
)
def test_sessions_leave_a_worker_whose_cache_is_too_small(pressure: Pressure) -> None:
    reuse, ttft_ms = measured(pressure, "kv")
    in_turn_reuse, in_turn_ttft_ms = measured(pressure, "round-robin")
    thrashing_reuse, thrashing_ttft_ms = measured(pressure, "kv:eviction_weight=0")
    assert reuse > in_turn_reuse - 0.05
    assert ttft_ms < in_turn_ttft_ms * IN_TURN
    assert reuse > thrashing_reuse + 0.02
    assert ttft_ms < thrashing_ttft_ms * 0.8


def test_a_workload_that_fits_one_worker_is_routed_as_without_evictions() -> None:
    pressure = Pressure(sessions=4, turns=12, gap_ms=500)
    rows = Rows(pressure.rows(seed=2), 1.0)
    fleet = one_pool(4, engine_config(kv_blocks=pressure.kv_blocks))
    runs = [Simulation(fleet, policy(name)).run(rows, lambda _: None) for name in ("kv", "kv:eviction_weight=0")]
    assert [one.worker for one in runs[0].requests] == [one.worker for one in runs[1].requests]
