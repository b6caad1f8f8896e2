"""Forty of forty: what was warm before `kill -9` is warm for the router that comes after, at the first request."""

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from tests.cli.test_up import PATIENCE_S, Up, running, verified

WORKERS, PREFIXES = 8, 40
BLOCK = 64  # tokens, as workers have it by default
BLOCKS = 6  # of a prompt
TOKEN_IDS = 1_000  # every vocabulary has the lowest ids
IDLE = 'forebay_owner_requests_under_way{model="forebay-default"} 0.0'

pytestmark = pytest.mark.timeout(180)


def prompt(number: int) -> list[int]:
    """A prompt of its own: another number gives another first block."""
    return [(number * 7_919 + place * (number % 13 + 1)) % TOKEN_IDS for place in range(BLOCKS * BLOCK + 1)]


async def answered(client: httpx.AsyncClient, number: int) -> tuple[str, int]:
    """The worker that answered a prompt, and how many of its tokens it had cached."""
    body = {"model": "forebay-default", "prompt": prompt(number), "max_tokens": 1}
    answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    return answer["forebay"]["worker"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def one_by_one(up: Up) -> list[tuple[str, int]]:
    """All prompts, each when the answer before it has ended for the owner: load decides nothing."""
    found = []
    async with httpx.AsyncClient(base_url=up.url, timeout=PATIENCE_S) as client:
        for number in range(PREFIXES):
            found.append(await answered(client, number))
            await idle(client)
    return found


async def idle(client: httpx.AsyncClient) -> None:
    """Wait until the owner knows that every answer ended."""
    async with asyncio.timeout(PATIENCE_S):
        while IDLE not in (await client.get("/metrics")).text:  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.002)


async def spread(up: Up) -> list[tuple[str, int]]:
    """All prompts at once, so that load spreads them, until the owner knows that every answer ended."""
    async with httpx.AsyncClient(base_url=up.url, timeout=PATIENCE_S) as client:
        found = await asyncio.gather(*(answered(client, number) for number in range(PREFIXES)))
        await idle(client)
    return found


def test_40_of_40_after_kill_9_and_each_decision_is_derived_again(tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    options = ("--log", str(log), "--workers", str(WORKERS))
    with running(*options) as up:
        cold = asyncio.run(spread(up))
        assert [cached for _, cached in cold] == [0] * PREFIXES
        homes = [worker for worker, _ in cold]
        assert set(homes) == {f"mock-{number}" for number in range(WORKERS)}
        assert up.end(signal.SIGKILL) == -signal.SIGKILL
    with running(*options) as up:
        warm = asyncio.run(one_by_one(up))
        assert warm == [(home, BLOCKS * BLOCK) for home in homes]
        assert up.end(signal.SIGKILL) == -signal.SIGKILL
    report = verified(log)
    assert (report["decisions"], report["claims"]) == (2 * PREFIXES, 2)
    assert verified(log, 12345) == report
