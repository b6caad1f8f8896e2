"""The format of block files: whatever happens to a file, reading returns the block or a reason, never wrong bytes."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.workers.kv_tiers.block_file import (
    CHECKED_BYTES,
    FORMAT_VERSION,
    HEAD_BYTES,
    PAYLOAD_OFFSET,
    HeadFormat,
    decode_head,
    file_bytes,
    file_name,
    parse_file_name,
)
from forebay.workers.kv_tiers.block_stores import BAD_REASONS, IoKind
from forebay.workers.kv_tiers.directory_store import DirectoryStore
from forebay.workers.kv_tiers.identity import BlockName
from tests.workers.kv_tiers.store_cases import (
    BLOCK_BYTES,
    check_read,
    content,
    identity,
    name_of,
    open_directory,
    path_of,
    read,
    write,
)

SIZE = file_bytes(BLOCK_BYTES)
# Bytes that mean something: the header, and the block. Between them is padding, which nothing reads.
PLACES = st.integers(0, HEAD_BYTES - 1) | st.integers(PAYLOAD_OFFSET, SIZE - 1)
SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(params=["plain", "nixl"])
def io(request: pytest.FixtureRequest) -> IoKind:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu12")
    kind: IoKind = request.param
    return kind


@pytest.fixture
def store(tmp_path: Path, io: IoKind) -> DirectoryStore:
    store = open_directory(tmp_path, io=io)
    assert write(store, range(3)) == [""] * 3
    return store


def check_miss(store: DirectoryStore, path: Path, reason: str) -> None:
    """Check that the damaged block 1 is a miss that goes to the quarantine, and its neighbours are not affected."""
    results, found = read(store, [0, 1, 2])
    assert results == ["", reason, ""]
    assert (found[0], found[2]) == (content(0), content(2))
    assert not path.exists()
    quarantine = path.parent.parent / "quarantine"
    assert [one.name for one in quarantine.iterdir()] == [f"{reason}-{path.name}"]
    assert read(store, [1])[0] == ["missing"]
    (quarantine / f"{reason}-{path.name}").unlink()
    assert write(store, [1]) == [""]  # the block can be stored again
    check_read(store, [1])


@SHARED_FOLDER
@given(place=PLACES, bit=st.integers(0, 7))
def test_a_flipped_bit_is_a_miss(tmp_path: Path, store: DirectoryStore, place: int, bit: int) -> None:
    path = path_of(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)
    check_miss(store, path, "corrupt")


@SHARED_FOLDER
@given(size=st.integers(0, SIZE - 1))
def test_a_truncated_file_is_a_miss(tmp_path: Path, store: DirectoryStore, size: int) -> None:
    path = path_of(tmp_path, 1)
    with path.open("r+b") as file:
        file.truncate(size)
    check_miss(store, path, "truncated")


@SHARED_FOLDER
@given(data=st.binary(max_size=3 * HEAD_BYTES).filter(any))
def test_any_other_content_is_a_miss(tmp_path: Path, store: DirectoryStore, data: bytes) -> None:
    path = path_of(tmp_path, 1)
    path.write_bytes(data)
    check_miss(store, path, "truncated" if len(data) < HEAD_BYTES else "corrupt")


def test_a_file_that_was_never_written_is_truncated(tmp_path: Path, store: DirectoryStore) -> None:
    path = path_of(tmp_path, 1)
    path.write_bytes(bytes(SIZE))
    check_miss(store, path, "truncated")


def test_a_file_of_another_block_is_a_miss(tmp_path: Path, store: DirectoryStore) -> None:
    path = path_of(tmp_path, 1)
    path.write_bytes(path_of(tmp_path, 2).read_bytes())
    check_miss(store, path, "foreign")


def test_a_file_of_another_identity_is_a_miss(tmp_path: Path, store: DirectoryStore) -> None:
    other = identity(dtype="float8")
    strange = open_directory(tmp_path / "other", who=other)
    write(strange, [1])
    path = path_of(tmp_path, 1)
    path.write_bytes(path_of(tmp_path / "other", 1, other).read_bytes())
    check_miss(store, path, "foreign")


def test_a_file_of_another_size_is_a_miss(tmp_path: Path, store: DirectoryStore) -> None:
    other = identity(block_bytes=100)
    strange = open_directory(tmp_path / "other", who=other)
    write(strange, [1], 100)
    path = path_of(tmp_path, 1)
    path.write_bytes(path_of(tmp_path / "other", 1, other).read_bytes())
    check_miss(store, path, "foreign")


def test_a_file_of_a_newer_version_is_a_miss(
    tmp_path: Path, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.workers.kv_tiers.block_file.FORMAT_VERSION", FORMAT_VERSION + 1)
    newer = HeadFormat(identity().digest, BLOCK_BYTES).encode(name_of(1), bytes(16))
    monkeypatch.undo()
    path = path_of(tmp_path, 1)
    path.write_bytes(newer.ljust(PAYLOAD_OFFSET, b"\0") + content(1))
    check_miss(store, path, "newer")


def test_padding_has_no_meaning(tmp_path: Path, store: DirectoryStore) -> None:
    path = path_of(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[HEAD_BYTES:PAYLOAD_OFFSET] = b"x" * (PAYLOAD_OFFSET - HEAD_BYTES)
    path.write_bytes(data + b"behind the block")
    check_read(store, [0, 1, 2])


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**64 - 1), st.binary(min_size=16, max_size=16))
def test_headers_and_file_names_round_trip(key: bytes, sequence_hash: int, checksum: bytes) -> None:
    name = BlockName(key, sequence_hash)
    heads = HeadFormat(identity().digest, BLOCK_BYTES)
    data = heads.encode(name, checksum)
    assert len(data) == HEAD_BYTES == CHECKED_BYTES + 8
    assert heads.checksum(data, name) == checksum
    assert decode_head(data) == ("", (key, sequence_hash, identity().digest, BLOCK_BYTES, checksum))
    assert parse_file_name(file_name(name)) == name
    assert parse_file_name(file_name(name) + ".tmp") is None


@given(st.binary(max_size=2 * HEAD_BYTES))
def test_decoding_a_header_never_fails(data: bytes) -> None:
    problem, head = decode_head(data)
    assert (head is None) == (problem in BAD_REASONS)
