"""Real vLLM with KV tiers: blocks that leave device memory are loaded instead of computed, with equal tokens."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from forebay.workers.engines.vllm.engine import VllmEngine
from forebay.workers.kv_tiers.settings import TierSettings
from tests.engines.driven import Driven, driven
from tests.engines.vllm_settings import SPEC, settings

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]

PROMPTS = [[k, *(100 + (i * (k + 3)) % 251 for i in range(400))] for k in range(6)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def vllm(model: Path) -> AsyncIterator[Driven]:
    async with driven(VllmEngine(settings(model, tiers=TierSettings(host_bytes=1 << 28))), SPEC) as one:
        yield one


async def test_evicted_blocks_are_loaded_from_host_memory(vllm: Driven) -> None:
    first = [await vllm.ask(prompt, 40) for prompt in PROMPTS]
    again = [await vllm.ask(prompt, 40) for prompt in PROMPTS]
    assert [one.tokens for one in again] == [one.tokens for one in first]
    assert [one.cached for one in first] == [0] * len(PROMPTS)
    assert [one.cached for one in again] == [384] * len(PROMPTS)
    print([one for batch in vllm.batches for one in batch.first_tokens])
    print([c for batch in vllm.batches for c in batch.cache_changes][:5])
