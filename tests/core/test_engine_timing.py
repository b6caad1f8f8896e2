"""The mocker's timing polynomials, against values worked out by hand from Dynamo's formulas."""

from decimal import Decimal

import pytest

from forebay.core.engine_timing import decode_us, prefill_us


def exact_prefill_us(tokens: int) -> Decimal:
    t = Decimal(tokens)
    return (Decimal("4.209989e-07") * t * t + Decimal("1.518344e-02") * t + Decimal("16.50142")) * 1000


def exact_decode_us(used: int, total: int) -> Decimal:
    u = min(Decimal(used) / Decimal(total), Decimal(1))
    return max(Decimal(1), Decimal("-25.74") * u * u + Decimal("54.01") * u + Decimal("5.74")) * 1000


def test_nothing_to_prefill_takes_no_time() -> None:
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
