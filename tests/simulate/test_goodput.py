"""SLO attainment and goodput."""

import pytest

from forebay.simulate.outcome import RequestOutcome, RequestOutcomes, SimulationOutcome
from forebay.simulate.slo import Slo, SloUnusable, goodput, parse_slo, requests_per_s


def served(ttft_ms: float, itl_ms: float, output_tokens: int = 11, arrived_us: int = 0) -> RequestOutcome:
    first_us = arrived_us + round(ttft_ms * 1e3)
    last_us = first_us + round(itl_ms * 1e3 * (output_tokens - 1))
    return RequestOutcome(arrived_us, 100, output_tokens, worker=0, first_us=first_us, last_us=last_us)


def test_attainment_counts_failed_requests_as_missed() -> None:
    requests = [
        served(100, 10),  # meets both objectives, to the microsecond
        served(101, 10),
        served(100, 11),
        served(100, 0, output_tokens=1, arrived_us=900_000),  # a single token has no ITL
        RequestOutcome(1_000_000, 100, 5, failure="nobody was there"),
    ]
    found = goodput(SimulationOutcome(RequestOutcomes(requests)), Slo(ttft_ms=100, itl_ms=10))
    assert found == {
        "attained": 2 / 5,
        "attained_each": {"ttft": 3 / 5, "itl": 3 / 5},
        "goodput_per_s": 2.0,  # from 0 to 1 s
    }


def test_slo_with_only_e2e() -> None:
    requests = [served(100, 10), served(100, 11)]
    found = goodput(SimulationOutcome(RequestOutcomes(requests)), Slo(e2e_ms=200))
    assert (found["attained"], found["attained_each"]) == (0.5, {"e2e": 0.5})


def test_goodput_of_empty_and_failed_runs_is_zero() -> None:
    assert goodput(SimulationOutcome(), Slo(ttft_ms=1))["attained"] == 0.0
    refused = SimulationOutcome(RequestOutcomes([RequestOutcome(5_000, 1, 1, failure="no")]))
    assert goodput(refused, Slo(ttft_ms=1))["goodput_per_s"] == 0.0


def test_the_rate_is_computed_from_interarrival_times() -> None:
    assert (
        requests_per_s(
            SimulationOutcome(RequestOutcomes([served(1, 1, arrived_us=at) for at in (500, 1_000_500, 2_000_500)]))
        )
        == 1.0
    )
    assert requests_per_s(SimulationOutcome(RequestOutcomes([served(1, 1), served(1, 1)]))) == 0.0
    assert requests_per_s(SimulationOutcome()) == 0.0


def test_slo_levels_round_trip() -> None:
    assert parse_slo("ttft=500,itl=20.5") == Slo(ttft_ms=500.0, itl_ms=20.5)
    assert parse_slo("e2e=1e4") == Slo(e2e_ms=10_000.0)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=nan", "ttft=inf", "ttft=5,"])
def test_invalid_slo_is_rejected(text: str) -> None:
    with pytest.raises(SloUnusable, match="invalid objective"):
        parse_slo(text)


def test_unknown_objective_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(SloUnusable, match="unknown objective 'tpot'; objectives are: ttft, itl, e2e"):
        parse_slo("tpot=5")


def test_duplicate_objective_is_rejected() -> None:
    with pytest.raises(SloUnusable, match="duplicate objective ttft"):
        parse_slo("ttft=5,itl=3,ttft=6")
