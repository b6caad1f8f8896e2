"""Real vLLM with KV tiers: blocks that leave device memory are loaded instead of computed, with equal tokens.

The tests run in order. The engine of one worker is killed and started again; a second worker shares its store.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from forebay.events.base import unpack_u64
from forebay.events.control import Command
from forebay.events.metrics import TierCosts
from forebay.workers.engine import EngineError
from forebay.workers.engines.vllm.engine import VllmEngine
from forebay.workers.kv_tiers.settings import TierSettings
from tests.engines.driven import Answer, Driven, driven
from tests.engines.vllm_settings import ARGUMENTS, BLOCK, KV_BLOCKS, SPEC, settings

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # as in test_vllm_engine
]

TOKENS = 12 * BLOCK + 17
LOADABLE = 12 * BLOCK
BUCKET = "kv-blocks"
LORA = "slow-lora"
LAYERS = 2
VOCABULARY = range(100, 350)


def prompts(count: int, seed: int, tokens: int = TOKENS) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(VOCABULARY, k=tokens) for _ in range(count)]


def spec(worker_id: str) -> Any:
    return msgspec.structs.replace(SPEC, worker_id=worker_id)


def loaded(answers: list[Answer]) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in (part for answer in answers for part in answer.onboarded):
        found[part.tier] = found.get(part.tier, 0) + part.tokens
        assert part.us > 0
    return found


async def ask_all(one: Driven, wanted: list[list[int]], tokens: int = 6, **options: Any) -> list[Answer]:
    return [await one.ask(prompt, tokens, **options) for prompt in wanted]


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that computes so slowly that loading is always faster."""
    from tests.harness.models import make_slow_model  # noqa: PLC0415 - imports torch

    directory = tmp_path_factory.mktemp("model") / "slow"
    make_slow_model.write_model(directory, layers=LAYERS)
    return directory


@pytest.fixture(scope="module")
def slow_lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.harness.models import make_slow_model  # noqa: PLC0415 - imports torch

    directory = tmp_path_factory.mktemp("lora") / "slow-lora"
    make_slow_model.write_lora(directory, layers=LAYERS)
    return directory


@pytest.fixture(scope="module")
def store_url() -> Iterator[str]:
    pytest.importorskip("moto")
    from tests.harness.s3_process import s3_server, use_credentials  # noqa: PLC0415 - imports boto3

    use_credentials()
    with s3_server(BUCKET) as url:
        yield url


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def hosted(slow_model: Path, slow_lora: Path) -> AsyncIterator[Driven]:
    """An engine with a host tier and a LoRA adapter."""
    arguments = ARGUMENTS | {"max_lora_rank": 8}
    tiers = TierSettings(host_bytes=1 << 28)
    engine = VllmEngine(settings(slow_model, tiers=tiers, arguments=arguments, loras={LORA: slow_lora}))
    async with driven(engine, SPEC) as one:
        yield one


async def displace(one: Driven, seed: int) -> None:
    """Use all blocks of device memory for other prompts."""
    await ask_all(one, prompts(4, seed), 1)


async def test_prompts_and_answers_are_loaded_from_host_memory(hosted: Driven) -> None:
    prompt = prompts(1, 1)[0]
    first = await hosted.ask(prompt, 3 * BLOCK, kv_pin_s=3600)
    await hosted.until(lambda: hosted.blocks(prompt + first.tokens[:-1]) <= hosted.lower["host"])
    await displace(hosted, 2)
    await hosted.until(lambda: not hosted.blocks(prompt) & hosted.held[0])
    again = await hosted.ask(prompt, 3 * BLOCK)
    assert again.tokens == first.tokens
    assert (again.cached, loaded([again])) == (LOADABLE, {"host": LOADABLE})
    await displace(hosted, 3)
    continued = prompt + first.tokens
    follow_up = await hosted.ask(continued, 4)
    assert loaded([follow_up]) == {"host": (len(continued) - 1) // BLOCK * BLOCK}
    await hosted.until(lambda: hosted.metric("kvbm_onboard_blocks_h2d") >= 24)
    assert hosted.metric("kvbm_matched_tokens") == BLOCK * hosted.metric("kvbm_onboard_blocks_h2d")
    assert hosted.metric("kvbm_offload_blocks_d2h") > 4 * KV_BLOCKS // 3
    assert 0 < hosted.metric("kvbm_host_cache_hit_rate") < 1
    assert hosted.metric("forebay_tier_pinned_blocks") == TOKENS // BLOCK


async def test_durations_of_loads_and_prefills_are_measured(hosted: Driven) -> None:
    def costs() -> TierCosts:
        return hosted.batches[-1].tier_costs or TierCosts(prefill_block_us=0.0)

    for prompt in prompts(5, 13):
        for seed in (14, 15):
            await hosted.ask(prompt, 2)
            await displace(hosted, seed)
    await hosted.until(lambda: costs().prefill_block_us > 0 and [one.tier for one in costs().tiers] == ["host"])


async def test_tenants_and_adapters_share_no_blocks(hosted: Driven) -> None:
    prompt = prompts(1, 4)[0]
    variants: list[dict[str, Any]] = [{}, {"cache_namespace": "tenant-1"}, {"lora_name": LORA}]
    first = [await hosted.ask(prompt, 8, **variant) for variant in variants]
    assert [one.cached for one in first] == [0, 0, 0]
    assert first[0].tokens == first[1].tokens != first[2].tokens
    await displace(hosted, 5)
    again = [await hosted.ask(prompt, 8, **variant) for variant in variants]
    assert [one.tokens for one in again] == [one.tokens for one in first]
    assert [one.cached for one in again] == [LOADABLE] * 3
    assert {name for variant in variants for name in hosted.blocks(prompt, **variant)} <= hosted.lower["host"]


async def test_concurrent_requests_share_a_load(hosted: Driven) -> None:
    prompt = prompts(1, 6)[0]
    first = await hosted.ask(prompt, 8)
    await displace(hosted, 7)
    answers = [hosted.submit(hosted.item(prompt, 8)) for _ in range(3)]
    await hosted.until(lambda: all(one.over for one in answers))
    assert [one.tokens for one in answers] == [first.tokens] * 3
    assert loaded(answers) == {"host": LOADABLE}, "the others find the blocks in device memory"


async def test_tiers_survive_a_reset_and_are_reported_again(hosted: Driven) -> None:
    prompt = prompts(1, 8)[0]
    first = await hosted.ask(prompt, 4)
    await hosted.until(lambda: hosted.blocks(prompt) <= hosted.lower["host"])
    hosted.engine.reset()
    again = await hosted.ask(prompt, 4)
    assert again.tokens == first.tokens
    await hosted.until(lambda: hosted.blocks(prompt) <= hosted.lower["host"])
    assert again.cached == LOADABLE


async def test_clear_command_also_clears_the_tiers(hosted: Driven) -> None:
    prompt = prompts(1, 9)[0]
    first = await hosted.ask(prompt, 4)
    await hosted.until(lambda: hosted.blocks(prompt) <= hosted.lower["host"])
    await hosted.engine.command(Command(action="clear_kv_blocks"))
    again = await hosted.ask(prompt, 4)
    assert (again.cached, again.tokens) == (0, first.tokens)


async def test_working_set_survives_a_kill_and_reaches_a_second_worker(
    slow_model: Path, store_url: str, disk: Path
) -> None:
    wanted = prompts(4 * KV_BLOCKS * BLOCK // TOKENS, 10)  # four times the KV memory
    store = TierSettings(store=f"s3://{BUCKET}/kv", store_endpoint=store_url)
    full = TierSettings(disk=disk / "w1", store=store.store, store_endpoint=store_url)
    first = VllmEngine(settings(slow_model, tiers=full))
    second = VllmEngine(settings(slow_model, tiers=store))
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(driven(second, spec("w2")))
        one = await stack.enter_async_context(driven(first, spec("w1")))
        assert one.spec.kv_store == other.spec.kv_store != ""
        cold = await ask_all(one, wanted)
        assert {answer.cached for answer in cold} == {0}
        every = set().union(*map(one.blocks, wanted))
        await one.until(lambda: every <= one.lower["disk"] and every <= one.shared)
        warm = await ask_all(one, wanted)
        assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
        assert loaded(warm)["disk"] > len(wanted) * LOADABLE // 2
        # The second worker has only the router's word for it.
        hinted = await ask_all(other, wanted[:3], store_blocks=TOKENS // BLOCK)
        assert [answer.tokens for answer in hinted] == [answer.tokens for answer in cold[:3]]
        assert loaded(hinted) == {"store": 3 * LOADABLE}
        for process in first.core.processes():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError):
            await one.until(lambda: False)
    await restarted(slow_model, full, wanted[:4], cold[:4])


def break_files(paths: Iterable[Path]) -> None:
    for path in list(paths):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


async def restarted(model: Path, tiers: TierSettings, wanted: list[list[int]], cold: list[Answer]) -> None:
    """The engine finds its files after the kill, computes the blocks of broken ones, and locks its directory."""
    tokens = [answer.tokens for answer in cold]
    assert tiers.disk is not None
    alone = TierSettings(disk=tiers.disk)
    async with driven(VllmEngine(settings(model, tiers=alone)), spec("w1")) as one:
        answers = await ask_all(one, wanted)
        assert [answer.tokens for answer in answers] == tokens
        assert loaded(answers) == {"disk": len(wanted) * LOADABLE}
        every = set().union(*map(one.blocks, wanted))
        await one.until(lambda: every <= one.lower["disk"])
        await displace(one, 11)
        late = {f"{name:016x}" for name in unpack_u64(one.item(wanted[3]).sequence_hashes)[LOADABLE // BLOCK // 2 :]}
        break_files(path for path in tiers.disk.rglob("*.kv") if path.stem.rpartition("-")[2] in late)
        (partly,) = await ask_all(one, wanted[3:4])
        assert partly.tokens == tokens[3]
        assert (partly.cached, loaded([partly])) == (LOADABLE // 2, {"disk": LOADABLE // 2})
        await displace(one, 12)
        break_files(tiers.disk.rglob("*.kv"))
        broken = await ask_all(one, wanted[:2])
        assert [answer.tokens for answer in broken] == tokens[:2]
        assert loaded(broken) == {}
        await one.until(lambda: one.metric("forebay_tier_misses_total") > 0)
        locked = VllmEngine(settings(model, tiers=alone))
        with pytest.raises(EngineError, match="w1"):
            await locked.start(spec("w3"))
        await locked.stop()


async def test_prefill_and_decode_workers_load_what_their_tiers_have(slow_model: Path) -> None:
    pytest.importorskip("nixl")
    tiers = TierSettings(host_bytes=1 << 28)
    wanted = prompts(6, 12)  # twice the KV memory
    async with AsyncExitStack() as stack:
        prefill, decode = [
            await stack.enter_async_context(
                driven(VllmEngine(settings(slow_model, role=role, tiers=tiers)), spec(role))
            )
            for role in ("prefill", "decode")
        ]
        assert prefill.spec.kv_layout == decode.spec.kv_layout is not None

        async def both(prompt: list[int]) -> tuple[Answer, Answer]:
            computed = await prefill.ask(prompt, stage="prefill")
            assert computed.prefilled is not None
            return computed, await decode.ask(prompt, 12, stage="decode", prefilled=computed.prefilled)

        first = [await both(prompt) for prompt in wanted]
        assert [decoded.cached for _, decoded in first] == [TOKENS] * len(wanted), "fetched"
        moved = decode.metric("vllm:nixl_bytes_transferred_sum")
        again = [await both(prompt) for prompt in wanted]
        assert [decoded.tokens for _, decoded in again] == [decoded.tokens for _, decoded in first]
        assert loaded([computed for computed, _ in again]) == {"host": len(wanted) * LOADABLE}
        assert loaded([decoded for _, decoded in again]) == {"host": len(wanted) * LOADABLE}
        assert decode.metric("vllm:nixl_bytes_transferred_sum") == moved, "nothing was fetched"
        # If its load failed, a request without KV to fetch would fail, too.
        alone = await decode.ask(wanted[0], 12)
        assert (alone.tokens, loaded([alone])) == (first[0][1].tokens, {})
        async with asyncio.timeout(30.0):  # less than the lease: the decode worker has released the KV
            await prefill.until(lambda: prefill.batches[-1].load.kv_blocks_used == 0)
