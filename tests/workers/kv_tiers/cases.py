"""Blocks, identities and stores for tests of KV tiers, and a rank that a test drives by hand."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forebay.engine_model.steps import CacheChange, StoreChange, Stored
from forebay.kv_tiers.manager import TierRun
from forebay.runtime.system import SystemRuntime
from forebay.workers.kv_tiers import offload_manager
from forebay.workers.kv_tiers.block_format import file_bytes, file_path
from forebay.workers.kv_tiers.block_store import BlockStore
from forebay.workers.kv_tiers.disk import DirectoryStore
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity
from forebay.workers.kv_tiers.object_store import ObjectStore
from forebay.workers.kv_tiers.offload_manager import OffloadManager
from forebay.workers.kv_tiers.settings import TierSettings
from forebay.workers.kv_tiers.transfers import LoadResult
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
    shared: bool = False,
    owner: str = "worker-0",
    quota: int = QUOTA,
    who: KvIdentity | None = None,
) -> DirectoryStore:
    return DirectoryStore(root, who or identity(), quota_bytes=quota, shared=shared, owner=owner)


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
    endpoint: str

    def open(self, who: KvIdentity | None = None, quota: int = QUOTA) -> BlockStore:
        who = who or identity()
        if self.endpoint:
            return ObjectStore(URL, who, quota_bytes=quota, endpoint=self.endpoint)
        return open_directory(self.root, shared=True, quota=quota, who=who)

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


WAIT_S = 50.0


def settings(
    tmp_path: Path, *, host: int = 0, disk: int = 0, store: bool = False, filtered: bool = False, **changes: Any
) -> TierSettings:
    return TierSettings(
        host_bytes=host * BLOCK_BYTES,
        disk=tmp_path / "disk" if disk else None,
        disk_bytes=disk * file_bytes(BLOCK_BYTES),
        store=str(tmp_path / "store") if store else "",
        filter=filtered,
        **changes,
    )


class ShiftedClock(SystemRuntime):
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + round(self.ahead_s * 1e9)


class DrivenRank:
    """A rank whose blocks have the bytes of `content`.

    Attributes:
        held: what the changes of the rank amount to, by tier: numbers of blocks.
        offers: numbers of the offers whose memory may be reused.
    """

    def __init__(self, given: TierSettings, **options: Any) -> None:
        self._woken = threading.Event()
        self.tiers = OffloadManager(given, identity(), wake=self._woken.set, **options)
        self.tiers.open()
        self.offers: list[int] = []
        self._offered = 0
        self.held: dict[str, set[int]] = {"host": set(), "disk": set(), "store": set()}
        self.apply(*self.tiers.content())

    def offer(self, numbers: Sequence[int]) -> None:
        self._offered += 1
        names = [name_of(number) for number in numbers]
        ended = partial(self.offers.append, self._offered)
        self.tiers.offer(names, lambda at: memoryview(content(numbers[at])), ended)

    def offload(self, numbers: Sequence[int]) -> None:
        """Offer blocks, and wait until all writes have ended."""
        self.offer(numbers)
        self.settle()

    def match(self, numbers: Sequence[int], hinted: int = 0) -> list[TierRun]:
        return self.tiers.match([name_of(number) for number in numbers], 0, 0, hinted)

    def load(self, numbers: Sequence[int], hinted: int = 0) -> LoadResult:
        """Load what the tiers have of a prompt, wait, and compare each byte."""
        found: list[LoadResult] = []
        self.begin_load(numbers, found.append, hinted)
        self.until(lambda: bool(found))
        return found[0]

    def begin_load(self, numbers: Sequence[int], done: Callable[[LoadResult], None], hinted: int = 0) -> None:
        names = [name_of(number) for number in numbers]
        runs = self.tiers.match(names, 0, 0, hinted)
        memory = [bytearray(BLOCK_BYTES) for _ in range(sum(run.blocks for run in runs))]
        ended = partial(self._verify, list(numbers), memory, done)
        self.tiers.load(names, 0, runs, [memoryview(one) for one in memory], ended)

    def _verify(
        self, numbers: list[int], memory: list[bytearray], done: Callable[[LoadResult], None], result: LoadResult
    ) -> None:
        for number, one in zip(numbers[: result.blocks], memory, strict=False):
            assert one == content(number), f"block {number} has wrong bytes"
        done(result)

    def settle(self) -> None:
        self.until(lambda: not self.tiers.busy)

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll whenever a transfer ends, until the condition holds."""
        while True:
            self._woken.clear()
            self.tiers.poll()
            self.apply(*self.tiers.changes())
            if condition():
                return
            assert self._woken.wait(WAIT_S), "no transfer ended"

    def apply(self, changes: list[CacheChange], store_changes: list[StoreChange]) -> None:
        for change in changes:
            blocks = {one - 1 for one in change.hashes}
            if isinstance(change, Stored):
                assert not self.held[change.tier] & blocks
                self.held[change.tier] |= blocks
            else:
                assert self.held[change.tier] >= blocks
                self.held[change.tier] -= blocks
        for one in store_changes:
            self.held["store"] |= {block - 1 for block in one.stored}
            self.held["store"] -= {block - 1 for block in (*one.removed, *one.stale)}

    def resident(self, tier: Any) -> set[int]:
        return {name.sequence_hash - 1 for name in self.tiers.resident(tier)}


@contextmanager
def rank(given: TierSettings, **options: Any) -> Iterator[DrivenRank]:
    """Open a rank, and close it afterwards."""
    one = DrivenRank(given, **options)
    try:
        yield one
    finally:
        one.tiers.close()


class FaultyStore:
    """A store that fails or waits on command.

    Attributes:
        reason: every block fails with this reason; empty to work.
        gate: calls wait until it is set.
        calls: number of reads and writes that reached the store.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.reason = ""
        self.reading = True
        self.writing = True
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _fails(self, may_fail: bool) -> bool:
        self.calls += 1
        assert self.gate.wait(WAIT_S)
        if self.reason == "raise":
            raise RuntimeError("a bug in a store")
        return bool(self.reason) and may_fail

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float) -> list[str]:
        return [self.reason] * len(names) if self._fails(self.reading) else self._store.read(names, into, deadline_s)

    def write(self, blocks: Sequence[tuple[BlockName, memoryview]], deadline_s: float) -> list[str]:
        return [self.reason] * len(blocks) if self._fails(self.writing) else self._store.write(blocks, deadline_s)


def inject(monkeypatch: Any) -> list[FaultyStore]:
    """Put a `FaultyStore` in front of each store that is opened from now on. Return the list that collects them."""
    opened: list[FaultyStore] = []
    opening = offload_manager.open_store

    def open_store(*args: Any) -> Any:
        opened.append(FaultyStore(opening(*args)))
        return opened[-1]

    monkeypatch.setattr(offload_manager, "open_store", open_store)
    return opened
