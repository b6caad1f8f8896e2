"""Ids of recently ended requests with a hash of their content, to recognise a redelivered or reused id.

Ids are hashes in packed arrays, ordered by expiry. At 1,000 requests per second 120,000 ids are retained, and a
snapshot must write them at one moment.
"""

from array import array
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_MASK, array_u64, pack_u64
from forebay.events.snapshots import CHUNK_HASHES_MAX, Remembered

CHUNK_IDS = CHUNK_HASHES_MAX // 3
FORGOTTEN_MAX = 4_096  # expired entries that stay in memory, or half of all: removing from the front moves the rest


class RecentIds:
    """Hashes of ids and contents, each with an expiry; ids are added in order of expiry."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._ids: array[int] = array("Q")
        self._contents: array[int] = array("Q")
        self._due_us: array[int] = array("Q")
        self._forgotten = 0
        self._sum = 0

    def __len__(self) -> int:
        """Return the number of remembered ids."""
        return len(self._known)

    def get(self, id_hash: int) -> int | None:
        """Return the content hash of an id, or None if it is not remembered."""
        return self._known.get(id_hash)

    def add(self, id_hash: int, content: int, due_us: int) -> None:
        """Remember a new id until `due_us`, which must not be lower than that of the previous id."""
        assert id_hash not in self._known, "an id is used once while it is remembered"
        assert not self._due_us or due_us >= self._due_us[-1], "ids are added in order of expiry"
        self._known[id_hash] = content
        self._ids.append(id_hash)
        self._contents.append(content)
        self._due_us.append(due_us)
        self._sum += _term(id_hash, content, due_us)

    def next_due_us(self) -> int | None:
        """Return when the next id expires, or None if there is none."""
        return self._due_us[self._forgotten] if self._known else None

    def forget(self, now_us: int) -> None:
        """Remove expired ids. Cheap if there are none."""
        if not self._known or self._due_us[self._forgotten] > now_us:
            return
        while self._known and self._due_us[self._forgotten] <= now_us:
            at = self._forgotten
            id_hash = self._ids[at]
            self._sum -= _term(id_hash, self._known.pop(id_hash), self._due_us[at])
            self._forgotten += 1
        if self._forgotten > max(FORGOTTEN_MAX, len(self._known)):
            for packed in (self._ids, self._contents, self._due_us):
                del packed[: self._forgotten]
            self._forgotten = 0

    def digest(self) -> int:
        """Return a 64-bit digest over all remembered ids."""
        return self._sum & U64_MASK

    def snapshot(self) -> Iterator[Remembered]:
        """Yield all remembered ids, in order of expiry."""
        for start in range(self._forgotten, len(self._ids), CHUNK_IDS):
            part = slice(start, start + CHUNK_IDS)
            yield Remembered(
                ids=pack_u64(self._ids[part]),
                contents=pack_u64(self._contents[part]),
                due_us=pack_u64(self._due_us[part]),
            )

    def restore(self, chunk: Remembered) -> None:
        """Apply one chunk of a snapshot, in the order of `snapshot`."""
        packed = (array_u64(part) for part in (chunk.ids, chunk.contents, chunk.due_us))
        for id_hash, content, due_us in zip(*packed, strict=True):
            self.add(id_hash, content, due_us)


def _term(id_hash: int, content: int, due_us: int) -> int:
    return xxh3_64_intdigest(pack_u64((id_hash, content, due_us)))
