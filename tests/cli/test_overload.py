"""Under overload each request is answered or rejected in time."""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.cli.up import Up, running

PATIENCE_S = 120.0
OFFERED = 150

pytestmark = pytest.mark.timeout(240)


async def one(client: httpx.AsyncClient, up: Up, number: int) -> httpx.Response:
    body: dict[str, Any] = {"model": "forebay-default", "prompt": f"request {number}", "max_tokens": 40}
    return await client.post(f"{up.url}/v1/completions", json=body)


async def offer(up: Up) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
        return await asyncio.gather(*(one(client, up, number) for number in range(OFFERED)))


def metric(up: Up, name: str) -> float:
    lines = httpx.get(f"{up.url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.slow
def test_every_request_is_answered_or_rejected_with_retry_after() -> None:
    limits = ("--max-num-seqs", "1", "--router-queue-depth", "1", "--router-queue-timeout-secs", "2")
    with running("--workers", "1", "--speedup", "1", *limits) as up:
        answers = asyncio.run(offer(up))
        statuses = Counter(answer.status_code for answer in answers)
        assert set(statuses) <= {200, 429, 503}
        assert statuses[200] >= 1
        assert statuses[429] >= 1, "more came than may run and wait: 2 and 64"
        assert statuses[503] >= 1, "one at a time, 64 requests of 40 tokens do not run in two seconds"
        refused = [answer for answer in answers if answer.status_code != 200]
        assert {answer.json()["error"]["code"] for answer in refused} <= {"pool_full", "queue_timeout", "overloaded"}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert metric(up, "forebay_owner_requests_in_flight") == 0
        assert metric(up, "forebay_ingress_requests_in_flight") == 0
        assert metric(up, "forebay_router_requests_aborted_total") == sum(
            answer.json()["error"]["code"] == "queue_timeout" for answer in refused
        )
