"""Duration of decode requests on a vLLM engine, with a stand-in."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forebay.workers.engines.vllm import transfer as vllm_transfer
from tests.workers.test_vllm_disagg import Llm, item, kept, output, running


async def test_response_may_outlast_the_lease_after_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = Llm()
    leases: list[asyncio.Timeout] = []
    began = asyncio.Event()
    limited = asyncio.timeout

    def timeout(delay_s: float | None) -> asyncio.Timeout:
        limit = limited(delay_s)
        if delay_s == kept().lease_us / 1e6 + vllm_transfer.UNREAD_S:
            leases.append(limit)
        return limit

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        assert [lease.when() is None for lease in leases] == [False]
        yield output([5], None)
        assert [lease.when() for lease in leases] == [None], "the first token is there"
        began.set()
        yield output([6], "length")

    async with running(llm, monkeypatch) as one:
        monkeypatch.setattr(llm, "generate", generate)
        monkeypatch.setattr(asyncio, "timeout", timeout)
        assert (await one.end(item("decode", kept()))).output_tokens == 2
        assert began.is_set()
