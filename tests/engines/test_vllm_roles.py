"""Prefill and decode roles with two real vLLM engines and NIXL.

The tests share two engines and run in order: the last ones take the prefill engine away. Each uses prompts of its own.
"""

import asyncio
import contextlib
import importlib.util
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from forebay.engine_model.model import EngineLoad
from forebay.events.control import Command, Role
from forebay.events.transfer import KvLayout, Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import KvEngine
from forebay.workers.engines import model_engine
from forebay.workers.engines.vllm.engine import VllmEngine
from forebay.workers.engines.vllm.transfer import CONNECTOR, UNREAD_S
from tests.engines.driven import DEADLINE_S, Answer, Driven, driven
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
ABORTS = 200  # at random moments
LANES = 3  # requests at a time
TICKS_MAX = 3_000  # of the event loop before an abort; a request takes about half of them
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

    async def prompt_of_namespace(self, prompt: list[int], expected: list[int], namespace: str) -> None:
        """Check the response to a prompt, which is prefilled again as long as its KV could not be fetched."""
        while not (answer := await self.both(prompt, len(expected), cache_namespace=namespace)).tokens:
            assert answer.not_fetched, answer
        assert answer.tokens == expected

    async def frees_everything(self) -> None:
        """Check that both engines drop all blocks of their caches, which works only if none is in use."""
        for one in (self.prefill, self.decode):
            assert isinstance(one.engine, VllmEngine)
            await one.engine.command(Command(action="clear_kv_blocks"))


async def ended(item: WorkItem) -> None:
    """Wait for the end of a request, also of a cancelled one, which reports none."""
    tasks = [task for task in asyncio.all_tasks() if task.get_name() == f"vLLM {item.request_id}"]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def stopped(one: Driven) -> Iterator[int]:
    """Stop the core of an engine, so that it neither steps nor serves reads."""
    assert isinstance(one.engine, VllmEngine)
    (core,) = one.engine.core.processes()
    assert core.pid is not None
    os.kill(core.pid, signal.SIGSTOP)
    try:
        yield core.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(core.pid, signal.SIGCONT)


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


def prompt_of(number: int, oracle: Transformers) -> tuple[list[int], list[int]]:
    prompt = [(47 + number) * at % 250 + 10 for at in range(3 * BLOCK + 5)]
    return prompt, oracle.greedy(prompt, 4)


@pytest.mark.parametrize("step", ["submitted", "queued", "reading", "hung", "read", "decoding"])
async def test_abort_of_a_decode_at_each_step(
    step: str, pair: Pair, oracle: Transformers, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, expected = prompt_of(0, oracle)
    engine = pair.decode.engine
    assert isinstance(engine, VllmEngine)
    if step in ("hung", "read"):  # the abort does not wait for the first token
        monkeypatch.setattr(VllmEngine, "ABORT_WITHIN_S", 0.0)
    before = [pair.decode.submit(pair.decode.item([60 + at], 900)) for at in range(2 if step == "queued" else 0)]
    await pair.decode.until(lambda: all(one.tokens for one in before))
    prefilled = await pair.prefilled(prompt, cache_namespace=step)
    item = pair.decode.item(prompt, 400, stage="decode", prefilled=prefilled, cache_namespace=step)
    with contextlib.ExitStack() as stack:
        if step in ("reading", "hung", "read"):
            stack.enter_context(stopped(pair.prefill))
        answer = pair.decode.submit(item)
        match step:
            case "queued":
                await pair.decode.until(lambda: load(pair.decode).waiting == 1)
            case "reading" | "hung" | "read":
                await pair.decode.until(lambda: load(pair.decode).kv_blocks_used > 0)
            case "decoding":
                await pair.decode.until(lambda: answer.tokens)
        if step == "read":  # the read ends while the engine makes no step
            await engine.command(Command(action="pause"))
            stack.close()
        engine.cancel(item.request_id)
        if step in ("hung", "read"):
            await ended(item)
    for one in before:
        engine.cancel(one.item.request_id)
    await ended(item)
    await engine.command(Command(action="resume"))
    await pair.prompt_of_namespace(prompt, expected, step)
    await pair.frees_everything()
    assert not answer.over and (step == "decoding" or not answer.tokens)


@pytest.mark.parametrize("step", ["queued", "computing", "kept", "reading"])
async def test_abort_of_a_prefill_at_each_step(step: str, pair: Pair, oracle: Transformers) -> None:
    prompt, expected = prompt_of(1, oracle)
    before = [pair.prefill.submit(pair.prefill.item([70 + at], 900)) for at in range(2 if step == "queued" else 0)]
    await pair.prefill.until(lambda: all(one.tokens for one in before))
    item = pair.prefill.item(prompt, stage="prefill", cache_namespace=step)
    answer = pair.prefill.submit(item)
    if step == "queued":
        await pair.prefill.until(lambda: load(pair.prefill).waiting == 1)
    elif step != "computing":
        await pair.prefill.until(lambda: answer.over)
    if step == "reading":
        with stopped(pair.prefill):
            options: dict[str, Any] = {"prefilled": answer.prefilled, "cache_namespace": step}
            reading = pair.decode.submit(pair.decode.item(prompt, 4, stage="decode", **options))
            await pair.decode.until(lambda: load(pair.decode).kv_blocks_used > 0)
            pair.prefill.engine.cancel(item.request_id)
        await pair.decode.until(lambda: reading.over)
        assert reading.tokens == expected
    pair.prefill.engine.cancel(item.request_id)
    for one in before:
        pair.prefill.engine.cancel(one.item.request_id)
    await ended(item)
    await pair.prompt_of_namespace(prompt, expected, step)
    await pair.frees_everything()


async def test_aborts_at_random_moments(pair: Pair, oracle: Transformers) -> None:
    rng, remaining = random.Random(42), iter(range(ABORTS))
    prompts = [prompt_of(number, oracle) for number in range(4)]
    loop, slowest_s = asyncio.get_running_loop(), 0.0
    assert isinstance(pair.prefill.engine, KvEngine)
    release = pair.prefill.engine.release

    async def lane() -> None:
        nonlocal slowest_s
        for number in remaining:
            (prompt, expected), options = rng.choice(prompts), dict[str, Any](cache_namespace=f"n{number}")
            one, item = pair.prefill, pair.prefill.item(prompt, stage="prefill", **options)
            answer, prefill = one.submit(item), item.request_id
            if rng.random() < 0.75:
                await one.until(partial(getattr, answer, "over"))
                one, prefilled = pair.decode, answer.prefilled
                item = one.item(prompt, 4, stage="decode", prefilled=prefilled, **options)
                one.submit(item)
            for _ in range(rng.randrange(TICKS_MAX)):
                await asyncio.sleep(0)
            cancelled_s = loop.time()
            one.engine.cancel(item.request_id)
            release(prefill)
            await ended(item)
            slowest_s = max(slowest_s, loop.time() - cancelled_s)
            # Blocks of the cancelled request may be in the caches. They must have the right content.
            await pair.prompt_of_namespace(prompt, expected, f"n{number}")

    async with asyncio.TaskGroup() as lanes:
        for _ in range(LANES):
            lanes.create_task(lane())
    await pair.frees_everything()
    assert slowest_s < VllmEngine.ABORT_WITHIN_S


async def test_a_prefill_worker_that_dies_during_a_transfer_and_another_one(
    pair: Pair, model: Path, lora: Path, oracle: Transformers
) -> None:
    prompts = [[(43 + more) * at % 250 + 10 for at in range(9 * BLOCK)] for more in range(3)]
    kept = [await pair.prefilled(prompt) for prompt in prompts]
    with stopped(pair.prefill) as core:
        reading, cancelled = (
            pair.decode.submit(pair.decode.item(prompts[at], stage="decode", prefilled=kept[at])) for at in (0, 2)
        )
        await pair.decode.until(lambda: load(pair.decode).kv_blocks_used >= 2 * 9)
        pair.decode.engine.cancel(cancelled.item.request_id)
        assert not reading.over
        os.kill(core, signal.SIGKILL)
    await pair.decode.until(lambda: reading.over)
    await ended(cancelled.item)
    assert not (cancelled.over or cancelled.tokens)
    later = await pair.decoded(prompts[1], kept[1])
    assert (reading.tokens, later.tokens) == ([], [])
    for answer in (reading, later):
        assert "could not load" in (answer.not_fetched or "")
    await pair.serves()
    async with driven(engine(model, "prefill", lora), named("p2")) as other:
        answer = await Pair(other, pair.decode).both(prompts[0])
        assert answer.tokens == oracle.greedy(prompts[0], 8)
        assert load(pair.decode).kv_blocks_total == KV_BLOCKS
