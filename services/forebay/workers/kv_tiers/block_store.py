"""Stores of KV blocks, in a directory or a bucket, of one worker or shared by several.

    store.json                          format version and random id of the store
    owner.lock                          of a directory: locked by the worker that owns it, which is named in it
    IDENTITY/identity.json              what the 16 digits of IDENTITY mean
    IDENTITY/AA/KEY-HASH.kv             a block; AA are the first two digits of its key
    IDENTITY/AA/KEY-HASH.kv.RANDOM.tmp  of a directory: a block while it is written
    IDENTITY/quarantine/                bad files, for an operator

Several processes may share a store, and each may remove blocks to keep its quota. Counting a million files takes
seconds, so a process counts only at the start and after it has written a part of the quota. Between counts, the store
may exceed its quota by that part per process.
"""

import logging
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from forebay import runtime
from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers.block_format import BAD_REASONS, FORMAT_VERSION, BlockFormat, file_path, parse_file_name
from forebay.workers.kv_tiers.identity import SHORT_HEX, BlockName, KvIdentity

LOG = logging.getLogger(__name__)

STORE_FILE = "store.json"
IDENTITY_FILE = "identity.json"
QUARANTINE = "quarantine"
TEMPORARY = ".tmp"
IDENTITY_NAME = re.compile(f"[0-9a-f]{{{SHORT_HEX}}}")
DESCRIPTION_BYTES_MAX = 64 << 10  # of `store.json` and `identity.json`
TEMPORARY_AGE_S = 3600.0  # a temporary file of this age is from a writer that crashed; a write takes seconds
QUARANTINE_MAX = 32  # files per identity, enough to find the cause
COUNT_SHARE = 16  # a process counts again after it has written 1/16 of the quota
KEEP_SHARE = 0.95  # if the quota is exceeded, blocks are removed down to this share, so that counts are rare
WARN_S = 10.0  # between two warnings, because a broken disk or bucket fails for every block

T = TypeVar("T")


class StorageError(EngineError):
    """A directory or a bucket has failed, with the reason `missing` (no such file), `denied`, `full` or `failed`."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class StoredFile(NamedTuple):
    """A file or object in the folder of an identity. `path` is below the store.

    `used_s` is when it was used last, in seconds since 1970. In a bucket, when it was written.
    """

    path: str
    bytes: int
    used_s: float

    @property
    def identity(self) -> str:
        return self.path.partition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def kind(self) -> str:
        if f"/{QUARANTINE}/" in self.path:
            return "quarantined"
        if self.path.endswith(TEMPORARY):
            return "temporary"
        return "block" if parse_file_name(self.name) is not None else "other"


class Storage(Protocol):
    """Files of a store in a directory or a bucket. All methods are thread-safe, block, and raise StorageError."""

    place: str

    def get(self, path: str, limit: int = DESCRIPTION_BYTES_MAX) -> bytes:
        """Return the first `limit` bytes of a file."""
        ...

    def create(self, path: str, content: bytes) -> None:
        """Create a file, which others see only with its whole content. If it exists, do nothing."""
        ...

    def move(self, path: str, to: str) -> None: ...

    def delete(self, paths: Sequence[str]) -> list[str]:
        """Delete files. Return those that existed, as far as the storage knows."""
        ...

    def identities(self) -> list[str]:
        """Return the names of the folders of identities, sorted."""
        ...

    def pages(self, folder: str = "") -> Iterator[list[StoredFile]]:
        """Yield the files below a folder, by default of all identities."""
        ...

    def names(self, identity: str) -> Iterator[list[str]]:
        """Yield the names of the files below the folder of an identity, faster than `pages` does."""
        ...

    def counting(self) -> AbstractContextManager[bool]:
        """Return whether no other process counts the files now, and keep others from it as far as possible."""
        ...


class StoreDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `store.json`. Routers recognize the store by its random id."""

    format_version: int
    store_id: str


class BlockStore(ABC):
    """Store of the KV blocks of one identity. Methods block, so the caller runs them in threads; all are thread-safe.

    When a method returns, the store does not use the memory of its arguments any more. The quota covers all identities.
    Workers that open the same store with the same identity see the same `name`, which routers use. Raises EngineError
    if the store cannot be used.
    """

    def __init__(self, storage: Storage, identity: KvIdentity, quota_bytes: int) -> None:
        self._storage = storage
        self._format = BlockFormat(identity)
        self._folder = identity.short_digest
        self._block_bytes = identity.block_bytes
        try:
            description = StoreDescription(format_version=FORMAT_VERSION, store_id=runtime.random_id()[:16])
            found = _get_or_create(storage, STORE_FILE, msgspec.json.encode(description))
            store_id = _decode_description(found, storage.place).store_id
            found = _get_or_create(storage, f"{self._folder}/{IDENTITY_FILE}", msgspec.json.encode(identity))
            _check_identity(found, identity, f"{storage.place}/{self._folder}")
        except StorageError as error:
            raise EngineError(f"cannot use {storage.place} for KV blocks: {error}") from error
        self.name = f"{store_id}-{self._folder}"
        self._evicted: list[BlockName] = []
        self._quota_bytes = quota_bytes
        self._total_bytes = 0  # of all identities: according to the last count, and the changes by this process since
        self._written_bytes = quota_bytes  # since the last count; at the start, a count is due
        self._lock = threading.Lock()  # of the evicted blocks and the two numbers
        self._counting = threading.Lock()
        self._warned_s = -WARN_S

    @abstractmethod
    def _read(self, names: Sequence[BlockName], into: Sequence[memoryview], end_s: float) -> list[str]:
        """Read blocks until a moment of the monotonic clock."""

    @abstractmethod
    def _write(self, blocks: Sequence[tuple[BlockName, memoryview]], end_s: float) -> tuple[list[str], list[BlockName]]:
        """Write blocks. Return the results as `write`, and the blocks that were new."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the store, after the calls in progress have ended."""

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float) -> list[str]:
        """Read blocks into memory of `block_bytes` bytes each, and verify their checksums.

        No block is begun after `deadline_s` seconds.

        Returns:
            Per block, "" if the memory contains the block, otherwise one of `BAD_REASONS`, upon which the file has
            moved to the quarantine, `missing`, `deadline`, `denied` or `failed`. The memory of a block that was not
            read has undefined content.
        """
        results = self._read(names, into, runtime.monotonic_s() + deadline_s)
        for name, reason in zip(names, results, strict=True):
            if reason in BAD_REASONS:
                self._quarantine(name, reason)
        return results

    def write(self, blocks: Sequence[tuple[BlockName, memoryview]], deadline_s: float) -> list[str]:
        """Write blocks of `block_bytes` bytes that the store lacks. None is begun after `deadline_s` seconds.

        Return per block "" if the store contains it, otherwise `full`, `deadline`, `denied` or `failed`.
        """
        results, new = self._write(blocks, runtime.monotonic_s() + deadline_s)
        size = len(set(new)) * self._format.file_bytes
        with self._lock:
            self._total_bytes += size
            self._written_bytes += size
            due = self._total_bytes > self._quota_bytes or self._written_bytes >= self._quota_bytes / COUNT_SHARE
        if due and new:
            self.enforce_quota()
        return results

    def remove(self, names: Sequence[BlockName]) -> None:
        """Remove blocks. Blocks that the store does not contain are ignored."""
        paths = {self._path(name): name for name in names}
        try:
            self._forget([paths[path] for path in self._storage.delete(list(paths))])
        except StorageError as error:
            self._warn("%s", error)

    def inventory(self) -> Iterator[list[BlockName]]:
        """Yield pages of the names of all blocks of this identity. Only names are listed; no block is opened."""
        try:
            for page in self._storage.names(self._folder):
                found = [name for text in page if (name := parse_file_name(text)) is not None]
                if found:
                    yield found
        except StorageError as error:
            self._warn("%s", error)

    def take_evicted(self) -> list[BlockName]:
        """Return the blocks that this process removed since the last call because the quota was exceeded."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return evicted

    def enforce_quota(self) -> None:
        """Count the files of the store, and remove those that were not used for the longest time if it is too large.

        Quarantined files count as never used. Temporary files of writers that have crashed are removed, too.
        """
        if not self._counting.acquire(blocking=False):
            return
        try:
            with self._lock:
                self._written_bytes = 0
                self._total_bytes = min(self._total_bytes, self._quota_bytes)
            with self._storage.counting() as alone:
                if not alone:
                    return  # another process counts, and removes what is necessary
                total, old = self._surplus(file for page in self._storage.pages() for file in page)
                removed = self._storage.delete([file.path for file in old])
        except StorageError as error:
            self._warn("cannot enforce the quota: %s", error)
            return
        finally:
            self._counting.release()
        own = f"{self._folder}/"
        names = [
            name for path in removed if path.startswith(own) and (name := parse_file_name(path.rpartition("/")[2]))
        ]
        self._forget(names)
        with self._lock:
            self._evicted += names
            # Files written meanwhile may be counted twice, until the next count.
            self._total_bytes = total + self._written_bytes

    def _surplus(self, files: Iterable[StoredFile]) -> tuple[int, list[StoredFile]]:
        """Return the size of the store after a removal, and the files to remove."""
        crashed_s = runtime.wall_s() - TEMPORARY_AGE_S
        counted: list[StoredFile] = []
        removed: list[StoredFile] = []
        for file in files:
            match file.kind:
                case "block":
                    counted.append(file)
                case "quarantined":
                    counted.append(file._replace(used_s=0.0))
                case "temporary" if file.used_s < crashed_s:
                    removed.append(file)
        total = sum(file.bytes for file in counted)
        if total > self._quota_bytes:
            for file in sorted(counted, key=lambda one: (one.used_s, one.path)):
                if total <= self._quota_bytes * KEEP_SHARE:
                    break
                total -= file.bytes
                removed.append(file)
        return total, removed

    def _quarantine(self, name: BlockName, reason: str) -> None:
        path, folder = self._path(name), f"{self._folder}/{QUARANTINE}"
        try:
            has_room = sum(len(page) for page in self._storage.pages(folder)) < QUARANTINE_MAX
            if has_room:
                self._storage.move(path, f"{folder}/{reason}-{path.rpartition('/')[2]}")
            else:
                self._storage.delete([path])
        except StorageError as error:
            if error.reason != "missing":  # another reader was faster
                self._warn("cannot move the %s file %s to the quarantine: %s", reason, path, error)
            return
        what = "moved to the quarantine" if has_room else "deleted, because the quarantine is full"
        self._warn("the block %s is %s; it counts as a miss and was %s", path, reason, what)
        self._forget([name])

    def _forget(self, names: Sequence[BlockName]) -> None:
        with self._lock:
            self._total_bytes -= len(names) * self._format.file_bytes

    def _path(self, name: BlockName) -> str:
        return f"{self._folder}/{file_path(name)}"

    def _warn(self, text: str, *args: object) -> None:
        now_s = runtime.monotonic_s()
        if now_s - self._warned_s >= WARN_S:
            self._warned_s = now_s
            LOG.warning(text, *args)


def store_id_of(storage: Storage) -> str:
    """Return the id of an existing store. Raises EngineError if there is none, or it cannot be read."""
    try:
        return _decode_description(storage.get(STORE_FILE), storage.place).store_id
    except StorageError as error:
        if error.reason != "missing":
            raise
        raise EngineError(f"{storage.place} is not a store of KV blocks: it has no {STORE_FILE}") from error


def _get_or_create(storage: Storage, path: str, content: bytes) -> bytes:
    try:
        return storage.get(path)
    except StorageError as error:
        if error.reason != "missing":
            raise
    storage.create(path, content)
    return storage.get(path)


def _decode_description(data: bytes, place: str) -> StoreDescription:
    try:
        found = msgspec.json.decode(data, type=StoreDescription)
    except msgspec.MsgspecError as error:
        raise EngineError(
            f"{place} is not a store of KV blocks: {STORE_FILE} does not decode ({error}). Use another place, or remove"
            f" {STORE_FILE} to start with a new store id"
        ) from error
    if found.format_version > FORMAT_VERSION:
        raise EngineError(
            f"{place} has KV blocks of format {found.format_version}, and this version of forebay reads formats up to"
            f" {FORMAT_VERSION}. Upgrade forebay, or use another place"
        )
    return found


def _check_identity(data: bytes, identity: KvIdentity, place: str) -> None:
    try:
        found = msgspec.json.decode(data, type=KvIdentity)
    except msgspec.MsgspecError as error:
        raise EngineError(
            f"{place}/{IDENTITY_FILE} does not decode ({error}); remove it to have it written again"
        ) from error
    if found.digest != identity.digest:
        raise EngineError(
            f"{place} has KV of other weights or another layout: {found}; remove it, or use another place"
        )


def start_call(act: Callable[[], T], name: str) -> Future[T]:
    """Run a blocking call on a new thread, which takes 50 µs, and return its future result.

    The interpreter waits for the threads of an executor when it exits, and a call to a file system or a server may
    hang.
    """
    future: Future[T] = Future()

    def step() -> None:
        try:
            future.set_result(act())
        except Exception as error:  # noqa: BLE001 - it is raised by `result`
            future.set_exception(error)

    runtime.start_ticker(step, name)
    return future
