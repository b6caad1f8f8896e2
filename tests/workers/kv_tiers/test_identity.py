"""Names of stored KV blocks: everything that the KV depends on changes the key, and nothing else does."""

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.base import pack_u32
from forebay.workers.kv_tiers.identity import KeyChain, KvIdentity, block_keys, media_by_block
from tests.workers.kv_tiers.store_cases import identity

WHO = identity()
TOKENS = pack_u32(range(64))  # four blocks
OTHER = {
    "weights": "0" * 64,
    "tp_rank": 1,
    "tp_size": 2,
    "layout": "HND",
    "dtype": "float8",
    "block_size": 32,
    "block_bytes": 1,
}


@pytest.mark.parametrize("field", OTHER)
def test_every_field_changes_the_keys(field: str) -> None:
    other = msgspec.structs.replace(WHO, **{field: OTHER[field]})
    assert other.digest != WHO.digest
    assert not set(block_keys(other, TOKENS)) & set(block_keys(WHO, TOKENS))


def test_the_name_of_the_model_does_not_change_the_keys() -> None:
    assert msgspec.structs.replace(WHO, model="renamed").digest == WHO.digest
    assert set(OTHER) | {"model"} == set(KvIdentity.__struct_fields__)


def test_salt_adapter_and_media_change_the_keys() -> None:
    plain = block_keys(WHO, TOKENS)
    assert not set(block_keys(WHO, TOKENS, salt="s")) & set(plain)
    assert not set(block_keys(WHO, TOKENS, adapter="a")) & set(plain)
    assert block_keys(WHO, TOKENS, salt="s") != block_keys(WHO, TOKENS, adapter="s")
    shown = block_keys(WHO, TOKENS, media={2: ["digest@0+5"]})
    assert shown[:2] == plain[:2]
    assert not set(shown[2:]) & set(plain)


def test_the_keys_are_stable() -> None:
    """Files of the past must be found. A change of these values needs a new KEY_VERSION."""
    keys = block_keys(WHO, TOKENS, salt="s", adapter="a", media={1: ["m@0+5"]})
    assert hashlib.sha256(b"".join(keys)).hexdigest() == (
        "cf5669528e15a178fd0b3b8f2c6de805733a8cad1a53b6b27a1749f893aa2326"
    )


def test_images_that_end_at_different_tokens_have_different_keys() -> None:
    first = media_by_block([("a", 0, 6), ("b", 6, 10)], 16)
    second = media_by_block([("a", 0, 10), ("b", 10, 6)], 16)
    assert block_keys(WHO, TOKENS, media=first) != block_keys(WHO, TOKENS, media=second)
    swapped = media_by_block([("b", 0, 6), ("a", 6, 10)], 16)
    assert block_keys(WHO, TOKENS, media=first) != block_keys(WHO, TOKENS, media=swapped)


def test_an_image_belongs_to_each_block_that_has_a_part_of_it() -> None:
    assert media_by_block([("b", 40, 3), ("a", 10, 12)], 16) == {0: ["a@10+12"], 1: ["a@-6+12"], 2: ["b@8+3"]}


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(0, 4), st.sampled_from(["", "tenant"]))
def test_a_chain_continues_where_it_ended(tokens: list[int], at: int, salt: str) -> None:
    data = pack_u32(tokens)
    whole = block_keys(WHO, data, salt=salt)
    assert len(whole) == len(tokens) // 16
    split = min(at, len(whole))
    chain = KeyChain(WHO, salt=salt)
    first = chain.extend(None, data[: split * 64])
    assert first + chain.extend(first[-1] if first else None, data[split * 64 :]) == whole


@given(st.lists(st.integers(0, 3), min_size=32, max_size=32), st.lists(st.integers(0, 3), min_size=32, max_size=32))
def test_different_tokens_have_different_keys(one: list[int], other: list[int]) -> None:
    same = [a == b for a, b in zip(block_keys(WHO, pack_u32(one)), block_keys(WHO, pack_u32(other)), strict=True)]
    assert same == [one[:16] == other[:16], one == other]
