"""After `kill -9` and a restart, the router still knows every cached prefix from the first request on."""

import asyncio
import contextlib
import json
import signal
from pathlib import Path

import httpx
import pytest

from tests.cli.in_process import forebay
from tests.cli.up import PATIENCE_S, Up, running, verified

WORKERS, PREFIXES = 8, 40
BLOCK = 64  # tokens, the default of workers
BLOCKS = 6  # per prompt
TOKEN_IDS = 1_000  # valid in every vocabulary
IDLE = 'forebay_owner_requests_in_flight{model="forebay-default"} 0.0'

pytestmark = pytest.mark.timeout(180)


def prompt(number: int) -> list[int]:
    """Return a prompt whose first block is unique to `number`."""
    return [(number * 7_919 + place * (number % 13 + 1)) % TOKEN_IDS for place in range(BLOCKS * BLOCK + 1)]


async def answered(client: httpx.AsyncClient, number: int) -> tuple[str, int]:
    """Complete a prompt. Return the worker and the number of cached prompt tokens."""
    body = {"model": "forebay-default", "prompt": prompt(number), "max_tokens": 1}
    answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    return answer["forebay"]["worker"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def one_by_one(up: Up) -> list[tuple[str, int]]:
    """Complete all prompts one by one, so that load does not affect routing."""
    found = []
    async with httpx.AsyncClient(base_url=up.url, timeout=PATIENCE_S) as client:
        for number in range(PREFIXES):
            found.append(await answered(client, number))
            await idle(client)
    return found


async def idle(client: httpx.AsyncClient) -> None:
    """Wait until the owner has applied the end of every request."""
    async with asyncio.timeout(PATIENCE_S):
        while IDLE not in (await client.get("/metrics")).text:  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.002)


async def spread(up: Up) -> list[tuple[str, int]]:
    """Complete all prompts concurrently, so that load spreads them over the workers."""
    async with httpx.AsyncClient(base_url=up.url, timeout=PATIENCE_S) as client:
        found = await asyncio.gather(*(answered(client, number) for number in range(PREFIXES)))
        await idle(client)
    return found


def test_all_prefixes_are_found_after_kill_9_and_every_decision_is_verified(tmp_path: Path) -> None:
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


def test_requests_in_flight_survive_a_restart_of_all_workers(tmp_path: Path) -> None:
    """All workers of the old process are lost together, which costs each request one attempt."""
    log = tmp_path / "log.db"
    options = ("--log", str(log), "--workers", "4")

    async def begun(client: httpx.AsyncClient, number: int, chunks: asyncio.Queue[str]) -> None:
        body = {"model": "forebay-default", "prompt": prompt(number), "max_tokens": 500, "stream": True}
        with contextlib.suppress(httpx.HTTPError):  # the server is killed
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        chunks.put_nowait(json.loads(line.removeprefix("data: "))["id"])

    async def killed_in_flight(up: Up) -> set[str]:
        chunks: asyncio.Queue[str] = asyncio.Queue()
        async with httpx.AsyncClient(base_url=up.url, timeout=PATIENCE_S) as client, asyncio.TaskGroup() as clients:
            for number in range(8):
                clients.create_task(begun(client, number, chunks))
            request_ids: set[str] = set()
            while len(request_ids) < 8:
                request_ids.add(await chunks.get())
            up.end(signal.SIGKILL)
        return request_ids

    async def finished(up: Up) -> None:
        async with httpx.AsyncClient(base_url=up.url, timeout=PATIENCE_S) as client:
            await answered(client, 9)
            await idle(client)

    with running(*options) as up:
        request_ids = asyncio.run(killed_in_flight(up))
    with running(*options) as up:
        asyncio.run(finished(up))
        up.end(signal.SIGTERM)
    found = [json.loads(forebay("explain", str(log), name, "--json").stdout) for name in request_ids]
    assert [(one["state"], len(one["routings"])) for one in found] == [("finished", 2)] * 8
