"""Stores in directories and buckets: whatever happens to a file, reading returns the block or a reason."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers.block_format import (
    FORMAT_VERSION,
    HEAD_BYTES,
    PAYLOAD_OFFSET,
    BlockFormat,
    file_bytes,
    file_path,
    parse_file_name,
)
from forebay.workers.kv_tiers.block_store import BlockStore
from forebay.workers.kv_tiers.identity import BlockName
from tests.workers.kv_tiers.cases import (
    BLOCK_BYTES,
    Place,
    check_read,
    content,
    identity,
    inventory,
    name_of,
    names,
    read,
    write,
)

FILE = file_bytes(BLOCK_BYTES)
# Bytes that mean something: the header, and the block. Between them is padding, which nothing reads.
PLACES = st.integers(0, HEAD_BYTES - 1) | st.integers(PAYLOAD_OFFSET, FILE - 1)
SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def test_workers_share_a_store(place: Place) -> None:
    one, two = place.open(), place.open()
    assert one.name == two.name
    assert write(one, range(200)) == [""] * 200
    check_read(two, range(200))
    assert inventory(two) == set(names(200))
    assert read(two, [5, 999])[0] == ["", "missing"]
    two.remove([name_of(1), name_of(999)])
    assert read(one, [0, 1])[0] == ["", "missing"]
    assert write(one, [1]) == [""]
    check_read(two, [0, 1, 2])
    assert one.take_evicted() == two.take_evicted() == []
    other = place.open(identity("other"))
    assert other.name != one.name
    assert other.name.split("-")[0] == one.name.split("-")[0]
    assert read(other, [1])[0] == ["missing"]
    for store in (one, two, other):
        store.close()
    assert inventory(place.open()) == set(names(200)), "blocks survive a restart"


def test_a_block_is_written_once(place: Place) -> None:
    store = place.open()
    assert write(store, [1, 2]) == [""] * 2
    before = place.get(place.path(1))
    assert write(store, [1, 2, 3]) == [""] * 3
    assert place.get(place.path(1)) == before
    place.delete(place.path(1))
    assert read(store, [1])[0] == ["missing"]
    assert write(store, [1]) == [""]
    check_read(store, [1, 2, 3])


def bad_file(reason: str, place: Place) -> bytes:
    match reason:
        case "never written":
            return bytes(FILE)
        case "foreign":
            return place.get(place.path(2))
        case "other identity":
            return file_of(BlockFormat(identity(dtype="float8")))
        case "other size":
            form = BlockFormat(identity(block_bytes=100))
            return form.head(name_of(1), bytes(16)).ljust(FILE, b"\0")
        case _:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("forebay.workers.kv_tiers.block_format.FORMAT_VERSION", FORMAT_VERSION + 1)
                return file_of(BlockFormat(identity()))


def file_of(form: BlockFormat) -> bytes:
    return form.file(name_of(1), memoryview(content(1)))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("never written", "truncated"),
        ("foreign", "foreign"),
        ("other identity", "foreign"),
        ("other size", "foreign"),
        ("newer", "newer"),
    ],
)
def test_a_bad_file_is_a_miss(place: Place, fault: str, reason: str) -> None:
    store = place.open()
    write(store, range(3))
    place.put(place.path(1), bad_file(fault, place))
    check_miss(store, place, reason)
    assert inventory(store) == set(names(3))


def check_miss(store: BlockStore, place: Place, reason: str) -> None:
    """Check that the damaged block 1 is a miss that goes to the quarantine, and its neighbours are not affected."""
    results, found = read(store, [0, 1, 2])
    assert results == ["", reason, ""]
    assert (found[0], found[2]) == (content(0), content(2))
    paths = place.paths()
    assert place.path(1) not in paths
    quarantined = f"{identity().short_digest}/quarantine/{reason}-{place.path(1).rpartition('/')[2]}"
    assert {path for path in paths if "/quarantine/" in path} == {quarantined}
    assert read(store, [1])[0] == ["missing"]
    place.delete(quarantined)
    assert write(store, [1]) == [""], "the block can be stored again"
    check_read(store, [1])


@pytest.fixture
def directory(tmp_path: Path) -> Place:
    return Place(tmp_path, "")


@pytest.fixture
def store(directory: Place) -> BlockStore:
    store = directory.open()
    assert write(store, range(3)) == [""] * 3
    return store


@SHARED_FOLDER
@given(at=PLACES, bit=st.integers(0, 7))
def test_a_flipped_bit_is_a_miss(directory: Place, store: BlockStore, at: int, bit: int) -> None:
    data = bytearray(directory.get(directory.path(1)))
    data[at] ^= 1 << bit
    directory.put(directory.path(1), bytes(data))
    check_miss(store, directory, "corrupt")


@SHARED_FOLDER
@given(size=st.integers(0, FILE - 1))
def test_a_truncated_file_is_a_miss(directory: Place, store: BlockStore, size: int) -> None:
    directory.put(directory.path(1), directory.get(directory.path(1))[:size])
    check_miss(store, directory, "truncated")


@SHARED_FOLDER
@given(data=st.binary(max_size=3 * HEAD_BYTES).filter(any))
def test_any_other_content_is_a_miss(directory: Place, store: BlockStore, data: bytes) -> None:
    directory.put(directory.path(1), data)
    check_miss(store, directory, "truncated" if len(data) < HEAD_BYTES else "corrupt")


def test_padding_has_no_meaning(directory: Place, store: BlockStore) -> None:
    data = bytearray(directory.get(directory.path(1)))
    data[HEAD_BYTES:PAYLOAD_OFFSET] = b"x" * (PAYLOAD_OFFSET - HEAD_BYTES)
    directory.put(directory.path(1), bytes(data) + b"behind the block")
    check_read(store, [0, 1, 2])


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**64 - 1), st.binary(min_size=16, max_size=16))
def test_headers_and_file_names_round_trip(key: bytes, sequence_hash: int, checksum: bytes) -> None:
    name = BlockName(key, sequence_hash)
    form = BlockFormat(identity())
    data = form.head(name, checksum)
    assert len(data) == HEAD_BYTES
    assert form.read_head(data, name) == ("", checksum)
    folder, file = file_path(name).split("/")
    assert folder == file[:2]
    assert parse_file_name(file) == name
    assert parse_file_name(f"{file}.tmp") is None


# --- Quotas


def test_a_store_keeps_its_quota(place: Place) -> None:
    store = place.open(quota=10 * FILE)
    assert write(store, range(10)) == [""] * 10
    assert store.take_evicted() == []
    assert write(store, range(10, 14)) == [""] * 4
    evicted = set(store.take_evicted())
    left = inventory(store)
    assert left | evicted == set(names(14))
    assert len(left) == 9, "95 % of the quota"
    assert read(store, [int(name.sequence_hash) - 1 for name in evicted])[0] == ["missing"] * 5


def test_several_writers_keep_one_quota(place: Place) -> None:
    stores = [place.open(quota=16 * FILE) for _ in range(3)]

    def fill(number: int) -> None:
        for at in range(20):
            assert write(stores[number], [100 * number + at]) == [""]

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(fill, range(3)))
    assert write(stores[0], [999]) == [""], "the others have ended, so its count is complete"
    left = inventory(stores[0])
    assert 10 <= len(left) <= 16
    evicted = {name for store in stores for name in store.take_evicted()}
    assert evicted == {name_of(999), *(name_of(100 * number + at) for number in range(3) for at in range(20))} - left
    check_read(stores[1], [number for number in range(1000) if name_of(number) in left])


def test_other_identities_and_bad_files_count(place: Place) -> None:
    old = place.open(identity("old model"))
    write(old, range(8))
    old.close()
    path = f"{identity('old model').short_digest}/{file_path(name_of(0))}"
    place.put(path, b"x" * FILE)
    assert read(old, [0])[0] == ["corrupt"]
    store = place.open(quota=10 * FILE)
    write(store, range(100, 105))
    assert len([path for path in place.paths() if path.endswith(".kv")]) == 9
    assert not [path for path in place.paths() if "quarantine" in path], "it went first"


# --- Opening


def test_a_store_of_a_newer_version_is_refused(place: Place) -> None:
    place.put("store.json", b'{"format_version":99,"store_id":"x"}')
    with pytest.raises(EngineError, match="format 99, and this version of forebay reads formats up to 1"):
        place.open()
    place.put("store.json", b"[]")
    with pytest.raises(EngineError, match=r"is not a store of KV blocks: store\.json does not decode"):
        place.open()


def test_a_colliding_identity_is_refused(place: Place) -> None:
    place.open().close()
    path = f"{identity().short_digest}/identity.json"
    assert msgspec.json.decode(place.get(path), type=type(identity())) == identity()
    place.put(path, msgspec.json.encode(identity("other")))
    with pytest.raises(EngineError, match="has KV of other weights or another layout"):
        place.open()
    place.put(path, b"{")
    with pytest.raises(EngineError, match="does not decode"):
        place.open()
    place.put(path, msgspec.json.encode(identity()))
    place.open().close()
