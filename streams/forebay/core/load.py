"""What each worker rank has to do: the load that routed requests put on it, and what it reports itself.

Theory of operation. A routed request is booked at once: its uncached prompt tokens until its first
token, its prompt blocks and its place until it ends (Dynamo's active sequences). Blocks that several
requests of one rank share count once, by sequence hash. Prompts hold their blocks from the first on, so the
blocks of a new request that are active already are a prefix of it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

from xxhash import xxh3_64_intdigest

from forebay.core.block_sets import BlockSets, bits_of
from forebay.events.base import U64_MASK, pack_u64, unpack_u64
from forebay.events.metrics import LoadReported
from forebay.events.snapshots import Booking, Reported

HolderKey = tuple[str, int]


class RankLoad(NamedTuple):
    """What one rank has to do now, and what a new request would add."""

    prefill_tokens: int
    decode_blocks: int
    active_requests: int
    new_blocks: int


@dataclass(slots=True)
class _Rank:
    bit: int
    prefill_tokens: int = 0
    references: Counter[int] = field(default_factory=Counter)
    requests: int = 0
    reported: Reported | None = None


@dataclass(slots=True)
class _Booked:
    key: HolderKey
    prefill_tokens: int
    blocks: list[int]


class Load:
    """Booked and reported load of every admitted rank."""

    def __init__(self) -> None:
        self._ranks: dict[HolderKey, _Rank] = {}
        self._keys: dict[int, HolderKey] = {}
        self._booked: dict[str, _Booked] = {}
        self._active = BlockSets()
        self._live = 0
        self._sum = 0

    def add_rank(self, worker_id: str, rank: int) -> None:
        """Admit a rank with nothing to do."""
        assert (worker_id, rank) not in self._ranks
        bit = ~self._live & (self._live + 1)
        self._live |= bit
        self._ranks[worker_id, rank] = _Rank(bit)
        self._keys[bit] = (worker_id, rank)

    def drop_rank(self, worker_id: str, rank: int) -> None:
        """A rank is gone; its requests must have been freed before."""
        gone = self._ranks.pop((worker_id, rank))
        assert not gone.requests, "free the requests of a rank first"
        self._active.retire(gone.bit)
        del self._keys[gone.bit]
        self._live ^= gone.bit
        self._sum -= _reported_term(gone.reported)

    def book(self, request_id: str, key: HolderKey, prefill_tokens: int, blocks: list[int]) -> None:
        """Put a routed request on a rank; `prefill_tokens` are the prompt tokens not in its cache."""
        assert request_id not in self._booked, "a request has one booking"
        rank = self._ranks[key]
        booked = _Booked(key, prefill_tokens, blocks)
        self._booked[request_id] = booked
        rank.prefill_tokens += prefill_tokens
        rank.requests += 1
        rank.references.update(blocks)
        self._active.add(rank.bit, blocks)
        self._sum += _booking_term(request_id, booked)

    def prefill_done(self, request_id: str) -> None:
        """The first token is out: the prompt is no load any more."""
        booked = self._booked[request_id]
        self._sum -= _booking_term(request_id, booked)
        self._ranks[booked.key].prefill_tokens -= booked.prefill_tokens
        booked.prefill_tokens = 0
        self._sum += _booking_term(request_id, booked)

    def free(self, request_id: str) -> None:
        """The request ended or left its rank."""
        booked = self._booked.pop(request_id)
        self._sum -= _booking_term(request_id, booked)
        rank = self._ranks[booked.key]
        rank.prefill_tokens -= booked.prefill_tokens
        rank.requests -= 1
        references = rank.references
        gone = []
        for block in booked.blocks:
            left = references[block] - 1
            if left:
                references[block] = left
            else:
                del references[block]
                gone.append(block)
        self._active.remove(rank.bit, gone)

    def report(self, event: LoadReported) -> None:
        """The newest report of a rank replaces the one before. Unknown ranks are left out by the world."""
        rank = self._ranks[event.worker_id, event.rank]
        self._sum -= _reported_term(rank.reported)
        rank.reported = Reported(
            worker_id=event.worker_id,
            rank=event.rank,
            running=event.running,
            waiting=event.waiting,
            kv_blocks_used=event.kv_blocks_used,
            kv_blocks_total=event.kv_blocks_total,
        )
        self._sum += _reported_term(rank.reported)

    def loads(self, query: Sequence[int]) -> dict[HolderKey, RankLoad]:
        """Every rank's load, and how many blocks of `query` are not active there yet."""
        active: dict[HolderKey, int] = {}
        if query and self._live:
            for depth, mask in self._active.drops(query, self._live):
                if depth:
                    for bit in bits_of(mask):
                        active[self._keys[bit]] = depth
        wanted = len(query)
        return {
            key: RankLoad(rank.prefill_tokens, len(rank.references), rank.requests, wanted - active.get(key, 0))
            for key, rank in self._ranks.items()
        }

    def reported(self, key: HolderKey) -> Reported | None:
        """The newest load report of a rank. Raises KeyError for an unknown one."""
        return self._ranks[key].reported

    def digest(self) -> int:
        """64 bits over all bookings and reports."""
        return self._sum & U64_MASK

    def snapshot(self) -> Iterator[Booking | Reported]:
        """Reports by rank, then bookings in the order in which they were made."""
        for _, rank in sorted(self._ranks.items(), key=lambda item: item[0]):
            if rank.reported is not None:
                yield rank.reported
        for request_id, booked in self._booked.items():
            worker_id, number = booked.key
            yield Booking(
                request_id=request_id,
                worker_id=worker_id,
                rank=number,
                prefill_tokens=booked.prefill_tokens,
                sequence_hashes=pack_u64(booked.blocks),
            )

    def restore(self, chunk: Booking | Reported) -> None:
        """Take in one chunk of a snapshot; the ranks were admitted before."""
        match chunk:
            case Booking():
                blocks = unpack_u64(chunk.sequence_hashes)
                self.book(chunk.request_id, (chunk.worker_id, chunk.rank), chunk.prefill_tokens, blocks)
            case Reported():
                self._ranks[chunk.worker_id, chunk.rank].reported = chunk
                self._sum += _reported_term(chunk)
            case _:
                assert_never(chunk)


def _booking_term(request_id: str, booked: _Booked) -> int:
    worker_id, rank = booked.key
    text = f"{request_id}\0{worker_id}\0{rank}\0{booked.prefill_tokens}\0{len(booked.blocks)}"
    return xxh3_64_intdigest(text.encode(), booked.blocks[-1] if booked.blocks else 0)


def _reported_term(reported: Reported | None) -> int:
    return xxh3_64_intdigest(repr(reported).encode()) if reported else 0
