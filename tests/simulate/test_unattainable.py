"""Every miss at nearly zero load has one cause, with numbers."""

from forebay.simulate.outcome import RequestOutcome, RequestOutcomes, SimulationOutcome
from forebay.simulate.slo import Slo
from forebay.simulate.unattainable import MissCause, miss_causes


def served(arrived_ms: int, ttft_ms: int, itl_ms: int = 5, tokens: int = 3, prompt: int = 100) -> RequestOutcome:
    first_us = (arrived_ms + ttft_ms) * 1_000
    last_us = first_us + itl_ms * 1_000 * (tokens - 1)
    return RequestOutcome(arrived_ms * 1_000, prompt, tokens, 0, first_us=first_us, last_us=last_us, attempts=1)


def causes(slo: Slo, *requests: RequestOutcome) -> list[MissCause]:
    return miss_causes(SimulationOutcome(requests=RequestOutcomes(requests)), slo, ["mocker", "h200"])


def test_requests_that_meet_the_slo_have_no_cause() -> None:
    assert causes(Slo(ttft_ms=50, itl_ms=5, e2e_ms=60), served(0, 50), served(1_000, 10, tokens=1)) == []


def test_a_long_prompt_is_compared_with_the_longest_that_meets_the_limit() -> None:
    found = causes(
        Slo(ttft_ms=50), served(0, 40, prompt=400), served(1_000, 90, prompt=900), served(2_000, 95, prompt=950)
    )
    text = "have prompts that are too long for a TTFT of 50 ms, even on an idle worker: 900 uncached tokens take 90 ms"
    assert found == [
        MissCause(cause="prompt", requests=2, text=f"{text} (the longest prompt that meets it has 400)"),
    ]
    (alone,) = causes(Slo(ttft_ms=50), served(0, 90))
    assert alone.text.endswith("(no request meets it)")


def test_slow_engines_and_long_responses_are_named() -> None:
    found = causes(Slo(itl_ms=8), served(0, 10, itl_ms=9), served(1_000, 10, itl_ms=11), served(2_000, 10, itl_ms=10))
    text = (
        "have an ITL above 8 ms, even on an idle worker: 10.0 ms at the median, with the engine profile mocker and h200"
    )
    assert found == [MissCause(cause="itl", requests=3, text=text)]
    (long,) = causes(Slo(e2e_ms=50), served(0, 10, tokens=20), served(1_000, 10, tokens=11))
    text = "take longer than 50 ms, even on an idle worker: the fastest takes 60 ms for 100 uncached tokens and 11"
    assert long == MissCause(cause="e2e", requests=2, text=f"{text} output tokens")


def test_equal_arrivals_are_told_from_other_overlaps() -> None:
    shared = [served(0, 90), served(0, 10), served(0, 95)]
    overlapping = [served(1_000, 60, tokens=50), served(1_050, 90)]
    found = causes(Slo(ttft_ms=50), *shared, *overlapping)
    assert [(one.cause, one.requests) for one in found] == [("shared_arrival", 2), ("overlap", 2)]
    assert found[0].text.startswith("arrive at the same time as others, up to 3 at one time")


def test_failed_requests_are_a_cause() -> None:
    outcome = RequestOutcome(0, 100, 3, failure="does not fit the KV cache")
    (found,) = causes(Slo(ttft_ms=1e6), outcome)
    assert found == MissCause(
        cause="failed", requests=1, text="failed, the first one because: does not fit the KV cache"
    )
