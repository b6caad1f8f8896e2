"""Load of each worker rank: what its routed requests add, and what the rank reports itself.

A request is booked when it is routed: its uncached prompt tokens until its first token; its blocks and the request
itself until it ends (Dynamo's active sequences). A sequence hash identifies a whole prefix, so the prompts in flight
form one tree. A node is a sequence of blocks that the same requests use. Each node counts its requests per rank, so
blocks that several requests of a rank share count once. Booking and freeing touch the nodes of one path, never single
blocks. The tree depends only on the set of bookings, not on their order.

A request that has generated most of its expected output will end soon. The blocks that no other request on its rank
uses count only for the share of output still to come. These weights are whole units of 1/65536 block, so their sums do
not depend on the order of additions.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import ne
from typing import assert_never

from msgspec import convert
from msgspec.structs import astuple

from forebay.core.state.block_sets import as_block_array
from forebay.core.state.holder_bits import HolderKey
from forebay.core.state.rank_load import (
    BLOCK_UNITS,
    NO_RATES,
    TIGHT_SHARE,
    TURNOVER_STEPS,
    UNKNOWN_BLOCKS,
    LoadColumns,
    RankLoad,
    rates_of,
)
from forebay.core.state_machine import digest_of, plain
from forebay.events.base import U64_BYTES, U64_MASK, pack_u64, unpack_u64
from forebay.events.kv import LowerTier
from forebay.events.metrics import LoadReported, TierCosts
from forebay.events.snapshots import Booking, ComputedTokens, MeasuredCosts, Reported

_ONE = 1 << 64  # one request in a node's counter; the bits below hold the sum of the requests' tickets


@dataclass(slots=True, eq=False)
class _Node:
    """Consecutive blocks that the same requests hold.

    `references` counts these requests per rank, and adds the sum of their tickets. A count of one therefore identifies
    the request. `slots` is a mask of the slots of these ranks in the columns.
    """

    blocks: "array[int]"
    parent: "_Node | None" = None
    children: "dict[int, _Node]" = field(default_factory=dict)
    references: dict[HolderKey, int] = field(default_factory=dict)
    requests: int = 0
    slots: int = 0


@dataclass(slots=True, eq=False)
class _ActiveBooking:
    """Booking of one request on a rank.

    `own` is the number of blocks that no other request of the rank holds, `weight` their weight in 1/65536.
    """

    request_id: str
    key: HolderKey
    rank: RankLoad
    ticket: int
    prefill_tokens: int
    packed: bytes  # its blocks, packed for snapshots
    prompt_tokens: int
    reuse: bool
    expected_output_tokens: int
    leaf: _Node
    output_tokens: int = 0
    own: int = 0
    weight: int = BLOCK_UNITS
    term: int = 0  # its current contribution to the digest


class FleetLoad:
    """Booked and reported load of every worker rank in the fleet.

    A booking ends when its request ends or leaves the rank. Every request has a deadline, so bookings need no expiry of
    their own. `tight` has the ranks with less than a quarter of their cache free; a copy from the prefix index.
    """

    def __init__(self) -> None:
        self.tight: set[HolderKey] = set()
        self._columns = LoadColumns()
        self._ranks: dict[HolderKey, RankLoad] = {}
        self._booked: dict[str, _ActiveBooking] = {}
        self._tickets: dict[int, _ActiveBooking] = {}
        self._last_ticket = 0
        self._root = _Node(array("Q"))
        self._sum = 0

    def add_rank(
        self, worker_id: str, rank: int, block_size: int, kv_blocks: int = UNKNOWN_BLOCKS, now_us: int = 0
    ) -> RankLoad:
        """Add a rank without requests. `kv_blocks` is `UNKNOWN_BLOCKS` if its worker sends no KV events."""
        key = (worker_id, rank)
        assert key not in self._ranks
        # Starting at zero, a new rank would win every tie until its total caught up with the others.
        fewest = min((other.computed_tokens for other in self._ranks.values()), default=0)
        load = RankLoad(worker_id, rank, block_size, kv_blocks=kv_blocks)
        self._compute(load, fewest)
        self._set_turnover(load, (now_us,))
        load.enter(self._columns)
        self._ranks = dict(sorted([*self._ranks.items(), (key, load)], key=lambda item: item[0]))
        return load

    def drop_rank(self, worker_id: str, rank: int) -> None:
        """Remove a rank. The caller must have freed all its requests."""
        gone = self._ranks[worker_id, rank]
        assert not gone.active_requests, "free the requests of a rank first"
        del self._ranks[worker_id, rank]
        self.tight.discard((worker_id, rank))
        self._sum -= gone.reported_term + gone.turnover_term + _costs_term(gone)
        self._compute(gone, -gone.computed_tokens)
        self._columns.free_slot(gone.slot)

    def rank_load(self, worker_id: str, rank: int) -> RankLoad:
        """Return the load of one worker rank. Raises KeyError if the rank is unknown."""
        return self._ranks[worker_id, rank]

    def ranks(self) -> list[RankLoad]:
        return list(self._ranks.values())

    def book(
        self,
        request_id: str,
        key: HolderKey,
        *,
        prefill_tokens: int,
        blocks: Sequence[int],
        prompt_tokens: int = 0,
        reuse: bool = True,
        expected_output_tokens: int = 0,
        now_us: int = 0,
    ) -> None:
        """Add a routed request to the load of a rank that was added before.

        Args:
            prefill_tokens: prompt tokens that are not in the rank's cache.
            blocks: sequence hashes of the prompt from the first on; empty if active blocks are not tracked.
            prompt_tokens: length of the prompt, to compute the blocks that output needs.
            reuse: whether the request shares prompt blocks with other requests of the rank. Otherwise each of its
                blocks counts, and `active_depths` does not find them.
            expected_output_tokens: expected length of the response; 0 if unknown.
        """
        assert request_id not in self._booked, "a request has one booking"
        rank = self._ranks[key]
        self._last_ticket += 1
        booked = _ActiveBooking(
            request_id,
            key,
            rank,
            self._last_ticket,
            prefill_tokens,
            pack_u64(blocks),
            prompt_tokens,
            reuse,
            expected_output_tokens,
            self._root,
        )
        self._booked[request_id] = booked
        self._tickets[booked.ticket] = booked
        rank.prefill_tokens += prefill_tokens
        rank.active_requests += 1
        before = rank.turnovers
        self._compute(rank, prefill_tokens)
        if steps := rank.turnovers - before:
            times = (now_us,) * min(steps, TURNOVER_STEPS + 1)
            self._set_turnover(rank, (*rank.turnover_us, *times)[-TURNOVER_STEPS - 1 :])
        if reuse:
            self._hold(booked, as_block_array(blocks))
        else:
            booked.own = len(blocks)
        _weigh(rank, booked.own * BLOCK_UNITS)
        self._sum_up(booked)

    def prefill_done(self, request_id: str) -> None:
        """Remove the prompt tokens of a request from the load of its rank, because the first token was generated."""
        booked = self._booked[request_id]
        booked.rank.prefill_tokens -= booked.prefill_tokens
        booked.prefill_tokens = 0
        self._sum_up(booked)

    def grow(self, request_id: str, output_tokens: int) -> None:
        """Set the number of output tokens of a request. A number that is not higher than the last one has no effect.

        The output adds ceil((prompt + output) / block size) - ceil(prompt / block size) blocks, which no other request
        shares. If the request has an expected length, all blocks that no other request on its rank uses are weighted by
        max(0, 1 - output / expected). Source: Dynamo's sequence tracking (output blocks, fractional blocks).
        """
        booked = self._booked[request_id]
        if output_tokens <= booked.output_tokens:
            return
        before = booked.own * booked.weight
        size, prompt = booked.rank.block_size, booked.prompt_tokens
        booked.own += -(-(prompt + output_tokens) // size) + -(prompt + booked.output_tokens) // size
        booked.output_tokens = output_tokens
        expected = booked.expected_output_tokens
        if expected:
            booked.weight = BLOCK_UNITS * max(0, expected - output_tokens) // expected
        _weigh(booked.rank, booked.own * booked.weight - before)
        self._sum_up(booked)

    def free(self, request_id: str) -> None:
        """Remove a request from the load of its rank, because it ended or left the rank."""
        booked = self._booked.pop(request_id)
        self._sum -= booked.term
        rank = booked.rank
        rank.prefill_tokens -= booked.prefill_tokens
        rank.active_requests -= 1
        _weigh(rank, -booked.own * booked.weight)
        self._release(booked)
        rank.publish()
        del self._tickets[booked.ticket]

    def report(self, event: LoadReported) -> None:
        """Replace the load report of a rank by a newer one. The caller must have checked that the rank is known."""
        self._take_report(convert(event, Reported, from_attributes=True))

    def set_cached(self, key: HolderKey, blocks: int, next_tier: LowerTier | None) -> None:
        """Copy `PrefixIndex.cached` of a rank, so that costs can read it with the load. The caller must know the rank.

        The copy is not part of the digest and of snapshots, because the index is.
        """
        load = self._ranks[key]
        load.cached_blocks, load.next_tier = blocks, next_tier
        free = load.kv_blocks - blocks
        load.free_blocks = free if free >= 0 else UNKNOWN_BLOCKS
        load.publish()
        if TIGHT_SHARE * load.free_blocks < load.kv_blocks:
            self.tight.add(key)
        else:
            self.tight.discard(key)

    def measure(self, worker_id: str, rank: int, costs: TierCosts) -> None:
        """Replace the measured costs of a rank by newer ones. The caller must have checked that the rank is known."""
        self._set_costs(self._ranks[worker_id, rank], costs)

    def active_depths(self, query: Sequence[int]) -> list[tuple[int, int]]:
        """Return masks of slots in the columns, and how many leading blocks of a prompt requests in flight there use.

        Later masks are parts of earlier ones, and have higher numbers. Slots in none of them use no block.
        """
        wanted = as_block_array(query)
        depths: list[tuple[int, int]] = []
        node, at = self._root, 0
        while at < len(wanted):
            child = node.children.get(wanted[at])
            if child is None:
                break
            same = _common(child.blocks, wanted, at)
            at += same
            if child.slots == node.slots:
                depths[-1] = (child.slots, at)
            else:
                depths.append((child.slots, at))
            node = child
            if same < len(child.blocks):
                break
        return depths

    def count_nodes(self) -> int:
        """Return the number of nodes in the tree of active prefixes: at most two per booked request."""
        found, pending = 0, [self._root]
        while pending:
            children = pending.pop().children.values()
            found += len(children)
            pending += children
        return found

    def digest(self) -> int:
        return self._sum & U64_MASK

    def snapshot(self) -> Iterator[Booking | ComputedTokens | MeasuredCosts | Reported]:
        """Yield reports and measured costs by rank, then bookings in the order made, then computed tokens by rank."""
        for rank in self._ranks.values():
            if rank.reported is not None:
                yield rank.reported
            if rank.costs is not None:
                yield MeasuredCosts(worker_id=rank.worker_id, rank=rank.rank, costs=rank.costs)
        for booked in self._booked.values():
            worker_id, number = booked.key
            yield Booking(
                request_id=booked.request_id,
                worker_id=worker_id,
                rank=number,
                prefill_tokens=booked.prefill_tokens,
                sequence_hashes=booked.packed,
                prompt_tokens=booked.prompt_tokens,
                reuse=booked.reuse,
                output_tokens=booked.output_tokens,
                expected_output_tokens=booked.expected_output_tokens,
            )
        for rank in self._ranks.values():
            yield ComputedTokens(
                worker_id=rank.worker_id,
                rank=rank.rank,
                tokens=rank.computed_tokens,
                turnover_us=rank.turnover_us,
            )

    def restore(self, chunk: Booking | ComputedTokens | MeasuredCosts | Reported) -> None:
        match chunk:
            case Booking():
                self.book(
                    chunk.request_id,
                    (chunk.worker_id, chunk.rank),
                    prefill_tokens=chunk.prefill_tokens,
                    blocks=unpack_u64(chunk.sequence_hashes),
                    prompt_tokens=chunk.prompt_tokens,
                    reuse=chunk.reuse,
                    expected_output_tokens=chunk.expected_output_tokens,
                )
                self.grow(chunk.request_id, chunk.output_tokens)
            case Reported():
                self._take_report(chunk)
            case MeasuredCosts():
                self.measure(chunk.worker_id, chunk.rank, chunk.costs)
            case ComputedTokens():
                rank = self._ranks[chunk.worker_id, chunk.rank]
                self._compute(rank, chunk.tokens - rank.computed_tokens)
                self._set_turnover(rank, chunk.turnover_us or (0,))
                rank.publish()
            case _:
                assert_never(chunk)

    def _set_costs(self, rank: RankLoad, costs: TierCosts | None) -> None:
        self._sum -= _costs_term(rank)
        rank.costs, rank.rates = costs, NO_RATES if costs is None else rates_of(costs)
        self._sum += _costs_term(rank)

    def _compute(self, rank: RankLoad, tokens: int) -> None:
        rank.computed_tokens += tokens
        self._sum += rank.salt * tokens

    def _set_turnover(self, rank: RankLoad, times_us: tuple[int, ...]) -> None:
        term = 0 if times_us == (0,) else digest_of(rank.worker_id, rank.rank, "turnover", times_us)
        self._sum += term - rank.turnover_term
        rank.turnover_us, rank.turnover_term = times_us, term

    def _take_report(self, reported: Reported) -> None:
        rank = self._ranks[reported.worker_id, reported.rank]
        term = digest_of(*astuple(reported))
        self._sum += term - rank.reported_term
        rank.reported, rank.reported_term = reported, term
        rank.publish()

    def _sum_up(self, booked: _ActiveBooking) -> None:
        term = _booking_term(booked)
        self._sum += term - booked.term
        booked.term = term
        booked.rank.publish()

    def _hold(self, booked: _ActiveBooking, blocks: "array[int]") -> None:
        """Add a request to the nodes of its prompt, splitting the node that it matches partly."""
        node, at = self._root, 0
        while at < len(blocks):
            child = node.children.get(blocks[at])
            if child is None:
                child = _Node(blocks[at:], node)
                node.children[blocks[at]] = child
            else:
                same = _common(child.blocks, blocks, at)
                if same < len(child.blocks):
                    child = _split(child, same)
            self._refer(child, booked)
            at += len(child.blocks)
            node = child
        booked.leaf = node

    def _refer(self, node: _Node, booked: _ActiveBooking) -> None:
        count_before = node.references.get(booked.key, 0)
        size = len(node.blocks)
        if not count_before:
            node.slots |= 1 << booked.rank.slot
            booked.own += size
        elif count_before < 2 * _ONE:
            # The only request of the node shares it now, so its blocks count in full.
            owner = self._tickets[count_before - _ONE]
            owner.own -= size
            _weigh(booked.rank, size * (BLOCK_UNITS - owner.weight))
        node.references[booked.key] = count_before + _ONE + booked.ticket
        node.requests += 1

    def _unrefer(self, node: _Node, booked: _ActiveBooking) -> None:
        count_left = node.references[booked.key] - _ONE - booked.ticket
        node.requests -= 1
        if not count_left:
            node.slots ^= 1 << booked.rank.slot
            del node.references[booked.key]
            return
        node.references[booked.key] = count_left
        if count_left < 2 * _ONE:
            owner = self._tickets[count_left - _ONE]
            owner.own += len(node.blocks)
            _weigh(booked.rank, len(node.blocks) * (owner.weight - BLOCK_UNITS))

    def _release(self, booked: _ActiveBooking) -> None:
        """Remove a request from the nodes of its prompt, joining nodes that only it kept separate."""
        node = booked.leaf
        while node.parent is not None:
            parent = node.parent
            self._unrefer(node, booked)
            if not node.requests:
                del parent.children[node.blocks[0]]
            elif len(node.children) == 1:
                _join(node)
            node = parent


def _common(edge: "array[int]", query: "array[int]", at: int) -> int:
    part = query[at : at + len(edge)]
    if part == edge:
        return len(edge)
    return next(compress(count(), map(ne, edge, part)), len(part))


def _split(node: _Node, size: int) -> _Node:
    upper = _Node(node.blocks[:size], node.parent, {}, dict(node.references), node.requests, node.slots)
    assert node.parent is not None
    node.parent.children[upper.blocks[0]] = upper
    node.blocks = node.blocks[size:]
    node.parent = upper
    upper.children[node.blocks[0]] = node
    return upper


def _join(node: _Node) -> None:
    """Merge a node with its only child if the same requests hold both."""
    (child,) = node.children.values()
    if child.requests < node.requests:
        return
    # Keep the child object: requests that end at the child refer to it, and no request ends at `node`.
    assert node.parent is not None
    child.blocks = node.blocks + child.blocks
    child.parent = node.parent
    node.parent.children[child.blocks[0]] = child


def _weigh(rank: RankLoad, units: int) -> None:
    rank.units += units
    rank.decode_blocks = rank.units / BLOCK_UNITS


def _costs_term(rank: RankLoad) -> int:
    return 0 if rank.costs is None else digest_of(rank.worker_id, rank.rank, "costs", plain(rank.costs))


def _booking_term(booked: _ActiveBooking) -> int:
    worker_id, rank = booked.key
    return digest_of(
        booked.request_id,
        worker_id,
        rank,
        booked.prefill_tokens,
        len(booked.packed),
        booked.packed[-U64_BYTES:],  # the last sequence hash covers all blocks
        booked.prompt_tokens,
        booked.reuse,
        booked.output_tokens,
        booked.expected_output_tokens,
    )
