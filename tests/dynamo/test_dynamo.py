"""Compare Dynamo with the core: block hashes, overlaps, and sequences of routing decisions.

Dynamo breaks ties randomly, so its choice must be among our cheapest workers, and our router then uses that choice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.block_hashes import block_hashes, extend_chain, hash_seed, sequence_hashes
from forebay.core.state.prefix_index import PrefixIndex
from forebay.events.base import pack_u32, pack_u64, unpack_u64
from forebay.events.decisions import RequestRouted, RouteAnswered
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared
from forebay.events.progress import FirstTokenEmitted, OutputGrown, RequestFinished
from forebay.events.requests import RoutingHints
from tests.core.worlds import BLOCK, Driver, query, request
from tests.depth import examples
from tests.dynamo.conftest import Dynamo, dynamo_with

NUMBERS = count()
WORKERS = 3

# `track_active_blocks` is left out, because Dynamo's service counts active blocks with and without it.
CONFIGS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    (
        {"overlap_score_credit": 0.5, "prefill_load_scale": 2.0, "decode_active_request_weight": 1.5},
        {
            "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "0.5",
            "DYN_ROUTER_PREFILL_LOAD_SCALE": "2.0",
            "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT": "1.5",
        },
    ),
    ({"overlap_score_credit_decay": 1.0}, {"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": "1.0"}),
    ({"assume_kv_reuse": False}, {"DYN_ROUTER_ASSUME_KV_REUSE": "false"}),
    ({"track_prefill_tokens": False}, {"DYN_ROUTER_TRACK_PREFILL_TOKENS": "false"}),
]


@pytest.fixture(scope="module")
def dynamo() -> Iterator[Dynamo]:
    with dynamo_with() as peer:
        yield peer


names = st.text(max_size=8)


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=40), st.integers(1, 9), names, names, st.data())
def test_block_hashes_equal_those_of_dynamo(
    dynamo: Dynamo, tokens: list[int], block_size: int, lora_name: str, tenant: str, data: st.DataObject
) -> None:
    blocks = len(tokens) // block_size
    drawn = st.dictionaries(st.integers(0, blocks - 1), st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=3))
    objects = data.draw(drawn) if blocks else {}
    objects_per_block = [
        {"mm_objects": [{"mm_hash": name, "offsets": []} for name in objects[at]]} if at in objects else None
        for at in range(blocks)
    ]
    theirs = dynamo(
        "hashes", tokens, block_size, objects_per_block if objects else None, lora_name or None, tenant or None
    )
    assert block_hashes(pack_u32(tokens), block_size, hash_seed(lora_name, tenant), objects) == theirs


# The index. Blocks leave a cache from the end, as in an engine. If Dynamo removes a block, it forgets the blocks below,
# even when the removed block is stored again; forebay counts those blocks again (docs/divergence.md).

SHARED = [1, 2, 3, 4]
FAMILIES = ([*SHARED, 5, 6, 7, 8], [*SHARED, 15, 16, 17, 18], [21, 22, 23, 24, 25, 26, 27, 28])
CHAINS = [extend_chain(None, blocks) for blocks in FAMILIES]

changes = st.tuples(
    st.sampled_from(["store"] * 4 + ["remove"] * 2 + ["clear"]),
    st.integers(1, WORKERS),
    st.integers(0, len(FAMILIES) - 1),
    st.integers(0, 8),
)


class BothIndexes:
    """Dynamo's index and the core's index, fed with the same KV events."""

    def __init__(self, dynamo: Dynamo) -> None:
        self.index = PrefixIndex()
        self._dynamo = dynamo
        self._held: dict[int, set[int]] = {}
        self._seq: dict[int, int] = {}
        dynamo("new_tree")
        for worker in range(1, WORKERS + 1):
            self._held[worker] = set()
            self._seq[worker] = 0
            self.index.add_holder(str(worker), 0, 1)

    def change(self, kind: str, worker: int, family: int, depth: int) -> None:
        """Store a prefix of `depth` blocks, remove the blocks below `depth`, or clear the cache."""
        chain, held = CHAINS[family], self._held[worker]
        have = next((at for at, block in enumerate(chain) if block not in held), len(chain))
        if kind == "clear":
            held.clear()
            self._apply(worker, "cleared", CacheCleared)
        elif kind == "store" and have < depth:
            new = chain[have:depth]
            held.update(new)
            parent = chain[have - 1] if have else None
            pairs = zip(new, FAMILIES[family][have:depth], strict=True)
            blocks = [{"block_hash": block, "tokens_hash": tokens} for block, tokens in pairs]
            data: Any = {"stored": {"parent_hash": parent, "blocks": blocks}}
            self._apply(worker, data, BlocksStored, sequence_hashes=pack_u64(new), parent_hash=parent)
        elif kind == "remove" and depth < have:
            sibling = next((other for other in CHAINS if other != chain and other[0] == chain[0]), [])
            kept = len(SHARED) if held.intersection(sibling[len(SHARED) :]) else 0
            removed = chain[max(depth, kept) : have][::-1]
            held.difference_update(removed)
            if removed:
                data = {"removed": {"block_hashes": removed}}
                self._apply(worker, data, BlocksRemoved, sequence_hashes=pack_u64(removed))

    def _apply(self, worker: int, data: Any, kind: Any, **fields: Any) -> None:
        self._seq[worker] += 1
        self._dynamo("apply", worker, {"event_id": self._seq[worker], "data": data, "dp_rank": 0})
        self.index.apply(kind(worker_id=str(worker), worker_epoch=1, seq=self._seq[worker], **fields))


@given(st.lists(changes, max_size=30))
def test_overlaps_equal_those_of_dynamo(dynamo: Dynamo, history: list[tuple[str, int, int, int]]) -> None:
    both = BothIndexes(dynamo)
    for change in history:
        both.change(*change)
        for blocks, chain in zip(FAMILIES, CHAINS, strict=True):
            theirs = {(str(worker), 0): depth for worker, depth in dynamo("matches", blocks)}
            assert {key: overlap.device for key, overlap in both.index.overlaps(chain).items()} == theirs


# Decisions

actions = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2), st.integers(0, 9), st.integers(0, 6)),
    st.tuples(st.sampled_from(["first", "grow", "end"]), st.integers(0, 9), st.just(0), st.just(0)),
)


@dataclass
class _Running:
    """A routed request: `room` tokens are free in the last prompt block, and its output began `blocks` blocks."""

    name: str
    routed: RequestRouted
    room: int
    blocks: int = 0
    began: bool = False


class Routers:
    """Dynamo's router and the core's, fed with the same requests. Without KV events, routed prompts count as cached."""

    def __init__(self, dynamo: Dynamo, config: dict[str, Any]) -> None:
        self._dynamo = dynamo
        number = next(NUMBERS)
        self._model = f"m{number}"
        self._names = {number * WORKERS + at + 1: f"w{at}" for at in range(WORKERS)}
        self._drive = Driver().fleet(*self._names.values(), use_kv_events=False, track_output_blocks=True, **config)
        self._reuse = config.get("assume_kv_reuse", True)
        self._count = 0
        self._running: list[_Running] = []
        for worker in self._names:
            described = {"block_size": BLOCK, "data_parallel_size": 1, "total_kv_blocks": 64}
            place = {"endpoint": f"http://127.0.0.1:{worker}", "max_num_batched_tokens": 64}
            dynamo("worker", {"worker_id": worker, "model_name": self._model, **described, **place})
        dynamo("until_scheduled", self._model, WORKERS)

    def end(self) -> None:
        """Remove the workers from Dynamo."""
        for worker in self._names:
            self._dynamo("service", "delete_worker", worker)

    def route(self, family: int, blocks: int, tail: int) -> None:
        """Route a request in both, and compare the costs and the selected worker."""
        self._count += 1
        name = f"{self._model}-{self._count}"
        tokens = [family * 1_000 + at for at in range(blocks * BLOCK)] + [10_000 + self._count] * tail
        if not tokens:
            return
        hashes = sequence_hashes(pack_u32(tokens), BLOCK)
        body = {"model_name": self._model, "token_ids": tokens}
        scores = {
            self._names[one["worker_id"]]: one for one in self._dynamo("service", "overlap_scores", body)["workers"]
        }
        loads = {self._names[one["worker_id"]]: one for one in self._dynamo("service", "potential_loads", body)}
        chosen = self._dynamo("service", "select_and_reserve", {**body, "selection_id": name})
        if self._reuse:
            assert [block % (1 << 64) for block in chosen["sequence_hashes"]] == list(unpack_u64(hashes))
        (response,) = self._drive("requests", query("q" + name, unpack_u64(hashes), prompt_tokens=len(tokens)))
        assert isinstance(response, RouteAnswered)
        costs = {one.worker_id: one.terms for one in response.candidates}
        for worker, terms in costs.items():
            assert terms.device_overlap == scores[worker]["device_blocks"]
            assert terms.decode_blocks == loads[worker]["potential_decode_blocks"]
            assert terms.active_requests == loads[worker]["active_requests"]
        home = self._names[chosen["worker_id"]]
        assert costs[home].cost <= min(terms.cost for terms in costs.values()) + 1e-9
        self._dynamo("until_cached", body, chosen["worker_id"], len(tokens) // BLOCK)
        hints = RoutingHints(worker_id=home)
        packed = pack_u32(tokens)
        (routed,) = self._drive("requests", request(name, unpack_u64(hashes), token_ids=packed, routing=hints))
        assert isinstance(routed, RequestRouted)
        self._running.append(_Running(name, routed, -(-len(tokens) // BLOCK) * BLOCK - len(tokens)))

    def advance(self, kind: str, at: int) -> None:
        """Emit the first token, a block of output, or the end of a running request."""
        if not self._running:
            return
        one = self._running[at % len(self._running)]
        names = ("request_id", "attempt", "worker_id", "worker_epoch", "owner_epoch")
        fields: dict[str, Any] = {name: getattr(one.routed, name) for name in names}
        if kind == "first" or (kind == "grow" and not one.began):
            one.began = True
            self._dynamo("service", "prefill_complete", one.name)
            self._drive("progress", FirstTokenEmitted(**fields))
        elif kind == "grow":
            self._dynamo("service", "add_output_block", one.name)
            self._drive("progress", OutputGrown(**fields, output_tokens=one.room + one.blocks * BLOCK + 1))
            one.blocks += 1
        else:
            self._running.remove(one)
            self._dynamo("service", "free_reservation", one.name)
            self._drive("progress", RequestFinished(**fields, finish_reason="length"))

    def compare(self) -> None:
        (theirs,) = self._dynamo("loads", self._model)
        loads = {
            self._names[one["worker_id"]]: (
                one["potential_prefill_tokens"],
                one["potential_decode_blocks"],
                one["active_requests"],
            )
            for one in theirs["loads"]
        }
        ours = {
            rank.worker_id: (rank.prefill_tokens, rank.decode_blocks, rank.active_requests)
            for rank in self._drive.world.load.ranks()
        }
        assert ours == loads


@pytest.mark.parametrize(("config", "environment"), CONFIGS, ids=str)
def test_decisions_equal_those_of_dynamo(config: dict[str, Any], environment: dict[str, str]) -> None:
    with dynamo_with(DYN_ROUTER_USE_KV_EVENTS="false", **environment) as dynamo:

        @examples(4)
        @given(st.lists(actions, min_size=3, max_size=30))
        def decide(history: list[tuple[str, int, int, int]]) -> None:
            routers = Routers(dynamo, config)
            for kind, first, blocks, tail in history:
                if kind == "ask":
                    routers.route(first, blocks, tail)
                else:
                    routers.advance(kind, first)
                routers.compare()
            routers.end()

        decide()
