"""The checksum of a record covers every field, and different records are framed differently."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.transport.sqlite.schema import checksum, decode_headers, encode_headers

FIELDS = st.tuples(
    st.from_regex(r"[a-z0-9.-]{1,8}", fullmatch=True),
    st.integers(0, (1 << 23) - 1),
    st.integers(0, (1 << 40) - 1),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.none() | st.binary(max_size=8),
    st.none() | st.binary(max_size=8),
    st.binary(max_size=8),
)


def test_the_checksum_is_part_of_the_format() -> None:
    assert checksum("topic", 3, 17, 1_700_000_000_000_000, b"key", b'{"a":"b"}', b"value") == -3_468_606_920_563_239_622
    assert checksum("t", 0, 0, 0, None, None, b"") == -3_150_651_442_173_487_104


@given(FIELDS, FIELDS)
def test_different_records_have_different_checksums(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    assert (checksum(*one) == checksum(*other)) == (one == other)
    assert -(1 << 63) <= checksum(*one) < 1 << 63


@given(st.binary(max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_moving_bytes_between_fields_changes_the_checksum(joined: bytes, first: int, second: int) -> None:
    low, high = sorted((min(first, len(joined)), min(second, len(joined))))
    plain = checksum("t", 0, 0, 0, b"", b"", joined)
    moved = checksum("t", 0, 0, 0, joined[:low], joined[low:high], joined[high:])
    assert (plain == moved) == (high == 0)


def test_absent_and_empty_values_have_different_checksums() -> None:
    variants = [(key, headers) for key in (None, b"") for headers in (None, b"")]
    assert len({checksum("t", 0, 0, 0, key, headers, b"") for key, headers in variants}) == 4


@given(st.none() | st.dictionaries(st.text(), st.text(), max_size=4))
def test_headers_round_trip(headers: dict[str, str] | None) -> None:
    encoded = encode_headers(headers)
    assert decode_headers(encoded) == headers
    assert encoded is None or encoded.decode().encode() == encoded
