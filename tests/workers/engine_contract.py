"""Contract of every engine: the cases that run on stand-ins and, in `tests/sglang`, on a real engine.

A module that imports them has a fixture `started`, which starts an engine with the sizes of `engine_setup`.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from forebay.engine_model.model import Stored
from tests.workers.engine_setup import BLOCK_SIZE, KV_BLOCKS, OTHER, PROMPT, Start, reported


async def test_engine_reports_its_sizes(started: Start) -> None:
    async with started() as one:
        assert one.spec.block_size == BLOCK_SIZE and "generate" in one.spec.tasks and one.spec.kv_events
        if one.spec.kv_blocks_total > 1:  # a mock's spec has them before
            assert (one.spec.kv_blocks_total, one.spec.max_num_seqs) == (KV_BLOCKS, 8)
            assert one.spec.max_num_batched_tokens == 64


async def test_response_is_streamed_and_ends(started: Start) -> None:
    async with started() as one:
        answer = await one.ask(PROMPT, 6)
        assert len(answer.tokens) == 6 and answer.finished is not None and answer.error is None
        end = answer.finished
        assert (end.reason, end.prompt_tokens, end.output_tokens) == ("length", len(PROMPT), 6)
        assert answer.cached == end.cached_tokens == 0
        await reported(one, one.blocks(PROMPT))  # an attached server's cached tokens are estimated from its KV events
        again = await one.ask(PROMPT, 6)
        # Of a prompt one token is always computed, and with it its block.
        assert again.finished is not None and again.cached == again.finished.cached_tokens == 2 * BLOCK_SIZE
    assert one.ended is None


async def test_cached_blocks_are_reported_once_and_held(started: Start) -> None:
    async with started() as one:
        await one.ask(PROMPT, 6)
        await reported(one, one.blocks(PROMPT))
        held = set(one.engine.held(0))  # no later batch repeats these
        one.held[0] = set(held)
        assert held >= one.blocks(PROMPT)
        generated = len(one.batches)
        branch = [*PROMPT[:8], *OTHER]
        await one.ask(branch, 2)
        await reported(one, one.blocks(branch))
        assert set(one.engine.held(0)) >= one.blocks(branch) | one.blocks(PROMPT)
        stored = [
            block
            for batch in one.batches[generated:]
            for change in batch.cache_changes
            if isinstance(change, Stored)
            for block in change.hashes
        ]
        assert len(stored) == len(set(stored)) and not set(stored) & held


async def test_tenants_share_no_blocks(started: Start) -> None:
    async with started() as one:
        await one.ask(PROMPT, 2)
        answer = await one.ask(PROMPT, 2, cache_namespace="tenant")
        assert answer.cached == 0
        mine = one.blocks(PROMPT, cache_namespace="tenant")
        await reported(one, mine | one.blocks(PROMPT))
        assert not mine & one.blocks(PROMPT)


async def test_evictions_are_reported(started: Start) -> None:
    async with started() as one:
        await one.ask(PROMPT, 2)
        await reported(one, one.blocks(PROMPT))
        for start in range(200, 440, 12):
            await one.ask(list(range(start, start + 12)), 1)
        await one.until(lambda: not one.blocks(PROMPT) & one.held[0])


async def test_cancelled_request_stops_and_others_continue(started: Start) -> None:
    async with started() as one:
        long = one.submit(one.item(PROMPT, 100))
        await one.until(lambda: long.tokens)
        one.engine.cancel(long.item.request_id)
        one.engine.cancel("unknown")
        others = await one.ask(OTHER, 8)
        assert len(others.tokens) == 8 and not long.over and len(long.tokens) < 100
        await one.until(lambda: one.batches[-1].load.running == 0)


async def test_request_restarts_after_a_reset(started: Start) -> None:
    async with started() as one:
        item = one.item(PROMPT, 80)
        first = one.submit(item)
        await one.until(lambda: first.tokens)
        one.engine.reset()
        generated = len(one.batches)
        one.held[0] = set(one.engine.held(0))  # an epoch begins with what is held
        second = one.submit(msgspec.structs.replace(item, attempt=2))
        await one.until(lambda: second.over)
        assert not first.over and second.error is None and len(second.tokens) == 80
        named = {chunk.attempt for batch in one.batches[generated:] for chunk in batch.emitted}
        assert named == {2}
        await reported(one, one.blocks(PROMPT))


async def test_unsupported_requests_fail_and_others_continue(started: Start) -> None:
    async with started() as one:
        long, unknown = await asyncio.gather(one.ask(list(range(400)), 2), one.ask(PROMPT, 2, lora_name="nobody"))
        assert long.error is not None and long.error.status == 400
        assert long.error.code == "context_length_exceeded"
        assert unknown.error is not None and unknown.error.status == 404
        assert (await one.ask(PROMPT, 3)).error is None


async def test_concurrent_requests(started: Start) -> None:
    async with started() as one:
        prompts: Sequence[list[int]] = [[*PROMPT[: 4 + at % 9], 300 + at] for at in range(24)]
        answers = await asyncio.gather(*(one.ask(prompt, 1 + at % 7) for at, prompt in enumerate(prompts)))
        assert [len(answer.tokens) for answer in answers] == [1 + at % 7 for at in range(24)]
        assert all(answer.error is None for answer in answers)
        await one.engine.check()
