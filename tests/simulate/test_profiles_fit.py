"""Fitting a profile recovers the costs of the generating timing and reports parameters it cannot determine."""

import numpy as np
import pytest

from forebay.simulate.profiles.fitting import (
    COSTS,
    REQUESTS_MIN,
    EngineRun,
    FitImpossible,
    ObservedRequest,
    amounts,
    fit,
)
from tests.simulate.engine_runs import TRUTH, WORK_US, Jittered, ModelledRun, engine_run, spec, with_observed_times

STEP, TOKENS, PAIRS, DECODES, SEQUENCES, CONTEXT = range(len(COSTS))
SMALL = spec(kv_blocks_total=1000, max_num_seqs=8, max_num_batched_tokens=100)


def test_costs_are_recovered() -> None:
    found = fit([engine_run(1), engine_run(2)])
    timing = found.timing
    for name in ("prefill_token", "attended_pair", "decode_sequence", "context_token"):
        assert getattr(timing, name) == pytest.approx(getattr(TRUTH, name), rel=0.06), name
    # Steps without decoding are the only ones that separate the fixed cost of a step from the cost of decoding.
    assert timing.step + timing.decode_step == pytest.approx(TRUTH.step + TRUTH.decode_step, rel=0.02)
    assert timing.step + found.work_us == pytest.approx(TRUTH.step + WORK_US, rel=0.06)
    assert found.errors["TTFT"][0] < 0.06
    assert found.errors["ITL"][0] < 0.02
    assert (found.fitted, found.warnings) == (280, [])


def test_jittered_steps_are_fitted() -> None:
    found = fit([engine_run(seed, timing=Jittered(TRUTH, 0.3, seed)) for seed in (3, 4)])
    assert found.timing.prefill_token == pytest.approx(TRUTH.prefill_token, rel=0.2)
    assert found.errors["TTFT"][0] < 0.2


def test_a_fit_predicts_a_busier_workload() -> None:
    """A profile has to predict workloads other than the one it was fitted to."""
    found = fit([engine_run(5, every_us=600_000)])
    other = engine_run(6, every_us=250_000)
    relative = sorted(
        abs(done.ttft_us / (one.first_us - one.routed_us) - 1)
        for one, done in ModelledRun(other, found.timing, found.work_us)
    )
    assert relative[len(relative) // 2] < 0.1


def test_isolated_requests_determine_only_sums() -> None:
    found = fit([engine_run(7, requests=60, every_us=60_000_000)])
    assert any("no two requests decoded together" in warning for warning in found.warnings)
    (inseparable,) = [warning for warning in found.warnings if "only the sum" in warning and "decode_step" in warning]
    assert "decode_sequence" in inseparable
    assert found.errors["TTFT"][1] < 0.02
    timing = found.timing
    together = timing.step + timing.decode_step + timing.decode_sequence
    assert together == pytest.approx(TRUTH.step + TRUTH.decode_step + TRUTH.decode_sequence, rel=0.02)


def test_single_token_responses_have_no_itl() -> None:
    run = engine_run(8, requests=40)
    for one in run.requests:
        one.output_tokens = 1
    found = fit([with_observed_times(run)])
    assert set(found.errors) == {"TTFT"}
    assert "no recorded time depends on decode_step" in found.warnings
    assert found.timing.prefill_token == pytest.approx(TRUTH.prefill_token, rel=0.05)


def test_too_few_requests_are_not_fitted() -> None:
    run = engine_run(9, requests=REQUESTS_MIN)
    run.requests[3].left_out = "for a reason"
    with pytest.raises(FitImpossible, match="only 19 requests can be compared; at least 20 are needed"):
        fit([run])


def test_left_out_requests_still_load_the_engine() -> None:
    run = engine_run(10, requests=100)
    for one in run.requests[::10]:
        one.left_out = "for a reason"
    found = fit([run])
    assert found.fitted == 63
    assert found.errors["TTFT"][0] < 0.05


def request(routed: int, prompt: int, outputs: int, first: int, last: int, cached: int = 0) -> ObservedRequest:
    return ObservedRequest(routed, prompt, outputs, cached, first, last)


def run(*requests: ObservedRequest) -> EngineRun:
    return EngineRun(SMALL, list(requests))


def test_lone_request() -> None:
    (one,), found = amounts(run(request(1_000, 150, 11, 3_000, 8_000, cached=32)))
    assert one.routed_us == 1_000
    ttft, itl = found[:, 0]
    pairs = 118 * 32 + 118 * 119 // 2
    assert list(ttft) == [2, 118, pairs, 0, 0, 0]  # 118 tokens in steps of up to 100
    assert list(itl) == [1, 0, 0, 1, 1, 150 + 11 / 2 + 8]


def test_two_requests_decode_together() -> None:
    """The second request arrives in the middle of a decode step of the first, and joins the next step."""
    first = request(0, 50, 21, 1_000, 21_000)
    second = request(10_000, 30, 6, 11_500, 16_500)
    (_, other), found = amounts(run(first, second))
    assert other is second
    ttft, itl = found[:, 1]
    np.testing.assert_allclose(ttft[[STEP, TOKENS, PAIRS, DECODES, SEQUENCES]], [1.5, 30, 465, 1.5, 1.5])
    np.testing.assert_allclose(itl[[STEP, DECODES, SEQUENCES]], [1, 1, 2], rtol=1e-6)
    itl = found[1, 0]
    np.testing.assert_allclose(itl[[STEP, DECODES]], [1, 1], rtol=1e-6)
    np.testing.assert_allclose(itl[[TOKENS, PAIRS]], [30 / 20, 465 / 20])
    assert 1 < itl[SEQUENCES] < 2


def test_prompts_prefilled_in_one_step_finish_together() -> None:
    _, found = amounts(run(request(0, 40, 1, 900, 900), request(0, 50, 1, 900, 900)))
    assert found[0, :, TOKENS].tolist() == [90, 90]
    assert found[0, :, STEP].tolist() == [1, 1]
    assert not found[1].any()


def test_waiting_request_counts_iterations_of_running_ones() -> None:
    requests = [request(0, 40, 101, 1_000, 101_000), request(2_000, 40, 1, 102_000, 102_000)]
    _, found = amounts(EngineRun(spec(kv_blocks_total=1000, max_num_seqs=1), requests))
    assert 95 < found[0, 1, STEP] < 102


def test_left_out_request_is_load_but_no_row() -> None:
    stopped = ObservedRequest(0, 20, 100, 0, 500, 0, 4_500, "cancelled")
    unfinished = ObservedRequest(0, 20, 100, 0, 500, 0, 0, "unfinished")
    compared, found = amounts(run(stopped, unfinished, request(1_000, 20, 5, 2_500, 4_500)))
    assert [one.routed_us for one in compared] == [1_000]
    np.testing.assert_allclose(found[1, 0, SEQUENCES], 2, rtol=1e-6)


def test_a_run_without_requests() -> None:
    compared, found = amounts(run(ObservedRequest(0, 20, 100)))
    assert (compared, found.shape) == ([], (2, 0, len(COSTS)))
