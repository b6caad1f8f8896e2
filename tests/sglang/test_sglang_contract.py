"""The contract of every engine on a real SGLang: one engine, whose cache is cleared before each case."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from forebay.events.control import Command
from tests.engines.driven import Driven, driven
from tests.sglang.sglang_settings import ARGUMENTS, SPEC, sglang_engine
from tests.workers.engine_contract import (  # noqa: F401 - collected here
    test_cached_blocks_are_reported_once_and_held,
    test_cancelled_request_stops_and_others_continue,
    test_concurrent_requests,
    test_engine_reports_its_sizes,
    test_evictions_are_reported,
    test_request_restarts_after_a_reset,
    test_response_is_streamed_and_ends,
    test_tenants_share_no_blocks,
    test_unsupported_requests_fail_and_others_continue,
)
from tests.workers.engine_setup import BLOCK_SIZE, KV_BLOCKS, Start

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sglang(model: Path) -> AsyncIterator[Driven]:
    arguments = ARGUMENTS | {"context_length": 128}
    sizes = {"block_size": BLOCK_SIZE, "kv_blocks": KV_BLOCKS, "max_num_batched_tokens": 64}
    async with driven(sglang_engine(model, arguments=arguments, **sizes), SPEC) as one:
        yield one


@pytest.fixture
def started(sglang: Driven) -> Start:
    @asynccontextmanager
    async def start() -> AsyncIterator[Driven]:
        await sglang.engine.command(Command(action="clear_kv_blocks"))
        await sglang.until(lambda: not sglang.held[0])
        yield sglang

    return start
