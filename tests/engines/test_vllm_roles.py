"""Prefill and decode roles with two real vLLM engines and NIXL.

The tests share two engines and run in order: the last ones take the prefill engine away. Each uses prompts of its own.
"""

import asyncio
import contextlib
import importlib.util
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from forebay.engine_model.model import EngineLoad
from forebay.events.control import Role
from forebay.events.transfer import KvLayout, Prefilled
from forebay.workers.engine import KvEngine
from forebay.workers.engines import model_engine
from forebay.workers.engines.vllm.engine import VllmEngine
from forebay.workers.engines.vllm.transfer import CONNECTOR, UNREAD_S
from tests.engines.driven import Answer, Driven, driven
from tests.engines.oracle import GREEDY, Transformers
from tests.engines.vllm_settings import ARGUMENTS, BLOCK, KV_BLOCKS, SPEC, settings
from tests.harness.local import free_ports

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # as in test_vllm_engine
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="vLLM's NixlConnector needs the package nixl"),
]

LEASE_S = 8  # of which vLLM reads in the first three seconds
BLOCK_BYTES = 2 * 2 * BLOCK * 32 * 4  # layers, keys and values, tokens, a head's width, float32
LORA = "tiny-lora"
TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
}


def engine(model: Path, role: Role, lora: Path) -> VllmEngine:
    """With two seats, so that a third request waits; the prefill engine's leases are short."""
    arguments: dict[str, Any] = ARGUMENTS | {"max_lora_rank": 8}
    if role == "prefill":
        arguments["kv_transfer_config"] = TRANSFER
    return VllmEngine(settings(model, role=role, arguments=arguments, loras={LORA: lora}, max_num_seqs=2))


@dataclass
class Pair:
    prefill: Driven
    decode: Driven

    async def prefilled(self, prompt: list[int], **options: Any) -> Prefilled:
        answer = await self.prefill.ask(prompt, stage="prefill", **options)
        assert answer.prefilled is not None, answer
        return answer.prefilled

    async def decoded(self, prompt: list[int], prefilled: Prefilled, tokens: int = 8, **options: Any) -> Answer:
        return await self.decode.ask(prompt, tokens, stage="decode", prefilled=prefilled, **options)

    async def both(self, prompt: list[int], tokens: int = 8, **options: Any) -> Answer:
        return await self.decoded(prompt, await self.prefilled(prompt, **options), tokens, **options)

    async def wait_freed(self) -> None:
        await self.prefill.until(lambda: load(self.prefill).kv_blocks_used == 0)

    async def serves(self) -> None:
        """Check that the decode engine responds and frees its blocks."""
        prompt, generated = GREEDY[1]
        assert (await self.decode.ask(prompt, len(generated))).tokens == generated
        await self.decode.until(lambda: load(self.decode).kv_blocks_used == 0)


def holds(one: Driven, prompt: list[int]) -> bool:
    """Whether an index would know all full blocks of a prompt there."""
    return one.blocks(prompt) <= one.held[0]


def load(one: Driven) -> EngineLoad:
    return one.batches[-1].load


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pair(model: Path, lora: Path) -> AsyncIterator[Pair]:
    async with contextlib.AsyncExitStack() as stack:
        # Through shared memory a stopped process can still be read: stopping one would not make a read wait.
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("UCX_TLS", "tcp")
        prefill = await stack.enter_async_context(driven(engine(model, "prefill", lora), named("p")))
        yield Pair(prefill, await stack.enter_async_context(driven(engine(model, "decode", lora), named("d"))))


def named(worker_id: str) -> Any:
    return msgspec.structs.replace(SPEC, worker_id=worker_id)


async def test_both_roles_report_their_layout(pair: Pair) -> None:
    layout = KvLayout(connector=CONNECTOR, dtype="float32", block_bytes=BLOCK_BYTES, layers=2)
    assert pair.prefill.spec.kv_layout == pair.decode.spec.kv_layout == layout


async def test_decode_worker_continues_from_fetched_kv(pair: Pair) -> None:
    moved = pair.decode.metric("vllm:nixl_bytes_transferred_sum")
    expected = 0
    for prompt, generated in GREEDY:
        prefilled = await pair.prefilled(prompt)
        blocks = -(-len(prompt) // BLOCK)
        assert (prefilled.worker_id, prefilled.model, prefilled.connector) == ("p", "tiny", CONNECTOR)
        assert (prefilled.tokens, prefilled.bytes) == (len(prompt), blocks * BLOCK_BYTES)
        assert 0 < prefilled.lease_us <= (LEASE_S - UNREAD_S) * 1e6
        warm = len(pair.decode.blocks(prompt) & pair.decode.held[0])
        answer = await pair.decoded(prompt, prefilled, len(generated))
        assert answer.tokens == generated
        assert answer.cached == len(prompt), "nothing of it is computed but the last token, once more"
        expected += (blocks - warm) * BLOCK_BYTES
        await pair.decode.until(partial(holds, pair.decode, prompt))
        await pair.prefill.until(partial(holds, pair.prefill, prompt))
    # What the decode engine had itself was not moved; the engine that started last has the process's metrics.
    assert pair.decode.metric("vllm:nixl_bytes_transferred_sum") - moved == expected > 0
    await pair.wait_freed()


async def test_prompt_cached_by_both_is_not_transferred(pair: Pair) -> None:
    prompt, generated = GREEDY[3]
    moved = pair.decode.metric("vllm:nixl_bytes_transferred_sum")
    answer = await pair.both([*prompt, *generated][: 3 * BLOCK + 1], 4)  # the last block is one token
    assert answer.tokens == (await pair.decode.ask([*prompt, *generated][: 3 * BLOCK + 1], 4)).tokens
    assert pair.decode.metric("vllm:nixl_bytes_transferred_sum") - moved <= BLOCK_BYTES


async def test_adapters_and_namespaces_share_no_blocks(
    pair: Pair, model: Path, lora: Path, oracle: Transformers
) -> None:
    prompt = [(11 * at) % 250 + 10 for at in range(3 * BLOCK + 5)]
    adapted, plain = Transformers(model, lora).greedy(prompt, 8), oracle.greedy(prompt, 8)
    assert adapted != plain
    assert (await pair.both(prompt, lora_name=LORA)).tokens == adapted
    assert (await pair.both(prompt)).tokens == plain
    apart = await pair.prefill.ask(prompt, stage="prefill", cache_namespace="tenant")
    assert (apart.cached, apart.prefilled is not None) == (0, True)
    assert apart.prefilled is not None
    assert (await pair.decoded(prompt, apart.prefilled, cache_namespace="tenant")).tokens == plain


async def test_decode_worker_applies_the_sampling_parameters(pair: Pair) -> None:
    prompt = [(13 * at) % 250 + 10 for at in range(2 * BLOCK)]
    options: dict[str, Any] = {"seed": 7, "temperature": 0.8, "logprobs": 2, "min_tokens": 4}
    alone = await pair.decode.ask(prompt, 8, **options)
    prefilled = await pair.prefilled(prompt, **options)
    there = await pair.decoded(prompt, prefilled, **options)
    assert there.tokens == alone.tokens
    assert [len(one.top) for one in there.logprobs] == [2] * 8


async def test_a_request_that_a_prefill_worker_refuses(pair: Pair) -> None:
    for prompt, status in (([100_000], 400), ([5] * 2_000, 400)):
        answer = await pair.prefill.ask(prompt, stage="prefill")
        assert answer.error is not None and answer.error.status == status
    answer = await pair.decode.ask([5, 6], stage="prefill", lora_name="no-such")
    assert answer.error is not None and answer.error.status == 404


async def test_fetching_from_an_unreachable_worker_fails(pair: Pair) -> None:
    prompt = [(23 * at) % 250 + 10 for at in range(2 * BLOCK)]
    prefilled = await pair.prefilled(prompt)
    nowhere = {"remote_engine_id": "gone", "remote_port": free_ports(1)}
    reported = msgspec.json.encode(msgspec.json.decode(prefilled.descriptor) | nowhere)
    answer = await pair.decoded(prompt, msgspec.structs.replace(prefilled, descriptor=reported))
    assert "could not load" in (answer.not_fetched or "")
    assert not answer.tokens
    await pair.serves()


async def test_expired_kv_is_not_read(pair: Pair) -> None:
    prompt = [(29 * at) % 250 + 10 for at in range(3 * BLOCK)]
    await pair.wait_freed()
    prefilled = await pair.prefilled(prompt)
    await pair.prefill.until(lambda: load(pair.prefill).kv_blocks_used == 3)
    async with asyncio.timeout(2 * LEASE_S):
        await pair.wait_freed()
    answer = await pair.decoded(prompt, prefilled)
    assert "could not load" in (answer.not_fetched or "")
    await pair.serves()


async def test_released_kv_is_freed_before_its_lease_ends(pair: Pair) -> None:
    prompt = [(31 * at) % 250 + 10 for at in range(3 * BLOCK)]
    await pair.wait_freed()
    begun_s = asyncio.get_running_loop().time()
    await pair.prefilled(prompt)
    await pair.prefill.until(lambda: load(pair.prefill).kv_blocks_used == 3)
    assert isinstance(pair.prefill.engine, VllmEngine)
    pair.prefill.engine.release(list(pair.prefill.answers)[-1])
    pair.prefill.engine.release("nothing of this id")
    await pair.wait_freed()
    assert asyncio.get_running_loop().time() - begun_s < LEASE_S


async def test_drop_notifies_the_holder(pair: Pair) -> None:
    prompt = [(33 * at) % 250 + 10 for at in range(3 * BLOCK)]
    prefilled = await pair.prefilled(prompt)
    begun_s = asyncio.get_running_loop().time()
    assert isinstance(pair.decode.engine, KvEngine) and isinstance(pair.prefill.engine, KvEngine)
    assert pair.prefill.engine.kept() == 1
    pair.decode.engine.drop(prefilled)
    pair.decode.engine.drop(msgspec.structs.replace(prefilled, descriptor=b"{}"))  # logged only
    await pair.wait_freed()
    assert asyncio.get_running_loop().time() - begun_s < LEASE_S / 2
    assert (pair.prefill.engine.kept(), pair.decode.engine.kept()) == (0, 0)
    await pair.serves()


async def test_cancellation_of_a_queued_request(pair: Pair) -> None:
    long = [pair.decode.submit(pair.decode.item([40 + at], 900)) for at in range(2)]
    await pair.decode.until(lambda: all(one.tokens for one in long))
    prompt = [(37 * at) % 250 + 10 for at in range(3 * BLOCK)]
    item = pair.decode.item(prompt, stage="decode", prefilled=await pair.prefilled(prompt))
    waiting = pair.decode.submit(item)
    await pair.decode.until(lambda: load(pair.decode).waiting == 1)
    for one in (item, *(answer.item for answer in long)):
        pair.decode.engine.cancel(one.request_id)
    # It notifies the holder, and the blocks are free.
    await pair.wait_freed()
    assert not waiting.over and not waiting.tokens
    await pair.serves()


async def test_a_health_request_in_either_role(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_engine, "CANARY_EVERY_S", 0.0)
    for one in (pair.prefill, pair.decode):
        assert isinstance(one.engine, VllmEngine)
        await one.engine.check()
        (canary,) = (task for task in asyncio.all_tasks() if task.get_name() == f"{one.engine.NAME} canary")
        await canary
        await one.engine.check()


async def test_reset_waits_for_readers(pair: Pair) -> None:
    prompt = [(41 * at) % 250 + 10 for at in range(3 * BLOCK)]
    prefilled = await pair.prefilled(prompt)
    pair.prefill.engine.reset()
    assert (await pair.decoded(prompt, prefilled)).finished is not None
    pair.prefill.held[0].clear()
    after = await pair.prefill.ask(prompt, stage="prefill")
    assert after.cached == 0
    assert after.prefilled is not None
    assert (await pair.decoded(prompt, after.prefilled)).finished is not None


async def test_a_prefill_worker_that_dies_during_a_transfer_and_another_one(
    pair: Pair, model: Path, lora: Path, oracle: Transformers
) -> None:
    assert isinstance(pair.prefill.engine, VllmEngine)
    (core,) = pair.prefill.engine.core.processes()
    assert core.pid is not None
    prompts = [[(43 + more) * at % 250 + 10 for at in range(9 * BLOCK)] for more in range(2)]
    kept = [await pair.prefilled(prompt) for prompt in prompts]
    os.kill(core.pid, signal.SIGSTOP)  # it serves no reads
    reading = pair.decode.submit(pair.decode.item(prompts[0], stage="decode", prefilled=kept[0]))
    await pair.decode.until(lambda: load(pair.decode).kv_blocks_used > 0)
    assert not reading.over
    os.kill(core.pid, signal.SIGKILL)
    await pair.decode.until(lambda: reading.over)
    later = await pair.decoded(prompts[1], kept[1])
    assert (reading.tokens, later.tokens) == ([], [])
    for answer in (reading, later):
        assert "could not load" in (answer.not_fetched or "")
    await pair.serves()
    async with driven(engine(model, "prefill", lora), named("p2")) as other:
        answer = await Pair(other, pair.decode).both(prompts[0])
        assert answer.tokens == oracle.greedy(prompts[0], 8)
        assert load(pair.decode).kv_blocks_total == KV_BLOCKS
