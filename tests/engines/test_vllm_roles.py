"""Prefill and decode roles for real: one vLLM computes a prompt, another fetches its KV blocks by NIXL and goes on."""

import contextlib
import importlib.util
import socket
from pathlib import Path

import pytest

from forebay.events.control import Role
from forebay.workers.engine import EngineRefused
from forebay.workers.vllm_engine import VllmEngine
from tests.engines.driven import Driven, driven
from tests.engines.oracle import GREEDY
from tests.engines.test_vllm_engine import BLOCK, SPEC, settings

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # as in test_vllm_engine
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="vLLM's NixlConnector needs the package nixl"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def test_a_decode_worker_goes_on_from_the_blocks_of_a_prefill_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, said = GREEDY[3]

    async def started(stack: contextlib.AsyncExitStack, role: Role) -> Driven:
        # Read by the core when it starts: one NIXL side channel each.
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        return await stack.enter_async_context(driven(VllmEngine(settings(model, role=role)), SPEC))

    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    async with contextlib.AsyncExitStack() as stack:
        prefill, decode = await started(stack, "prefill"), await started(stack, "decode")
        engines = prefill.engine, decode.engine
        assert isinstance(engines[0], VllmEngine) and isinstance(engines[1], VllmEngine)
        item = decode.item(prompt, len(said))
        transfer = await engines[0].prefill(item)
        assert transfer["remote_num_tokens"] == len(prompt)
        answer = decode.expect(item)
        engines[1].submit_prefilled(item, transfer)
        await decode.until(lambda: answer.over)
        assert answer.tokens == said
        # The engine that started last has the process's metrics: all full blocks were computed elsewhere.
        assert decode.metric("vllm:external_prefix_cache_hits_total") >= len(prompt) // BLOCK * BLOCK
        assert decode.metric("vllm:nixl_bytes_transferred_sum") > 0
        blocks = decode.blocks(prompt)
        await decode.until(lambda: blocks <= decode.held[0])
        await prefill.until(lambda: blocks <= prefill.held[0])
        with pytest.raises(EngineRefused):
            await engines[0].prefill(prefill.item([100_000]))
