"""The time of a step, against values worked out by hand from the formulas."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.timing import LinearTiming, MockerTiming, RooflineTiming, StepWork, decode_us, prefill_us

NOTHING = {"prefill_tokens": 0, "prefill_attended": 0, "decode_sequences": 0, "decode_tokens": 0, "cache_tokens": 6400}
LINEAR = LinearTiming(
    step=100.0, prefill_token=3.0, attended_pair=0.5, decode_step=40.0, decode_sequence=7.0, context_token=0.25
)
# A token costs 20 FLOPs and 2 bytes of cache, a GPU does 10 FLOPs and reads 5 bytes in a microsecond.
DENSE = RooflineTiming(
    flops_token=20.0, flops_sampled=30.0, flops_pair=4.0, bytes_weights=1000.0, bytes_kv_token=2.0, flops_us=10.0,
    bytes_us=5.0,
)  # fmt: skip


def did(**work: int) -> StepWork:
    return StepWork(**{**NOTHING, **work})


def exact_prefill_us(tokens: int) -> Decimal:
    t = Decimal(tokens)
    return (Decimal("4.209989e-07") * t * t + Decimal("1.518344e-02") * t + Decimal("16.50142")) * 1000


def exact_decode_us(used: int, total: int) -> Decimal:
    u = min(Decimal(used) / Decimal(total), Decimal(1))
    return max(Decimal(1), Decimal("-25.74") * u * u + Decimal("54.01") * u + Decimal("5.74")) * 1000


def test_zero_prefill_tokens_take_no_time() -> None:
    assert prefill_us(0) == 0


@pytest.mark.parametrize("tokens", [1, 64, 1000, 8192, 131_072])
def test_prefill_is_dynamos_polynomial_to_six_digits(tokens: int) -> None:
    exact = exact_prefill_us(tokens)
    assert abs(prefill_us(tokens) - exact) <= max(Decimal("0.5"), exact / 1_000_000)


@pytest.mark.parametrize(("used", "total"), [(0, 16_384), (1, 16_384), (8192, 16_384), (16_384, 16_384), (3, 7)])
def test_decode_is_dynamos_polynomial_to_six_digits(used: int, total: int) -> None:
    exact = exact_decode_us(used, total)
    assert abs(decode_us(used, total) - exact) <= max(Decimal("0.5"), exact / 1_000_000)


def test_worked_examples() -> None:
    assert prefill_us(1000) == 32_106
    assert decode_us(0, 100) == 5_740
    assert decode_us(50, 100) == 26_310
    assert decode_us(100, 100) == 34_010


def test_usage_is_clamped() -> None:
    assert decode_us(300, 100) == decode_us(100, 100)


def test_the_mocker_prefills_and_then_decodes() -> None:
    mocker = MockerTiming()
    assert mocker.step_us(did(prefill_tokens=1000, prefill_attended=500_500)) == 32_106
    assert mocker.step_us(did(decode_sequences=3, decode_tokens=3200)) == 26_310
    assert mocker.step_us(did(prefill_tokens=1000, decode_sequences=3, decode_tokens=3200)) == 32_106 + 26_310


@given(st.integers(0, 100_000), st.integers(1, 100_000), st.integers(1, 512))
def test_the_mocker_knows_no_unit_of_contexts(used: int, total: int, block_size: int) -> None:
    assert decode_us(used * block_size, total * block_size) == decode_us(used, total)


def test_a_linear_step_is_the_sum_of_its_parts() -> None:
    assert LINEAR.step_us(did(prefill_tokens=10, prefill_attended=55)) == 158  # 100 + 30 + 27.5, to the even one
    assert LINEAR.step_us(did(decode_sequences=2, decode_tokens=128)) == 100 + 40 + 14 + 32
    both = LINEAR.step_us(did(prefill_tokens=10, prefill_attended=56, decode_sequences=2, decode_tokens=128))
    assert both == 100 + 30 + 28 + 40 + 14 + 32


def test_a_step_takes_some_time() -> None:
    free = LinearTiming(context_token=1e-9)
    assert free.step_us(did(prefill_tokens=1)) == free.step_us(did(decode_sequences=1, decode_tokens=64)) == 1


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_are_numbers_from_zero_on(cost: float) -> None:
    with pytest.raises(ValueError, match="attended_pair must be a number from 0 on"):
        LinearTiming(step=1.0, attended_pair=cost)


def test_all_zero_costs_are_rejected() -> None:
    with pytest.raises(ValueError, match="at least one cost"):
        LinearTiming()


def changed(timing: RooflineTiming, **changes: Any) -> RooflineTiming:
    fields = {name: getattr(timing, name) for name in timing.__struct_fields__}
    return RooflineTiming(**{**fields, **changes})


def test_a_decode_step_of_one_reads_the_weights() -> None:
    # 1000 + 2 * 64 bytes at 5 a microsecond; 20 + 30 + 4 * 64 FLOPs at 10 are less.
    assert DENSE.step_us(did(decode_sequences=1, decode_tokens=64)) == 226


def test_a_long_prompt_computes() -> None:
    # 20 * 1000 + 4 * 500,500 FLOPs at 10 a microsecond; 1000 + 2 * 1000 bytes at 5 are less.
    assert DENSE.step_us(did(prefill_tokens=1000, prefill_attended=500_500)) == 202_200


def test_reduction_and_overhead_come_on_top() -> None:
    more = changed(DENSE, reduce_us=11.0, reduce_us_token=0.5, overhead_us=100.0)
    assert more.step_us(did(decode_sequences=2, decode_tokens=128)) == 251 + 11 + 1 + 100


@given(st.integers(1, 3000), st.integers(1, 64), st.integers(0, 63))
def test_a_step_reads_the_experts_that_its_tokens_go_to(tokens: int, experts: int, others: int) -> None:
    active = max(1, experts - others)
    mixture = changed(DENSE, bytes_experts=1e9, experts=experts, experts_active=active, flops_us=1e12)
    missed = (1 - Fraction(active, experts)) ** tokens  # by a token each time with the same chance
    expected = (1000 + 2 * 100_000 + (1 - missed) * 10**9) / 5
    took = mixture.step_us(did(decode_sequences=tokens, decode_tokens=100_000))
    assert took == pytest.approx(float(expected), rel=1e-9, abs=1)


def test_one_expert_of_one_is_always_read() -> None:
    mixture = changed(DENSE, bytes_experts=500.0)
    assert mixture.step_us(did(prefill_tokens=1, prefill_attended=1)) == 300


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"flops_us": 0.0}, "above 0"),
        ({"bytes_us": 0.0}, "above 0"),
        ({"bytes_weights": 0.0}, "above 0"),
        ({"overhead_us": -1.0}, "overhead_us"),
        ({"experts": 4, "experts_active": 5}, r"experts_active \(5\)"),
        ({"experts": 4, "experts_active": 0}, r"experts_active \(0\)"),
    ],
)
def test_invalid_rooflines_are_rejected(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        changed(DENSE, **changes)
