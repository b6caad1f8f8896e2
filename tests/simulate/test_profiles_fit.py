"""Fitting a profile recovers the costs of the generating timing and reports parameters it cannot determine."""

import pytest

from forebay.engine_model.model import EngineConfig
from forebay.simulate.profiles import fitting
from forebay.simulate.profiles.fitting import REQUESTS_MIN, FitImpossible, TimingFit, fit
from forebay.simulate.profiles.observed import EngineRun, ModelledRun, ObservedRequest
from tests.simulate.engine_runs import SIZES, TRUTH, WORK_US, Jittered, engine_run, with_observed_times


def found_in(*runs: EngineRun) -> TimingFit:
    return fit(runs, lambda _: None)


def test_costs_are_recovered() -> None:
    found = found_in(engine_run(1), engine_run(2))
    timing = found.timing
    for name in ("prefill_token", "attended_pair", "decode_sequence", "context_token"):
        assert getattr(timing, name) == pytest.approx(getattr(TRUTH, name), rel=0.06), name
    # Steps without decoding are the only ones that separate the fixed cost of a step from the cost of decoding.
    assert timing.step + timing.decode_step == pytest.approx(TRUTH.step + TRUTH.decode_step, rel=0.02)
    assert timing.step + found.work_us == pytest.approx(TRUTH.step + WORK_US, rel=0.06)
    assert found.ttft.p50 < 0.03
    assert found.itl is not None
    assert found.itl.p50 < 0.01
    assert (found.fitted, found.ttft.requests, found.left_out, found.warnings) == (280, 120, {}, [])


@pytest.mark.slow
def test_jittered_steps_are_fitted() -> None:
    found = found_in(*(engine_run(seed, timing=Jittered(TRUTH, 0.3, seed)) for seed in (3, 4)))
    assert found.timing.prefill_token == pytest.approx(TRUTH.prefill_token, rel=0.1)
    assert found.itl is not None
    # The median TTFT lies between the TTFTs of short and of long prompts, where there are few samples.
    assert found.ttft.p50 < 0.2
    assert found.itl.modelled_ms[0] == pytest.approx(found.itl.recorded_ms[0], rel=0.1)


@pytest.mark.slow
def test_a_fit_predicts_a_busier_workload() -> None:
    """A profile has to predict workloads other than the one it was fitted to."""
    found = found_in(engine_run(5, every_us=600_000))
    other = engine_run(6, every_us=250_000)
    relative = sorted(
        abs(done.ttft_us / (one.first_us - one.routed_us) - 1)
        for one, done in ModelledRun(other, found.timing, found.work_us)
    )
    assert relative[len(relative) // 2] < 0.1


def test_isolated_requests_determine_only_sums() -> None:
    found = found_in(engine_run(7, requests=60, every_us=60_000_000))
    assert any("no two requests decoded together" in warning for warning in found.warnings)
    (inseparable,) = [warning for warning in found.warnings if "only the sum" in warning and "decode_step" in warning]
    assert "decode_sequence" in inseparable
    assert found.ttft.p90 < 0.01
    timing = found.timing
    together = timing.step + timing.decode_step + timing.decode_sequence
    assert together == pytest.approx(TRUTH.step + TRUTH.decode_step + TRUTH.decode_sequence, rel=0.02)


def test_single_token_responses_have_no_itl() -> None:
    run = engine_run(8, requests=40)
    for one in run.requests:
        one.output_tokens = 1
    found = found_in(with_observed_times(run))
    assert found.itl is None
    assert "no recorded time depends on decode_step" in found.warnings
    assert found.timing.prefill_token == pytest.approx(TRUTH.prefill_token, rel=0.05)


def test_too_few_requests_are_not_fitted() -> None:
    run = engine_run(9, requests=REQUESTS_MIN)
    run.requests[3].left_out = "for a reason"
    with pytest.raises(FitImpossible, match="only 19 requests can be compared; at least 20 are needed"):
        found_in(run)


def test_left_out_requests_are_counted_and_still_load_the_engine() -> None:
    run = engine_run(10, requests=100)
    for one in run.requests[::10]:
        one.left_out = "for a reason"
    found = found_in(run)
    assert found.left_out == {"for a reason": 10}
    assert found.fitted + found.ttft.requests == 90
    assert found.ttft.p50 < 0.05


def test_requests_rejected_by_the_model_are_counted() -> None:
    run = engine_run(11, requests=60)
    end_us = run.requests[-1].routed_us
    run.requests.append(ObservedRequest(end_us - 1, 70_000, bytes(8 * 4375), 10, 0, end_us, end_us + 1))
    ((reason, count),) = found_in(run).left_out.items()
    assert count == 1
    assert reason.startswith("the engine model rejects it: ")


def test_prefixes_cached_only_by_the_engine_are_inferred() -> None:
    run = engine_run(12, requests=60)
    for one in run.requests[1::2]:
        one.cached_tokens = 16
    found = found_in(run)
    assert found.left_out == {"the engine model finds other cached prefixes": 30}
    assert any(warning.startswith("only 50% of the requests find") for warning in found.warnings)
    for one in run.requests:
        one.cached_tokens = 16
    with pytest.raises(FitImpossible, match="only 0 requests find the same cached prefixes in the model"):
        found_in(run)


def test_later_prefixes_cached_only_by_the_engine_are_inferred() -> None:
    run = engine_run(13, requests=60)
    for one in run.requests[40:]:
        one.cached_tokens = 16
    with pytest.raises(FitImpossible, match="no request of the test set can be compared"):
        found_in(run)


def test_long_recordings_are_fitted_by_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "REQUESTS_MAX", 90)
    found = found_in(*(engine_run(seed, requests=80) for seed in (20, 21)))
    assert found.fitted + found.ttft.requests == 90


def test_a_cancelled_request_leaves_the_engine() -> None:
    config = EngineConfig(vocabulary=None, **SIZES)
    long = ObservedRequest(0, 100, bytes(8 * 6), 1000, stopped_us=50_000, left_out="cancelled or failed")
    late = ObservedRequest(5_000_000, 100, bytes(8 * 6), 2)
    long.sequence_hashes = late.sequence_hashes = b"".join(n.to_bytes(8, "little") for n in range(6))
    ((one, done),) = ModelledRun(EngineRun("w", config, (), [long, late]), TRUTH)
    assert one is late
    assert done.cached_tokens == 96
    assert done.itl_us == TRUTH.step + TRUTH.decode_step + TRUTH.decode_sequence + TRUTH.context_token * 7 * 16


def test_an_initial_cache_is_used() -> None:
    config = EngineConfig(vocabulary=None, **SIZES)
    one = ObservedRequest(10, 64, b"".join(n.to_bytes(8, "little") for n in range(1, 5)), 1)
    ((_, done),) = ModelledRun(EngineRun("w", config, (1, 2), [one]), TRUTH, work_us=7)
    assert done.cached_tokens == 32
    assert done.ttft_us == 7 + 2000 + 60 * 32 + round(0.02 * (32 * 32 + 32 * 33 // 2))
