"""Which worker rank each session stays on.

Theory of operation. A session is bound where its first request was routed, and stays bound until some time after
its last one, or until its worker is lost. The state is a set of (session, rank, end), whatever the order of events:
sessions are known by a hash of pool and session id, and if there are too many the one that would end first goes,
which is the least lately used one as long as all keep their workers for the same time.

Most uses of a session only move its end. The heap of ends is therefore put right when it is looked at: every session
has an entry there that is no later than its end.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from struct import pack
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_MASK, pack_u64, unpack_u64
from forebay.events.snapshots import CHUNK_HASHES_MAX, Sessions

SESSIONS_MAX = 1 << 20  # bounds memory: a session takes some 300 bytes
CHUNK_SESSIONS = CHUNK_HASHES_MAX // 2
NEVER_US = 1 << 63


class Binding(NamedTuple):
    """Where a session is."""

    worker_id: str
    worker_epoch: int
    rank: int


@dataclass(slots=True, eq=False)
class _Place:
    """The sessions of one pool on one rank."""

    pool: str
    binding: Binding
    seed: int
    keys: set[int] = field(default_factory=set)


class Affinity:
    """The sessions of all pools."""

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._max = sessions_max
        self._places: dict[tuple[str, Binding], _Place] = {}
        self._bound: dict[int, tuple[_Place, int]] = {}
        self._ends: list[tuple[int, int]] = []
        self._next_us = NEVER_US
        self._sum = 0

    def __len__(self) -> int:
        """Sessions that are bound."""
        return len(self._bound)

    def bind(self, pool: str, session_id: str, binding: Binding, due_us: int) -> bool:
        """A request of a session was routed: the session is there until `due_us`, and nowhere else.

        Returns:
            Whether another session had to go, because there are too many.
        """
        key = session_key(pool, session_id)
        full = key not in self._bound and len(self._bound) >= self._max
        if full:
            self._drop(self._earliest()[1])
        self._put(key, self._place(pool, binding), due_us)
        return full

    def find(self, pool: str, session_id: str) -> Binding | None:
        """Where a session is; None if it is new or has ended. Call `expire` first."""
        found = self._bound.get(session_key(pool, session_id))
        return None if found is None else found[0].binding

    def expire(self, now_us: int) -> None:
        """Time has come to `now_us`: sessions that end then or before are forgotten."""
        if now_us < self._next_us:
            return
        while self._bound:
            due_us, key = self._earliest()
            if due_us > now_us:
                self._next_us = due_us
                return
            self._drop(key)
        self._next_us = NEVER_US

    def drop_worker(self, worker_id: str) -> None:
        """A worker is lost: its sessions are free to go elsewhere."""
        for name, place in list(self._places.items()):
            if place.binding.worker_id == worker_id:
                for key in list(place.keys):
                    self._drop(key)
                del self._places[name]

    def digest(self) -> int:
        """64 bits over all sessions."""
        return self._sum & U64_MASK

    def snapshot(self) -> Iterator[Sessions]:
        """Sessions by pool and rank; of one rank those first that end first."""
        for (pool, binding), place in sorted(self._places.items(), key=lambda item: item[0]):
            ends = sorted((self._bound[key][1], key) for key in place.keys)
            for start in range(0, len(ends), CHUNK_SESSIONS):
                part = ends[start : start + CHUNK_SESSIONS]
                yield Sessions(
                    pool=pool,
                    worker_id=binding.worker_id,
                    worker_epoch=binding.worker_epoch,
                    rank=binding.rank,
                    keys=pack_u64(key for _, key in part),
                    due_us=pack_u64(due_us for due_us, _ in part),
                )

    def restore(self, chunk: Sessions) -> None:
        """Take in one chunk of a snapshot."""
        place = self._place(chunk.pool, Binding(chunk.worker_id, chunk.worker_epoch, chunk.rank))
        for key, due_us in zip(unpack_u64(chunk.keys), unpack_u64(chunk.due_us), strict=True):
            self._put(key, place, due_us)

    def _place(self, pool: str, binding: Binding) -> _Place:
        place = self._places.get((pool, binding))
        if place is None:
            seed = xxh3_64_intdigest("\0".join((pool, *map(str, binding))).encode())
            place = self._places[pool, binding] = _Place(pool, binding, seed)
        return place

    def _put(self, key: int, place: _Place, due_us: int) -> None:
        known = self._bound.get(key)
        if known is not None:
            self._sum -= _term(key, *known)
            known[0].keys.discard(key)
        self._bound[key] = (place, due_us)
        place.keys.add(key)
        self._sum += _term(key, place, due_us)
        if known is None or due_us < known[1]:
            heappush(self._ends, (due_us, key))
            self._next_us = min(self._next_us, due_us)
            self._tidy()

    def _drop(self, key: int) -> None:
        place, due_us = self._bound.pop(key)
        place.keys.discard(key)
        self._sum -= _term(key, place, due_us)

    def _earliest(self) -> tuple[int, int]:
        """The end and the key of the session that ends first; there is one."""
        while True:
            due_us, key = self._ends[0]
            _, end_us = self._bound.get(key, (None, -1))
            if end_us == due_us:
                return due_us, key
            if end_us < due_us:
                heappop(self._ends)
            else:
                heapreplace(self._ends, (end_us, key))

    def _tidy(self) -> None:
        # Sessions that went early leave their ends behind: taking one out of the middle of a heap costs a walk.
        if len(self._ends) > 2 * len(self._bound) + 64:
            self._ends = [(due_us, key) for key, (_, due_us) in self._bound.items()]
            heapify(self._ends)


def session_key(pool: str, session_id: str) -> int:
    """What a session is known by."""
    return xxh3_64_intdigest(f"{pool}\0{session_id}".encode())


def _term(key: int, place: _Place, due_us: int) -> int:
    return xxh3_64_intdigest(pack("<QQ", key, due_us), place.seed)
