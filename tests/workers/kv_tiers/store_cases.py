"""Blocks, identities and stores for tests of KV tiers."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from forebay.workers.kv_tiers.block_file import file_name
from forebay.workers.kv_tiers.block_stores import BlockStore, IoKind
from forebay.workers.kv_tiers.directory_store import DirectoryStore
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity

BLOCK_BYTES = 5_000  # not a multiple of a page
DEADLINE_S = 50.0
QUOTA = 1 << 30


def identity(model: str = "model", block_bytes: int = BLOCK_BYTES, **changes: str) -> KvIdentity:
    weights = hashlib.sha256(model.encode()).hexdigest()
    fields = {"weights": weights, "layout": "NHD", "dtype": "bfloat16", "model": model} | changes
    return KvIdentity(tp_rank=0, tp_size=1, block_size=16, block_bytes=block_bytes, **fields)


def name_of(number: int) -> BlockName:
    return BlockName(hashlib.sha256(str(number).encode()).digest(), number + 1)


def content(number: int, size: int = BLOCK_BYTES) -> bytes:
    return hashlib.shake_128(f"content {number}".encode()).digest(size)


def names(count: int) -> list[BlockName]:
    return [name_of(number) for number in range(count)]


def write(store: BlockStore, numbers: Sequence[int], size: int = BLOCK_BYTES) -> list[str]:
    blocks = [(name_of(number), memoryview(bytearray(content(number, size)))) for number in numbers]
    return store.write(blocks, DEADLINE_S)


def read(store: BlockStore, numbers: Sequence[int], size: int = BLOCK_BYTES) -> tuple[list[str], list[bytes]]:
    """Read blocks; return the results, and the bytes of each block."""
    memory = [bytearray(size) for _ in numbers]
    results = store.read([name_of(number) for number in numbers], [memoryview(one) for one in memory], DEADLINE_S)
    return results, [bytes(one) for one in memory]


def check_read(store: BlockStore, numbers: Sequence[int], size: int = BLOCK_BYTES) -> None:
    results, found = read(store, numbers, size)
    assert results == [""] * len(numbers)
    assert found == [content(number, size) for number in numbers]


def open_directory(
    root: Path,
    *,
    io: IoKind = "plain",
    shared: bool = False,
    owner: str = "worker-0",
    quota: int = QUOTA,
    who: KvIdentity | None = None,
) -> DirectoryStore:
    return DirectoryStore(root, who or identity(), quota_bytes=quota, io=io, shared=shared, owner=owner)


def path_of(root: Path, number: int, who: KvIdentity | None = None) -> Path:
    file = file_name(name_of(number))
    return root / (who or identity()).short_digest / file[:2] / file


def inventory(store: BlockStore) -> set[BlockName]:
    return {name for page in store.inventory() for name in page}
