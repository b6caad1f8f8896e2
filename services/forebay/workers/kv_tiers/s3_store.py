"""Store of KV blocks in an S3 bucket, which workers share.

The objects have the layout and the format of the files of a directory. S3 does not record reads, so if the bucket
exceeds its quota, the blocks that were written first are removed first.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from forebay import runtime
from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers import block_file
from forebay.workers.kv_tiers.block_file import HEAD_BYTES, PAYLOAD_OFFSET, HeadFormat, file_name, parse_file_name
from forebay.workers.kv_tiers.block_stores import BAD_REASONS, IoKind, StoreStats
from forebay.workers.kv_tiers.directory_layout import (
    IDENTITY_FILE,
    QUARANTINE,
    STORE_FILE,
    check_identity,
    decode_description,
    new_description,
)
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity
from forebay.workers.kv_tiers.object_io import NixlObjects, ObjectIo, ObjectTransfer, PlainObjects, nap
from forebay.workers.kv_tiers.pause import Pause
from forebay.workers.kv_tiers.s3_bucket import Bucket, BucketError, ListedObject

LOG = logging.getLogger(__name__)

QUARANTINE_MAX = 32  # objects that one process moves to the quarantine; further bad objects are deleted
COUNT_SHARE = 16  # a process lists the bucket again after it has written 1/16 of the quota
KEEP_SHARE = 0.95  # if the quota is exceeded, objects are removed down to this share
KNOWN_MAX = 1_000_000  # keys of blocks that this process believes to be in the bucket, 100 MB
WARN_S = 10.0  # between two warnings, because a broken bucket fails for every block


class S3Store:
    """Store of KV blocks of one identity in a bucket.

    Args:
        url: `s3://BUCKET/PREFIX`.
        quota_bytes: maximum size of all objects below the prefix in bytes, over all identities.
        io: how bytes are moved. Requests that move no blocks always use boto3.
        endpoint: URL of the S3 endpoint; empty for that of boto3's configuration.

    Raises:
        EngineError: the bucket cannot be used.
        PackageMissing: boto3 or NIXL is not installed.
    """

    def __init__(self, url: str, identity: KvIdentity, *, quota_bytes: int, io: IoKind, endpoint: str = "") -> None:
        self._bucket = Bucket(url, endpoint)
        self._identity = identity
        self._folder = f"{identity.short_digest}/"
        self._size = block_file.file_bytes(identity.block_bytes)
        self._format = HeadFormat(identity.digest, identity.block_bytes)
        self._plain = PlainObjects(self._bucket, self._size)
        try:
            store_id = decode_description(self._bucket.get_or_create(STORE_FILE, new_description()), url).store_id
            self._describe_identity()
            self._io: ObjectIo = NixlObjects(self._bucket, self._size) if io == "nixl" else self._plain
        except BucketError as error:
            raise EngineError(f"cannot use {url} for KV blocks: {error}") from error
        self._name = f"{store_id}-{identity.short_digest}"
        self._stats = StoreStats()
        self._evicted: list[BlockName] = []
        self._known: dict[bytes, None] = {}
        self._quota_bytes = quota_bytes
        self._written = quota_bytes  # since the bucket was listed; at the start, a listing is due
        self._lock = threading.Lock()  # of everything that changes
        self._listing = threading.Lock()
        self._pause = Pause(url)
        self._warned_s = -WARN_S

    @property
    def name(self) -> str:
        return self._name

    @property
    def stats(self) -> StoreStats:
        return self._stats

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float) -> list[str]:
        """Read and verify blocks. See `BlockStore.read`."""
        start_s = runtime.monotonic_s()
        if self._pause.active():
            results = ["failed"] * len(names)
        else:
            results = self._move(
                [self._key(name) for name in names],
                lambda io, place: io.start_read(self._key(names[place])),
                lambda place, data: self._take(names[place], data, into[place]),
                start_s + deadline_s,
            )
            self._pause.observe(results)
        for name, reason in zip(names, results, strict=True):
            if reason in BAD_REASONS:
                self._quarantine(name, reason)
            elif reason == "missing":
                with self._lock:
                    self._known.pop(name.key, None)
        count = results.count("")
        with self._lock:
            self._stats.read_blocks += count
            self._stats.read_bytes += count * self._identity.block_bytes
            self._stats.read_us += round((runtime.monotonic_s() - start_s) * 1e6)
            self._stats.read_misses.update(filter(None, results))
        return results

    def write(self, blocks: Sequence[tuple[BlockName, memoryview]], deadline_s: float) -> list[str]:
        """Write blocks. See `BlockStore.write`."""
        start_s = runtime.monotonic_s()
        if self._pause.active():
            results = ["failed"] * len(blocks)
            new: list[int] = []
        else:
            new = [place for place, (name, _) in enumerate(blocks) if name.key not in self._known]
            results = [""] * len(blocks)
            moved = self._move(
                [self._key(blocks[place][0]) for place in new],
                lambda io, at: io.start_write(
                    self._key(blocks[new[at]][0]), lambda to: self._fill(blocks[new[at]], to)
                ),
                lambda _at, _data: "",
                start_s + deadline_s,
            )
            for place, reason in zip(new, moved, strict=True):
                results[place] = reason
            self._pause.observe(moved)
        written = [blocks[place][0] for place in new if not results[place]]
        with self._lock:
            self._stats.write_skipped += results.count("") - len(written)
            self._stats.write_blocks += len(written)
            self._stats.write_bytes += len(written) * self._identity.block_bytes
            self._stats.blocks += len(written)
            self._stats.bytes += len(written) * self._identity.block_bytes
            self._stats.write_us += round((runtime.monotonic_s() - start_s) * 1e6)
            self._stats.write_failures.update(filter(None, results))
            self._written += len(written) * self._size
            self._learn(name.key for name in written)
            due = self._written >= self._quota_bytes / COUNT_SHARE
        if due and written:
            self.enforce_quota()
        return results

    def remove(self, names: Sequence[BlockName]) -> None:
        """Remove blocks. See `BlockStore.remove`."""
        try:
            self._bucket.delete([self._key(name) for name in names])
        except BucketError as error:
            self._warn("%s", error)
            return
        with self._lock:
            self._stats.removed += len(names)
            for name in names:
                self._known.pop(name.key, None)

    def inventory(self) -> Iterator[list[BlockName]]:
        """Yield the names of all blocks, one page per request. See `BlockStore.inventory`."""
        known: dict[bytes, None] = {}
        blocks = 0
        try:
            for page in self._bucket.pages(self._folder):
                found = [name for one in page if (name := self._parse(one.key)) is not None]
                blocks += len(found)
                known.update((name.key, None) for name in found)
                if found:
                    yield found
        except BucketError as error:
            self._warn("%s", error)
            return
        with self._lock:
            self._known = {}  # blocks written meanwhile may be written once more
            self._learn(known)
            self._stats.blocks = blocks
            self._stats.bytes = blocks * self._identity.block_bytes

    def take_evicted(self) -> list[BlockName]:
        """Return the blocks that were removed because of the quota. See `BlockStore.take_evicted`."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return evicted

    def enforce_quota(self) -> None:
        """List the objects below the prefix, and remove the oldest ones if they exceed the quota."""
        if not self._listing.acquire(blocking=False):
            return
        try:
            with self._lock:
                self._written = 0
            objects = [one for page in self._bucket.pages() for one in page if one.key.endswith(block_file.SUFFIX)]
            removed = _oldest(objects, self._quota_bytes)
            self._bucket.delete([one.key for one in removed])
        except BucketError as error:
            self._warn("cannot enforce the quota: %s", error)
            return
        finally:
            self._listing.release()
        names = [name for one in removed if (name := self._parse(one.key)) is not None]
        with self._lock:
            self._stats.evicted += len(names)
            self._stats.blocks = max(0, self._stats.blocks - len(names))
            self._stats.bytes = self._stats.blocks * self._identity.block_bytes
            self._evicted += names
            for name in names:
                self._known.pop(name.key, None)

    def close(self) -> None:
        """Release all threads and agents, without waiting for requests that were abandoned."""
        self._io.close()
        self._plain.close()

    def _describe_identity(self) -> None:
        found = self._bucket.get_or_create(self._folder + IDENTITY_FILE, msgspec.json.encode(self._identity))
        check_identity(found, self._identity, f"{self._bucket.url}/{self._identity.short_digest}")

    def _key(self, name: BlockName) -> str:
        file = file_name(name)
        return f"{self._folder}{file[:2]}/{file}"

    def _parse(self, key: str) -> BlockName | None:
        parts = key.split("/")
        return parse_file_name(parts[2]) if len(parts) == 3 and key.startswith(self._folder) else None

    def _move(
        self,
        keys: Sequence[str],
        start: Callable[[ObjectIo, int], ObjectTransfer | None],
        finish: Callable[[int, memoryview], str],
        end_s: float,
    ) -> list[str]:
        """Transfer objects concurrently, and repeat by boto3 what fails by NIXL. Return the reasons of failures."""
        results = ["deadline"] * len(keys)
        waiting: list[tuple[ObjectIo, int]] = [(self._io, place) for place in reversed(range(len(keys)))]
        running: list[tuple[ObjectIo, int, ObjectTransfer]] = []
        try:
            while (waiting or running) and runtime.monotonic_s() < end_s:
                self._start_all(waiting, running, start, results)
                ended = [(one, found) for one in running if (found := one[0].result(one[2])) is not None]
                for one, found in ended:
                    io, place, transfer = one
                    reason = finish(place, found) if isinstance(found, memoryview) else found.reason
                    io.end(transfer)
                    running.remove(one)
                    results[place] = reason
                    if isinstance(found, BucketError) and io is self._plain and reason != "missing":
                        self._warn("%s", found)
                    if reason and io is not self._plain:
                        results[place] = "deadline"
                        waiting.append((self._plain, place))
                if not ended:
                    nap()
        finally:
            for io, _, transfer in running:
                io.end(transfer)
        return results

    def _start_all(
        self,
        waiting: list[tuple[ObjectIo, int]],
        running: list[tuple[ObjectIo, int, ObjectTransfer]],
        start: Callable[[ObjectIo, int], ObjectTransfer | None],
        results: list[str],
    ) -> None:
        """Begin as many waiting transfers as possible."""
        while waiting:
            io, place = waiting[-1]
            try:
                transfer = start(io, place)
            except BucketError as error:
                waiting.pop()
                if io is self._plain:
                    results[place] = error.reason
                else:
                    waiting.append((self._plain, place))
                continue
            if transfer is None:
                return
            waiting.pop()
            running.append((io, place, transfer))

    def _take(self, name: BlockName, data: memoryview, into: memoryview) -> str:
        """Verify an object and copy its block. Return why it is bad, or an empty text."""
        checksum = self._format.checksum(bytes(data[:HEAD_BYTES]), name)
        if isinstance(checksum, str):
            return checksum
        if len(data) < self._size:
            return "truncated"
        block = data[PAYLOAD_OFFSET : self._size]
        if block_file.checksum(block) != checksum:
            return "corrupt"
        into[:] = block
        return ""

    def _fill(self, named: tuple[BlockName, memoryview], to: memoryview) -> None:
        name, block = named
        to[:HEAD_BYTES] = self._format.encode(name, block_file.checksum(block))
        to[HEAD_BYTES:PAYLOAD_OFFSET] = bytes(PAYLOAD_OFFSET - HEAD_BYTES)
        to[PAYLOAD_OFFSET:] = block

    def _learn(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._known[key] = None
        while len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def _quarantine(self, name: BlockName, reason: str) -> None:
        key = self._key(name)
        try:
            if self._stats.quarantined < QUARANTINE_MAX:
                self._bucket.move(key, f"{self._folder}{QUARANTINE}/{reason}-{file_name(name)}")
            else:
                self._bucket.delete([key])
        except BucketError as error:
            self._warn("cannot move a %s object to the quarantine: %s", reason, error)
            return
        self._warn("the object %s is %s; it counts as a miss and was moved to the quarantine", key, reason)
        with self._lock:
            self._stats.quarantined += 1
            self._stats.blocks = max(0, self._stats.blocks - 1)
            self._stats.bytes = self._stats.blocks * self._identity.block_bytes
            self._known.pop(name.key, None)

    def _warn(self, text: str, *args: object) -> None:
        now_s = runtime.monotonic_s()
        if now_s - self._warned_s >= WARN_S:
            self._warned_s = now_s
            LOG.warning(text, *args)


def _oldest(objects: list[ListedObject], limit: int) -> list[ListedObject]:
    """Return the objects to remove, so that the rest is below the limit."""
    total = sum(one.bytes for one in objects)
    removed: list[ListedObject] = []
    if total > limit:
        # Quarantined objects first, then those that were written first.
        order = sorted(objects, key=lambda one: (f"/{QUARANTINE}/" not in one.key, one.written_s, one.key))
        for one in order:
            if total <= limit * KEEP_SHARE:
                break
            total -= one.bytes
            removed.append(one)
    return removed
