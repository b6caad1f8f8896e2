"""Session affinity: which worker rank serves each session.

A session is bound to the rank that got its first request. The binding ends some time after the last request, or when
the worker is lost. The state is a set of (session, rank, expiry), so it does not depend on the order of events. A
session is identified by a hash of pool and session id. If there are too many sessions, the one with the earliest expiry
is removed. That is the least recently used session, as long as all sessions have the same lifetime.

A heap orders the sessions by expiry. Most requests only extend the expiry of their session. To save time, its entry in
the heap then stays as it is, and is corrected when it comes to the top. So an entry is never later than the expiry.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from struct import pack
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_MASK, pack_u64, unpack_u64
from forebay.events.snapshots import CHUNK_HASHES_MAX, Sessions

SESSIONS_MAX = 1 << 20  # bounds memory: a session takes about 300 bytes
CHUNK_SESSIONS = CHUNK_HASHES_MAX // 2
NEVER_US = 1 << 63


class Binding(NamedTuple):
    """Worker rank that serves a session, in one epoch of the worker."""

    worker_id: str
    worker_epoch: int
    rank: int


@dataclass(slots=True, eq=False)
class _Place:
    """Sessions of one pool that one rank serves."""

    pool: str
    binding: Binding
    seed: int
    keys: set[int] = field(default_factory=set)


class SessionAffinity:
    """Map from each session, in all pools, to the worker rank that serves it until the session expires."""

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._max = sessions_max
        self._places: dict[tuple[str, Binding], _Place] = {}
        self._bound: dict[int, tuple[_Place, int]] = {}
        self._ends: list[tuple[int, int]] = []
        self._next_us = NEVER_US
        self._sum = 0

    def __len__(self) -> int:
        return len(self._bound)

    def bind(self, pool: str, session_id: str, binding: Binding, due_us: int) -> bool:
        """Let a worker rank serve a session until `due_us`. This replaces an earlier binding of the session.

        Return whether another session was removed to stay within the maximum number of sessions.
        """
        key = session_key(pool, session_id)
        full = key not in self._bound and len(self._bound) >= self._max
        if full:
            self._drop(self._earliest()[1])
        self._put(key, self._place(pool, binding), due_us)
        return full

    def find(self, pool: str, session_id: str) -> Binding | None:
        """Return the rank that serves a session, or None if the session is new or expired. Call `expire` first."""
        found = self._bound.get(session_key(pool, session_id))
        return None if found is None else found[0].binding

    def expire(self, now_us: int) -> None:
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
        """Remove the sessions of a lost worker, so that other ranks can serve them."""
        for name, place in list(self._places.items()):
            if place.binding.worker_id == worker_id:
                for key in list(place.keys):
                    self._drop(key)
                del self._places[name]

    def digest(self) -> int:
        return self._sum & U64_MASK

    def snapshot(self) -> Iterator[Sessions]:
        """Yield all sessions as snapshot parts: by pool and rank, and within a rank in order of expiry."""
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
        # Removed sessions leave heap entries behind, because removing from the middle of a heap takes linear time.
        if len(self._ends) > 2 * len(self._bound) + 64:
            self._ends = [(due_us, key) for key, (_, due_us) in self._bound.items()]
            heapify(self._ends)


def session_key(pool: str, session_id: str) -> int:
    """Return the 64-bit hash that identifies a session of a pool."""
    return xxh3_64_intdigest(f"{pool}\0{session_id}".encode())


def _term(key: int, place: _Place, due_us: int) -> int:
    return xxh3_64_intdigest(pack("<QQ", key, due_us), place.seed)
