"""Blocks, identities and stores for tests of KV tiers."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.workers.kv_tiers.block_format import file_path
from forebay.workers.kv_tiers.block_store import BlockStore
from forebay.workers.kv_tiers.disk import DirectoryStore
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity
from forebay.workers.kv_tiers.object_store import ObjectStore
from forebay.workers.kv_tiers.settings import IoKind
from tests.workers.kv_tiers.buckets import BUCKET, client

BLOCK_BYTES = 5_000  # not a multiple of a page
DEADLINE_S = 50.0
QUOTA = 1 << 30
URL = f"s3://{BUCKET}/some/prefix"


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
    return root / (who or identity()).short_digest / file_path(name_of(number))


def inventory(store: BlockStore) -> set[BlockName]:
    return {name for page in store.inventory() for name in page}


@dataclass
class Place:
    """A directory or a bucket for stores that are shared, and its files.

    Attributes:
        endpoint: server of the bucket; empty for a directory.
    """

    root: Path
    io: IoKind
    endpoint: str

    def open(self, who: KvIdentity | None = None, quota: int = QUOTA) -> BlockStore:
        who = who or identity()
        if self.endpoint:
            return ObjectStore(URL, who, quota_bytes=quota, io=self.io, endpoint=self.endpoint)
        return open_directory(self.root, io=self.io, shared=True, quota=quota, who=who)

    def path(self, number: int) -> str:
        return f"{identity().short_digest}/{file_path(name_of(number))}"

    def paths(self) -> set[str]:
        if self.endpoint:
            found = client(self.endpoint).list_objects_v2(Bucket=BUCKET)["Contents"]
            return {one["Key"].removeprefix("some/prefix/") for one in found}
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}

    def get(self, path: str) -> bytes:
        if self.endpoint:
            return bytes(client(self.endpoint).get_object(Bucket=BUCKET, Key=f"some/prefix/{path}")["Body"].read())
        return (self.root / path).read_bytes()

    def put(self, path: str, data: bytes) -> None:
        if self.endpoint:
            client(self.endpoint).put_object(Bucket=BUCKET, Key=f"some/prefix/{path}", Body=data)
        else:
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_bytes(data)

    def delete(self, path: str) -> None:
        if self.endpoint:
            client(self.endpoint).delete_object(Bucket=BUCKET, Key=f"some/prefix/{path}")
        else:
            (self.root / path).unlink()
