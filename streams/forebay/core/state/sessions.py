"""Session affinity: which worker rank each session stays on.

A session is bound to the rank of its first request. The binding lasts until some time after the last request, or until
the worker is lost. The state is a set of (session, rank, expiry), independent of event order. Sessions are identified
by a hash of pool and session id. If there are too many, the session with the earliest expiry is removed. That is the
least recently used session, as long as all sessions have the same lifetime.

Most uses of a session only extend its expiry. The heap is therefore corrected on access: every session has an entry in
it that is not later than its expiry.
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
    """Worker rank, in one worker epoch, that a session is bound to."""

    worker_id: str
    worker_epoch: int
    rank: int


@dataclass(slots=True, eq=False)
class _Place:
    """Sessions of one pool that are bound to one rank."""

    pool: str
    binding: Binding
    seed: int
    keys: set[int] = field(default_factory=set)


class SessionAffinity:
    """Sessions of all pools."""

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._max = sessions_max
        self._places: dict[tuple[str, Binding], _Place] = {}
        self._bound: dict[int, tuple[_Place, int]] = {}
        self._ends: list[tuple[int, int]] = []
        self._next_us = NEVER_US
        self._sum = 0

    def __len__(self) -> int:
        """Return the number of bound sessions."""
        return len(self._bound)

    def bind(self, pool: str, session_id: str, binding: Binding, due_us: int) -> bool:
        """Bind a session to a rank until `due_us`, replacing an earlier binding.

        Returns:
            Whether another session was removed to stay within the limit.
        """
        key = session_key(pool, session_id)
        full = key not in self._bound and len(self._bound) >= self._max
        if full:
            self._drop(self._earliest()[1])
        self._put(key, self._place(pool, binding), due_us)
        return full

    def find(self, pool: str, session_id: str) -> Binding | None:
        """Return the rank a session is bound to, or None if it is new or expired. Call `expire` first."""
        found = self._bound.get(session_key(pool, session_id))
        return None if found is None else found[0].binding

    def expire(self, now_us: int) -> None:
        """Remove sessions that expire at or before `now_us`."""
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
        """Remove the sessions of a lost worker, so that they can be bound elsewhere."""
        for name, place in list(self._places.items()):
            if place.binding.worker_id == worker_id:
                for key in list(place.keys):
                    self._drop(key)
                del self._places[name]

    def digest(self) -> int:
        """Return a 64-bit digest over all sessions."""
        return self._sum & U64_MASK

    def snapshot(self) -> Iterator[Sessions]:
        """Yield sessions by pool and rank, per rank in order of expiry."""
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
        """Apply one chunk of a snapshot."""
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
        """Return the expiry and the key of the session that expires first; there must be one."""
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
    """Return the hash that identifies a session."""
    return xxh3_64_intdigest(f"{pool}\0{session_id}".encode())


def _term(key: int, place: _Place, due_us: int) -> int:
    return xxh3_64_intdigest(pack("<QQ", key, due_us), place.seed)
