"""Fitting an engine profile to measured points."""

import pytest

from forebay.engine_model.timing import LinearTiming
from forebay.events.scaling import DecodePoint, PrefillPoint
from forebay.simulate.profiles.measured import fit_measured
from forebay.simulate.profiles.sheets import ProfileUnusable

TRUTH = LinearTiming(
    step=2_000.0, prefill_token=60.0, attended_pair=0.02, decode_step=3_000.0, decode_sequence=400.0, context_token=1.5
)
WORK_US = 1_500
BATCHED_TOKENS = 2_048


def prefill_point(isl: int) -> PrefillPoint:
    steps = -(-isl // BATCHED_TOKENS)
    us = WORK_US + steps * TRUTH.step + isl * TRUTH.prefill_token + isl * (isl + 1) / 2 * TRUTH.attended_pair
    return PrefillPoint(isl=isl, ttft_ms=us / 1e3, tokens_per_s=isl * 1e6 / us)


def decode_point(context: int, concurrency: int) -> DecodePoint:
    us = TRUTH.step + TRUTH.decode_step
    us += concurrency * TRUTH.decode_sequence + concurrency * context * TRUTH.context_token
    return DecodePoint(context=context, concurrency=concurrency, itl_ms=us / 1e3, tokens_per_s=concurrency * 1e6 / us)


PREFILL = [prefill_point(isl) for isl in (128, 512, 2_048, 8_192, 32_768)]
DECODE = [decode_point(context, concurrency) for context in (512, 4_096) for concurrency in (1, 4, 16)]


def test_costs_are_recovered() -> None:
    found = fit_measured(PREFILL, DECODE, BATCHED_TOKENS)
    for name in ("prefill_token", "attended_pair", "decode_sequence", "context_token"):
        assert getattr(found.timing, name) == pytest.approx(getattr(TRUTH, name), rel=0.01), name
    assert found.timing.step + found.timing.decode_step == pytest.approx(TRUTH.step + TRUTH.decode_step, rel=0.01)
    assert max(*found.prefill, *found.decode) < 0.005


def test_an_outlier_hardly_changes_the_costs() -> None:
    slow = PrefillPoint(isl=1_024, ttft_ms=10_000.0, tokens_per_s=100.0)
    found = fit_measured([*PREFILL, slow], DECODE, BATCHED_TOKENS)
    assert found.timing.prefill_token == pytest.approx(TRUTH.prefill_token, rel=0.1)
    assert found.timing.context_token == pytest.approx(TRUTH.context_token, rel=0.1)


def test_too_few_points_are_rejected() -> None:
    with pytest.raises(ProfileUnusable, match="3 points of each stage, got 2 of prefill"):
        fit_measured(PREFILL[:2], DECODE, BATCHED_TOKENS)
    with pytest.raises(ProfileUnusable, match="3 points of each stage, got 0 of decode"):
        fit_measured(PREFILL, [], BATCHED_TOKENS)
