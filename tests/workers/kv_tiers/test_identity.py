"""Names of stored KV blocks: everything that the KV depends on changes the key, and nothing else does."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.base import pack_u32
from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers.identity import NO_MEDIA, KeyChain, KvIdentity, media_by_block, weights_digest
from tests.workers.kv_tiers.cases import identity

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

CONTENT = b"weights" * 1000
BLOB = hashlib.sha256(CONTENT).hexdigest()


def block_keys(
    who: KvIdentity, tokens: bytes, *, media: Mapping[int, Sequence[str]] = NO_MEDIA, **chain: str
) -> list[bytes]:
    return KeyChain(who, **chain).extend(None, tokens, media)


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


# --- Digests of models and adapters


def model(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "README.md").write_bytes(b"not part of the model")
    return folder


def test_equal_files_have_equal_digests(tmp_path: Path) -> None:
    first = weights_digest(model(tmp_path / "a"))
    assert weights_digest(model(tmp_path / "b")) == first
    (tmp_path / "b" / "README.md").write_bytes(b"changed")
    assert weights_digest(tmp_path / "b") == first


@pytest.mark.parametrize("change", ["content", "config", "name", "another file"])
def test_a_change_of_the_model_changes_the_digest(tmp_path: Path, change: str) -> None:
    folder = model(tmp_path / "a")
    before = weights_digest(folder)
    match change:
        case "content":
            (folder / "model.safetensors").write_bytes(b"x" + CONTENT)
        case "config":
            (folder / "config.json").write_bytes(b'{"rope_theta": 1}')
        case "name":
            (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        case "another file":
            (folder / "model-2.safetensors").write_bytes(b"")
    assert weights_digest(folder) != before


def test_files_of_the_hub_are_named_by_their_blobs(tmp_path: Path) -> None:
    plain = model(tmp_path / "plain")
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "rev"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / BLOB).write_bytes(b"not hashed, because the name is the hash")
    (blobs / "0123456789abcdef0123456789abcdef01234567").write_bytes(b"{}")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / BLOB)
    (snapshot / "config.json").symlink_to("../../blobs/0123456789abcdef0123456789abcdef01234567")
    assert weights_digest(snapshot) == weights_digest(plain)
    (blobs / BLOB).unlink()
    with pytest.raises(EngineError, match=r"cannot read .*model\.safetensors: No such file"):
        weights_digest(snapshot)


def test_digests_are_remembered_until_a_file_changes(tmp_path: Path) -> None:
    folder, cache = model(tmp_path / "a"), tmp_path / "cache" / "digests.json"
    path = folder / "model.safetensors"
    first = weights_digest(folder, cache)
    times = path.stat()
    path.write_bytes(CONTENT[::-1])
    changed = weights_digest(folder)
    assert changed != first
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights_digest(folder, cache) == first  # remembered: size and time are the same
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert weights_digest(folder, cache) == changed
    cache.write_bytes(b"damaged")
    assert weights_digest(folder, cache) == changed


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert weights_digest(model(tmp_path / "a"), tmp_path / "file" / "digests.json")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="has no weight files"):
        weights_digest(tmp_path)
