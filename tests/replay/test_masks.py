"""Masks keep different values different under a key, and reveal nothing else."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.state.submitted_request import id_hash
from forebay.events.base import pack_u64, unpack_u64
from forebay.events.codec import DecodeError, decode, unknown_tag
from forebay.events.topics import FLEET, REQUESTS, Topic
from forebay.replay.anonymize.masks import KEY_BYTES, HashMask, Masks

KEY = bytes(range(KEY_BYTES))
U64 = st.integers(0, 2**64 - 1)


@given(st.lists(U64, unique=True, max_size=50))
def test_different_numbers_stay_different(values: list[int]) -> None:
    masked = unpack_u64(HashMask(KEY, "blocks").packed(pack_u64(values)))
    assert len(set(masked)) == len(values)


def test_every_purpose_and_every_key_has_a_mask_of_its_own() -> None:
    values = range(100)
    masks = [HashMask(key, purpose) for key in (KEY, bytes(KEY_BYTES)) for purpose in ("blocks", "session")]
    assert len({tuple(map(one.of, values)) for one in masks}) == 4


def test_neighbours_are_separated() -> None:
    mask = HashMask(KEY, "blocks")
    flipped = [(mask.of(value) ^ mask.of(value + 1)).bit_count() for value in range(2_000)]
    assert 31 < sum(flipped) / len(flipped) < 33
    bits = Counter(bit for value in range(2_000) for bit in range(64) if mask.of(value) >> bit & 1)
    assert all(850 < bits[bit] < 1_150 for bit in range(64))


@given(st.text(min_size=1), st.text(min_size=1))
def test_names_are_equal_if_the_originals_are(one: str, other: str) -> None:
    masks = Masks(KEY)
    assert (masks.name("session", one) == masks.name("session", other)) == (one == other)
    assert (masks.request_id(one) == masks.request_id(other)) == (one == other)
    assert masks.name("session", one) != Masks(bytes(KEY_BYTES)).name("session", one)
    assert masks.request_id(one) == masks.request_id_of(id_hash(one))


def test_a_missing_name_stays_none() -> None:
    assert not Masks(KEY).name("lora", "")


@pytest.mark.parametrize("topic", [REQUESTS, FLEET], ids=lambda topic: topic.codec)
def test_undecodable_records_stay_undecodable_for_the_same_reason(topic: Topic) -> None:
    masks = Masks(KEY)
    for value in (b"secret", b"", b"{}"):
        masked = masks.undecodable(topic, value)
        assert unknown_tag(topic, masked) is None
        with pytest.raises(DecodeError):
            decode(topic, masked)
    codec = msgspec.json if topic.codec == "json" else msgspec.msgpack
    masked = masks.undecodable(topic, codec.encode({"type": "secret.plan", "more": "secret"}))
    assert unknown_tag(topic, masked) is not None
    assert b"secret" not in masked
