"""Tiers of one rank of vLLM against a small scheduler: every copied block is the one that its name promises.

The device memory of this test contains numbers instead of KV: the number of a computed block is the low half of its
key. Copies end at any later time, so a block that is overwritten too early would be seen in a tier or on the device.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.core.block_hashes import hash_seed, mm_hash, sequence_hashes
from forebay.events.base import pack_u32, unpack_u64
from forebay.kv_tiers.costs import CostModel
from forebay.kv_tiers.manager import TierRun
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm.core import engine_arguments
from forebay.workers.engines.vllm.tiers.configuration import RequestHints, TierConfig, children, connector, unsupported
from forebay.workers.engines.vllm.tiers.rank import PromptNames, VllmRank
from forebay.workers.kv_tiers.identity import BlockName, KeyChain, KvIdentity, media_by_block
from forebay.workers.kv_tiers.metrics import TierCounters
from forebay.workers.kv_tiers.settings import TierSettings
from forebay.workers.kv_tiers.transfers import LoadResult
from tests.depth import examples

SIZE = 2
BLOCKS = 9
IDENTITY = KvIdentity(weights="w", tp_rank=0, tp_size=1, layout="l", dtype="d", block_size=SIZE, block_bytes=16)


class Tiers:
    """One tier whose copies end when the test wants it."""

    def __init__(self) -> None:
        self.stored: dict[bytes, bytes] = {}
        self.copies: list[Callable[[bool], None]] = []
        self.ended: list[Callable[[], None]] = []
        self.costs = CostModel()
        self.prefetched: list[int] = []
        self.pinned: list[tuple[int, int]] = []

    @property
    def busy(self) -> bool:
        return bool(self.copies or self.ended)

    def match(self, names: Sequence[BlockName], begin: int, _cached: int, _hinted: int) -> list[TierRun]:
        found = 0
        while begin + found < len(names) and names[begin + found].key in self.stored:
            found += 1
        return [TierRun("host", found)] if found else []

    def load(
        self, names: Sequence[BlockName], begin: int, runs: Sequence[TierRun], into: Sequence[memoryview], done: Any
    ) -> None:
        wanted = list(names[begin : begin + sum(run.blocks for run in runs)])
        assert len(wanted) == len(into)

        def copy(is_ok: bool) -> None:
            arrived = len(wanted) if is_ok else len(wanted) // 2
            for name, payload in zip(wanted[:arrived], into, strict=False):
                payload[:] = self.stored[name.key]
            for name in wanted[arrived:]:
                self.stored.pop(name.key)
            result = LoadResult(arrived, {"host": arrived}, {"host": 1})
            self.ended.append(partial(done, result))

        self.copies.append(copy)

    def offer(self, names: Sequence[BlockName], block: Callable[[int], memoryview], done: Callable[[], None]) -> None:
        def copy(is_ok: bool) -> None:
            if is_ok:
                self.stored.update({name.key: bytes(block(at)) for at, name in enumerate(names)})
            self.ended.append(done)

        self.copies.append(copy)

    def prefetch(self, names: Sequence[BlockName], begin: int, _hinted: int) -> None:
        self.prefetched.append(len(names) - begin)

    def pin(self, names: Sequence[BlockName], seconds: int) -> None:
        self.pinned.append((len(names), seconds))

    def observe_request(self, total_blocks: int, device_blocks: int, loaded: dict[str, int]) -> None:
        assert device_blocks + sum(loaded.values()) <= total_blocks

    def poll(self) -> None:
        ended, self.ended = self.ended, []
        for one in ended:
            one()

    def changes(self) -> tuple[list[Any], list[Any]]:
        return [], []

    def content(self) -> tuple[list[Any], list[Any]]:
        return [], []

    def counters(self) -> TierCounters:
        return TierCounters()


class Pool:
    """Pool of blocks: free ones are reused in the order in which they became free."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=at, ref_cnt=0) for at in range(BLOCKS)]
        self.free = list(range(BLOCKS))

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block.block_id)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                self.free.append(block.block_id)

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.blocks[block].ref_cnt = 1
        return taken


class Memory:
    """Device memory with one number per block."""

    def __init__(self) -> None:
        self.content = [b"\0" * 16] * BLOCKS

    def gather(self, block: int) -> memoryview:
        return memoryview(self.content[block])

    def scatter(self, block: int, payload: memoryview) -> None:
        self.content[block] = bytes(payload)


class Request:
    """Request with the attributes of vLLM's that the rank reads."""

    def __init__(self, number: int, prompt: list[int]) -> None:
        self.request_id = f"r{number}"
        self.all_token_ids = list(prompt)
        self.num_computed_tokens = 0
        self.cache_salt = None
        self.lora_request = None
        self.mm_features: list[Any] = []
        self.num_prompt_tokens = len(prompt)
        self.num_preemptions = 0
        self.cached: dict[str, int] = {}
        self.prefill_stats = SimpleNamespace(set=self.cached.update)
        self.block_ids: list[int] = []
        self.loading = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Scheduler(RuleBasedStateMachine):
    """A scheduler without a prefix cache of its own: each request computes or loads all its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.memory, self.tiers = Pool(), Memory(), Tiers()
        inline: Any = SimpleNamespace(submit=lambda function, *given: function(*given), shutdown=lambda: None)
        self.rank = VllmRank(cast("Any", self.tiers), cast("Any", self.memory), IDENTITY, threading.Event(), inline)
        self.rank.pool = self.pool
        self.requests: dict[str, Request] = {}
        self.aborted: dict[str, Request] = {}  # whose load must end before their blocks are free
        self.number = 0
        self.pinning: set[str] = set()  # requests that pin their prompt, and are not scheduled yet
        self.pinned: list[tuple[int, int]] = []

    @rule(first=st.integers(0, 1), length=st.integers(3, 9), pin_s=st.sampled_from([0, 60]))
    def submit(self, first: int, length: int, pin_s: int) -> None:
        if len(self.requests) < 3:
            self.number += 1
            request = Request(self.number, [first] * length)
            self.requests[request.request_id] = request
            self.rank.add(request, RequestHints(f"log-{self.number}", kv_pin_s=pin_s), "")
            if pin_s:
                self.pinning.add(request.request_id)

    @rule(tokens=st.integers(1, 8), steps=st.integers(1, 3))
    def steps(self, tokens: int, steps: int) -> None:
        for _ in range(steps):
            self.step(tokens)

    def step(self, tokens: int) -> None:
        scheduled: dict[str, int] = {}
        for request in self.requests.values():
            if request.loading:
                continue
            if not request.block_ids and not self._admit(request):
                continue
            if request.loading:
                continue
            count = min(tokens, request.num_tokens - request.num_computed_tokens)
            blocks = -(-(request.num_computed_tokens + count) // SIZE)
            if (missing := blocks - len(request.block_ids)) > len(self.pool.free):
                continue
            request.block_ids += self.pool.take(max(0, missing))
            if count:
                scheduled[request.request_id] = count
        self.rank.schedule(scheduled, lambda one: self.requests[one].block_ids)
        self.pinned += [(self.requests[one].num_tokens // SIZE, 60) for one in scheduled if one in self.pinning]
        self.pinning -= scheduled.keys()
        assert self.tiers.pinned == self.pinned
        for one, count in scheduled.items():
            self._compute(self.requests[one], count)
        self.rank.step_launched()
        self._poll()
        self.rank.step_ended()

    def _admit(self, request: Request) -> bool:
        tokens = self.rank.match(request.request_id, 0)
        if tokens is None:
            assert any(one.loading for one in (*self.requests.values(), *self.aborted.values()))
            return False
        assert tokens < request.num_tokens, "the last token is computed"
        if tokens // SIZE > len(self.pool.free):
            return False
        request.block_ids = self.pool.take(tokens // SIZE)
        self.rank.allocated(request.request_id, request.block_ids, tokens)
        request.num_computed_tokens = tokens
        request.loading = tokens > 0
        return True

    def _compute(self, request: Request, count: int) -> None:
        first = request.num_computed_tokens // SIZE
        request.num_computed_tokens += count
        keys = self._keys(request, request.num_computed_tokens)
        for block, key in zip(request.block_ids[first:], [*keys[first:], b"unfinished"], strict=False):
            self.memory.content[block] = key
        if request.num_computed_tokens == request.num_tokens:
            request.all_token_ids.append(request.num_tokens % 2)

    def _poll(self) -> None:
        self.rank.poll(idle=False)
        failed = self.rank.take_failed()
        for one in self.rank.take_received():
            request = self.requests.get(one) or self.aborted[one]
            request.loading = False
            bad = [at for at, block in enumerate(request.block_ids) if block in failed]
            if bad:
                request.num_computed_tokens = bad[0] * SIZE
                self._free(request, request.block_ids[bad[0] :])
                del request.block_ids[bad[0] :]
            if one in self.aborted:
                self._free(self.aborted.pop(one), request.block_ids)

    def _free(self, request: Request, block_ids: list[int]) -> None:
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(block_ids)])

    @precondition(lambda self: self.requests)
    @rule(at=st.integers(0, 2))
    def finish(self, at: int) -> None:
        request = self.requests.pop(sorted(self.requests)[at % len(self.requests)])
        self.rank.finish(request.request_id)
        if request.loading:
            self.aborted[request.request_id] = request
        else:
            self._free(request, request.block_ids)

    @precondition(lambda self: self.requests)
    @rule(at=st.integers(0, 2))
    def preempt(self, at: int) -> None:
        request = self.requests[sorted(self.requests)[at % len(self.requests)]]
        if not request.loading:
            self._free(request, request.block_ids)
            request.block_ids, request.num_computed_tokens = [], 0
            request.num_preemptions += 1

    @precondition(lambda self: self.tiers.copies)
    @rule(at=st.integers(0, 5), is_ok=st.sampled_from([True, True, False]))
    def copy(self, at: int, is_ok: bool) -> None:
        copies = self.tiers.copies
        copies.pop(at % len(copies))(is_ok)

    @precondition(lambda self: self.tiers.copies)
    @rule()
    def copy_all(self) -> None:
        while self.tiers.copies:
            self.tiers.copies.pop()(True)

    @invariant()
    def blocks_have_the_content_that_their_names_promise(self) -> None:
        assert all(content == key[:16] for key, content in self.tiers.stored.items())
        for request in self.requests.values():
            if not request.loading:
                for at, key in enumerate(self._keys(request, request.num_computed_tokens)):
                    assert self.memory.content[request.block_ids[at]] == key

    def teardown(self) -> None:
        for one in list(self.requests):
            request = self.requests.pop(one)
            self.rank.finish(one)
            if request.loading:
                self.aborted[one] = request
            else:
                self._free(request, request.block_ids)
        for _ in range(3):
            while self.tiers.copies:
                self.tiers.copies.pop()(True)
            self._poll()
        self.rank.take_changes()
        assert not self.rank.busy and not self.rank.frees_blocks and not self.aborted
        assert len(self.pool.free) == BLOCKS, "no reference remains"

    def _keys(self, request: Request, tokens: int) -> list[bytes]:
        names = PromptNames(IDENTITY).extend(request.all_token_ids[:tokens])
        return [name.key[:16] for name in names]


TestScheduler = Scheduler.TestCase
TestScheduler.settings = examples(2.5, stateful_step_count=50)


# Names of blocks, configuration, reports

BLOCK = 4
NAMED = KvIdentity(weights="ab", tp_rank=0, tp_size=1, layout="l", dtype="float32", block_size=BLOCK, block_bytes=64)
TOKENS = list(range(100, 123))
TIERS = TierSettings(host_bytes=1 << 20, disk=Path("/disk"), store="s3://bucket/kv", filter=False)


def feature(identifier: str, offset: int, length: int) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


@pytest.mark.parametrize("step", [1, 3, 5, 23])
def test_names_do_not_depend_on_how_tokens_arrive(step: int) -> None:
    features = [feature("00ff" * 16, 2, 7), feature("clip", 17, 2)]
    grown = PromptNames(NAMED, salt="t", lora_name="l", adapter="d", features=features)
    for end in range(step, len(TOKENS) + step, step):
        grown.extend(TOKENS[:end])
    packed = pack_u32(TOKENS)
    media = media_by_block(
        [(one.identifier, one.mm_position.offset, one.mm_position.length) for one in features], BLOCK
    )
    keys = KeyChain(NAMED, salt="t", adapter="d").extend(None, packed, media)
    objects = {0: [mm_hash("00ff" * 16)], 1: [mm_hash("00ff" * 16)], 2: [mm_hash("00ff" * 16)], 4: [mm_hash("clip")]}
    hashes = unpack_u64(sequence_hashes(packed, BLOCK, hash_seed("l", "t"), objects))
    assert [one.key for one in grown.names] == keys
    assert [one.sequence_hash for one in grown.names] == list(hashes)


def test_tiers_and_transfers_are_combined() -> None:
    def transfer(role: Any) -> Any:
        settings = EngineSettings(model=Path("/m"), model_name="m", role=role, tiers=TIERS)
        own = connector(TierConfig(TIERS, "w"))
        arguments = engine_arguments(settings, kv_events=True, sockets=Path("/s"), tiers=own)
        return arguments["kv_transfer_config"]

    alone = transfer("aggregated")
    assert (alone["kv_connector"], alone["kv_load_failure_policy"]) == ("ForebayTiers", "recompute")
    assert TierConfig.decode(alone["kv_connector_extra_config"]) == TierConfig(TIERS, "w")
    with pytest.raises(ValueError, match="host_bytes"):
        TierConfig.decode({"tiers": {"host_bytes": "much"}})
    for role, policy in (("prefill", "recompute"), ("decode", "fail")):
        both = transfer(role)
        assert (both["kv_connector"], both["kv_load_failure_policy"]) == ("MultiConnector", policy)
        tiers, _nixl = both["kv_connector_extra_config"]["connectors"]
        assert tiers["kv_load_failure_policy"] == policy
        assert [name for name, _ in children(SimpleNamespace(**both))] == ["ForebayTiers", "NixlConnector"]
    assert children(None) == []


def test_unsupported_engines_are_refused_with_the_reason() -> None:
    def reason(name: str = "ForebayTiers", **parallel: Any) -> str:
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector=name, kv_connector_extra_config={}),
            parallel_config=SimpleNamespace(
                **{
                    "world_size": 1,
                    "tensor_parallel_size": 1,
                    "pipeline_parallel_size": 1,
                    "distributed_executor_backend": "uni",
                }
                | parallel
            ),
            model_config=SimpleNamespace(is_encoder_decoder=parallel.get("is_encoder_decoder", False)),
        )
        return unsupported(config)

    assert reason() == ""
    assert reason("NixlConnector", world_size=4) == ""
    assert "got 2 and 1" in reason(world_size=2, tensor_parallel_size=2)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=0" in reason(distributed_executor_backend="mp")
    assert "encoder-decoder" in reason(is_encoder_decoder=True)
