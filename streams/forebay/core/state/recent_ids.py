"""Ids of requests that ended lately, with what they asked for: a producer that sends one again is recognised.

Kept as hashes in the order in which they are forgotten, packed: a thousand requests a second leave 120,000 behind,
and a snapshot has to write them down at one moment.
"""

from array import array
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_MASK, array_u64, pack_u64
from forebay.events.snapshots import CHUNK_HASHES_MAX, Remembered

CHUNK_IDS = CHUNK_HASHES_MAX // 3
FORGOTTEN_MAX = 4_096  # that are still in memory, or half of all: taking out the first of many moves the rest


class RememberedIds:
    """Hashes of ids and contents, each until its time; the times never fall."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._ids: array[int] = array("Q")
        self._contents: array[int] = array("Q")
        self._due_us: array[int] = array("Q")
        self._forgotten = 0
        self._sum = 0

    def __len__(self) -> int:
        """Ids that are remembered."""
        return len(self._known)

    def get(self, id_hash: int) -> int | None:
        """The content hash of an id; None for one that is not remembered."""
        return self._known.get(id_hash)

    def add(self, id_hash: int, content: int, due_us: int) -> None:
        """Remember a new id until `due_us`, which is at least that of the id before."""
        assert id_hash not in self._known, "an id is used once while it is remembered"
        assert not self._due_us or due_us >= self._due_us[-1], "the first to come is the first to go"
        self._known[id_hash] = content
        self._ids.append(id_hash)
        self._contents.append(content)
        self._due_us.append(due_us)
        self._sum += _term(id_hash, content, due_us)

    def next_due_us(self) -> int | None:
        """When the next id is forgotten."""
        return self._due_us[self._forgotten] if self._known else None

    def forget(self, now_us: int) -> None:
        """Forget the ids whose time has come. Costs next to nothing when there are none."""
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
        """64 bits over all of them."""
        return self._sum & U64_MASK

    def snapshot(self) -> Iterator[Remembered]:
        """All of them, the first to be forgotten first."""
        for start in range(self._forgotten, len(self._ids), CHUNK_IDS):
            part = slice(start, start + CHUNK_IDS)
            yield Remembered(
                ids=pack_u64(self._ids[part]),
                contents=pack_u64(self._contents[part]),
                due_us=pack_u64(self._due_us[part]),
            )

    def restore(self, chunk: Remembered) -> None:
        """Take in one chunk of a snapshot, in the order of `snapshot`."""
        packed = (array_u64(part) for part in (chunk.ids, chunk.contents, chunk.due_us))
        for id_hash, content, due_us in zip(*packed, strict=True):
            self.add(id_hash, content, due_us)


def _term(id_hash: int, content: int, due_us: int) -> int:
    return xxh3_64_intdigest(pack_u64((id_hash, content, due_us)))
