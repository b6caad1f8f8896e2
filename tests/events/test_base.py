"""Packed lists and digests round-trip, and malformed bytes are rejected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.base import hex_digest, pack_u32, pack_u64, require_packed, unpack_u32, unpack_u64


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_u32_lists_round_trip(values: list[int]) -> None:
    assert unpack_u32(pack_u32(values)) == values


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_u64_lists_round_trip(values: list[int]) -> None:
    assert unpack_u64(pack_u64(values)) == values


def test_packed_lists_are_little_endian() -> None:
    assert pack_u32([1, 0x01020304]).hex() == "01000000" + "04030201"
    assert pack_u64([0x0102030405060708]).hex() == "0807060504030201"


@pytest.mark.parametrize("value", [-1, 2**32])
def test_values_beyond_u32_are_rejected(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_u32([value])


@pytest.mark.parametrize("value", [-1, 2**64])
def test_values_beyond_u64_are_rejected(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_u64([value])


def test_partial_integers_are_rejected() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_u32(b"\0" * 5)
    with pytest.raises(ValueError, match="multiple"):
        unpack_u64(b"\0" * 12)
    with pytest.raises(ValueError, match="token_ids: 5 bytes"):
        require_packed("token_ids", b"\0" * 5, 4)


def test_a_digest_is_sixteen_hex_digits_of_the_low_64_bits() -> None:
    assert hex_digest(0) == "0" * 16
    assert hex_digest(2**64 - 1) == "f" * 16
    assert hex_digest(2**64 + 255) == "00000000000000ff"
