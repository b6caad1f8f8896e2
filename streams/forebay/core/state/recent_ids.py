"""Ids of recently ended requests, each with a hash of the request, to recognise a redelivered or reused id.

Idempotency keys of finished requests are remembered in the same way, each with the offset of its request.

Ids are stored as hashes in packed arrays, ordered by expiry. The reason is their number: at 1,000 requests per second
120,000 ids are retained, and a snapshot must copy all of them at one moment.
"""

from array import array
from collections.abc import Iterator
from itertools import chain

from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_MASK, array_u64, pack_u64
from forebay.events.snapshots import CHUNK_HASHES_MAX, Remembered

CHUNK_IDS = CHUNK_HASHES_MAX // 3
# Expired ids stay in memory until there are more than this number, and more than valid ids: a removal moves all others.
FORGOTTEN_MAX = 4_096
TERM_BYTES = 24  # id, content and expiry, as u64


class RecentIds:
    """Ids of recently ended requests or commands, with their expiry. Ids must be added in order of expiry.

    An id is stored as a hash, together with a hash of its request or the nonce of its command. `seed` separates the
    digests of several sets in one state.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._known: dict[int, int] = {}
        self._ids: array[int] = array("Q")
        self._contents: array[int] = array("Q")
        self._due_us: array[int] = array("Q")
        self._forgotten = 0
        self._sum = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, id_hash: int) -> int | None:
        """Return the content (hash or nonce) that was added with an id, or None if the id is not remembered."""
        return self._known.get(id_hash)

    def add(self, id_hash: int, content: int, due_us: int) -> None:
        """Remember a new id and its content until `due_us`, which must not be lower than that of the previous id."""
        assert id_hash not in self._known, "an id is used once while it is remembered"
        assert not self._due_us or due_us >= self._due_us[-1], "ids are added in order of expiry"
        self._known[id_hash] = content
        self._ids.append(id_hash)
        self._contents.append(content)
        self._due_us.append(due_us)
        self._sum += self._term(id_hash, content, due_us)

    def next_due_us(self) -> int | None:
        """Return when the next id expires, in microseconds, or None if no id is remembered."""
        return self._due_us[self._forgotten] if self._known else None

    def forget(self, now_us: int) -> None:
        """Remove ids that expire at or before `now_us`. This is cheap if there are none."""
        if not self._known or self._due_us[self._forgotten] > now_us:
            return
        while self._known and self._due_us[self._forgotten] <= now_us:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        """Remove the id that expires first."""
        id_hash, due_us = self._ids[self._forgotten], self._due_us[self._forgotten]
        self._sum -= self._term(id_hash, self._known.pop(id_hash), due_us)
        self._forgotten += 1
        if self._forgotten > max(FORGOTTEN_MAX, len(self._known)):
            for packed in (self._ids, self._contents, self._due_us):
                del packed[: self._forgotten]
            self._forgotten = 0

    def digest(self) -> int:
        return self._sum & U64_MASK

    def snapshot(self) -> Iterator[Remembered]:
        for start in range(self._forgotten, len(self._ids), CHUNK_IDS):
            part = slice(start, start + CHUNK_IDS)
            yield Remembered(
                ids=pack_u64(self._ids[part]),
                contents=pack_u64(self._contents[part]),
                due_us=pack_u64(self._due_us[part]),
            )

    def restore(self, chunk: Remembered) -> None:
        """Add the ids in one part of a snapshot. Parts must come in the order of `snapshot`."""
        # Not with `add`, because there may be 100,000 ids: one by one takes three times as long.
        ids, contents, due_us = (array_u64(part) for part in (chunk.ids, chunk.contents, chunk.due_us))
        known = len(self._known)
        self._known.update(zip(ids, contents, strict=True))
        assert len(self._known) == known + len(ids), "an id is used once while it is remembered"
        self._ids.extend(ids)
        self._contents.extend(contents)
        self._due_us.extend(due_us)
        terms = pack_u64(list(chain.from_iterable(zip(ids, contents, due_us, strict=True))))
        starts = range(0, len(terms), TERM_BYTES)
        self._sum += sum(xxh3_64_intdigest(terms[at : at + TERM_BYTES], self._seed) for at in starts)

    def _term(self, id_hash: int, content: int, due_us: int) -> int:
        return xxh3_64_intdigest(pack_u64((id_hash, content, due_us)), self._seed)
