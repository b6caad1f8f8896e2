"""`make demo-tenants`: tenants get their shares, and keep within their limits.

Two tenants with weights 3 and 1 send together at least 5 times what two mock workers can serve. A third one sends a few
requests, alone and beside a flood; then its key is revoked. A fourth one sends as many as its limit admits to two
ingresses, while Redis is killed with SIGKILL and started empty. All prompts are different.

Exits 1 unless the served shares are within 10 % of the weights, the first tokens beside a flood come within their p99
alone plus the time that a request may wait in the queue, both ingresses reject the revoked key within 2 s, the limit is
exceeded by at most 10 % in any minute, and every decision was derived equal.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from tests.harness.cluster import GROUP, Cluster
from tests.harness.demos import Demo, Place, Result
from tests.harness.local import StoppableRedis, stoppable_redis

WORKERS = ("w1", "w2")
SEQUENCES = 4  # of each worker
WORKER = ("--max-num-seqs", str(SEQUENCES), "--speedup", "0.125")
QUEUE_S = 2.0  # for which a request may wait in the router's queue
ROUTER = ("--router-queue-run-ahead", "0", "--router-queue-timeout-secs", f"{QUEUE_S:g}")
WEIGHTS = {"gold": 3, "silver": 1}
PROMPT, OUTPUT, TOKEN_IDS = 129, 16, 1_000  # tokens of a prompt, of an output, and valid in every vocabulary
OVERLOAD = 5.0
OFFERED = 6.5  # times the measured capacity, which is not exact
SATURATED_S, SHARES_S, QUIET_S = 6.0, 30.0, 25.0
QUIET_EVERY_S = 0.5
REVOKED_S = 2.0
COMMAND_S = 30.0
RPM, LIMITED_S = 240, 76.0
KILLED_S, STARTED_S = 20.0, 40.0  # after the first request of the tenant with a limit
CLIENTS, AGAIN_S = 8, 0.2  # of the tenant with a limit, each of which waits so long after a rejection
WINDOW_S = 60.0
LEAST = 0.9  # share that must be reached of what a limit allows, so that the demo shows the limit and not idleness
EXCESS = 0.1
TIMEOUT_S = 60.0
DEMO = Demo("demo-tenants", __doc__)


@dataclass(slots=True)
class Answer:
    """One response. `ttft_s` is None if it has no token."""

    sent_s: float
    status: int = 0
    ended_s: float = 0.0
    ttft_s: float | None = None
    cached_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class TenantsResult(Result):
    """The result of the demo. Times are seconds, and `served` counts the answers of each tenant under overload."""

    offered: int = 0
    served: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    alone: list[Answer] = field(default_factory=list)
    flooded: list[Answer] = field(default_factory=list)
    revoked_s: float = math.inf
    in_a_minute: int = 0

    def judge(self) -> None:
        """Add every unmet requirement to `problems`."""
        all_served = self.served.total()
        if not all_served or self.offered < OVERLOAD * all_served:
            self.problems.append(f"{self.offered} requests are no {OVERLOAD:g}-fold overload of {all_served}")
        for name, weight in WEIGHTS.items():
            due = weight / sum(WEIGHTS.values())
            if abs(self.served[name] - due * all_served) > EXCESS * due * all_served:
                self.problems.append(f"{name} was served {self.served[name]} of {all_served} instead of {due:.0%}")
        if self.cached_tokens:
            self.problems.append(f"{self.cached_tokens} tokens of different prompts were cached")
        rejected = sum(one.ttft_s is None for one in (*self.alone, *self.flooded))
        if rejected or p99(self.flooded) > p99(self.alone) + QUEUE_S:
            self.problems.append(f"beside a flood, a tenant waited, and {rejected} of its requests were rejected")
        if self.revoked_s > REVOKED_S:
            self.problems.append(f"a revoked key was accepted for {self.revoked_s:.2f} s")
        if not LEAST * RPM <= self.in_a_minute <= (1 + EXCESS) * RPM:
            self.problems.append(f"{self.in_a_minute} requests were admitted in a minute, and the limit is {RPM}")
        self.judge_decisions(all_served)

    def line(self) -> str:
        all_served = max(1, self.served.total())
        shares = " and ".join(f"{name} {self.served[name] / all_served:.3f}" for name in WEIGHTS)
        return (
            f"overload {self.offered / all_served:.1f}, served {shares}; first token p99 {p99(self.alone):.3f} s alone"
            f" and {p99(self.flooded):.3f} s beside a flood (bar {p99(self.alone) + QUEUE_S:.3f} s); revoked after"
            f" {self.revoked_s:.2f} s; at most {self.in_a_minute} requests per minute of {RPM} with Redis killed;"
            f" verified {self.verified} of {self.decisions}: {self.verdict}"
        )


def p99(answers: Sequence[Answer]) -> float:
    times = sorted(math.inf if one.ttft_s is None else one.ttft_s for one in answers)
    return times[math.ceil(0.99 * len(times)) - 1] if times else math.inf


class Scene:
    """A cluster that requires keys, and clients of its tenants."""

    def __init__(self, cluster: Cluster, redis: StoppableRedis, client: httpx.AsyncClient) -> None:
        self._cluster = cluster
        self._redis = redis
        self._client = client
        self._random = Random(0)
        self._turns = itertools.count()

    async def start(self) -> None:
        await self._cluster.serve(
            ("r1",), WORKERS, ("i1", "i2"), router=ROUTER, worker=WORKER, ingress=("--require-key",)
        )

    async def key(self, tenant: str, *options: str) -> tuple[str, str]:
        """Create a key that all ingresses know, and return its id and the key."""
        key = (await self._keys("create", "--tenant", tenant, *options)).strip()
        listed = map(json.loads, (await self._keys("list", "--json")).splitlines())
        (key_id,) = [one["key_id"] for one in listed if one["tenant"] == tenant]

        async def is_known() -> bool:
            return all([await self._status(url, key) == httpx.codes.OK for url in self._cluster.urls.values()])

        await self._cluster.until(f"all ingresses know the key of {tenant}", is_known)
        return key_id, key

    async def capacity(self, key: str) -> float:
        """Return how many requests per second the workers serve."""
        until_s, answers = time.monotonic() + SATURATED_S, list[Answer]()

        async def send() -> None:
            while time.monotonic() < until_s:
                answers.append(await self._send(key))

        began_s = time.monotonic()
        await asyncio.gather(*(send() for _ in range(4 * SEQUENCES)))
        return sum(one.status == httpx.codes.OK for one in answers) / (time.monotonic() - began_s)

    async def offer(self, keys: Sequence[str], per_s: float, for_s: float) -> list[list[Answer]]:
        """Send requests of the keys in turn at this rate, and return the answers of each key."""
        began_s, sent = time.monotonic(), [list[asyncio.Task[Answer]]() for _ in keys]
        for number in range(int(per_s * for_s)):
            await asyncio.sleep(began_s + number / per_s - time.monotonic())
            sent[number % len(keys)].append(asyncio.create_task(self._send(keys[number % len(keys)])))
        return [list(await asyncio.gather(*tasks)) for tasks in sent]

    async def revoke(self, key_id: str, key: str) -> float:
        """Revoke a key, and return the seconds from the end of the command until no ingress accepts it."""
        await self._keys("revoke", key_id)
        began_s = time.monotonic()

        async def is_rejected() -> bool:
            return all([await self._status(url, key) == 401 for url in self._cluster.urls.values()])

        await self._cluster.until("both ingresses reject the revoked key", is_rejected)
        return time.monotonic() - began_s

    async def limited(self, key: str) -> list[Answer]:
        """Send as much as a limit admits while Redis is killed and started, and return the admitted ones."""
        began_s, answers = time.monotonic(), list[Answer]()

        async def send() -> None:
            while time.monotonic() < began_s + LIMITED_S:
                answers.append(await self._send(key, output=1))
                if answers[-1].status != httpx.codes.OK:
                    await asyncio.sleep(AGAIN_S)

        clients = [asyncio.create_task(send()) for _ in range(CLIENTS)]
        for after_s, act in ((KILLED_S, self._redis.stop), (STARTED_S, self._redis.start)):
            await asyncio.sleep(began_s + after_s - time.monotonic())
            await asyncio.to_thread(act)
        await asyncio.gather(*clients)
        return [one for one in answers if one.status == httpx.codes.OK]

    async def _send(self, key: str, output: int = OUTPUT) -> Answer:
        urls, answer = list(self._cluster.urls.values()), Answer(time.monotonic())
        body = {
            "model": GROUP,
            "prompt": self._random.choices(range(TOKEN_IDS), k=PROMPT),
            "max_tokens": output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        url = f"{urls[next(self._turns) % len(urls)]}/v1/completions"
        async with self._client.stream("POST", url, json=body, headers=_headers(key)) as response:
            answer.status = response.status_code
            async for line in response.aiter_lines():
                if answer.status == httpx.codes.OK and line.startswith("data: {"):
                    _record(answer, json.loads(line.removeprefix("data: ")))
        answer.ended_s = time.monotonic()
        return answer

    async def _status(self, url: str, key: str) -> int:
        return (await self._client.get(f"{url}/v1/models", headers=_headers(key))).status_code

    async def _keys(self, action: str, *arguments: str) -> str:
        return await self._cluster.printed(f"keys-{action}", "keys", action, *arguments, within_s=COMMAND_S)


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _record(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        answer.status = httpx.codes.INTERNAL_SERVER_ERROR
    elif chunk["choices"] and answer.ttft_s is None:
        answer.ttft_s = time.monotonic() - answer.sent_s
    elif chunk.get("usage"):
        answer.cached_tokens = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]


async def outcome(scene: Scene, report: Callable[[str], None]) -> TenantsResult:
    """Run the demo in a scene that has started."""
    result = TenantsResult()
    keys = {name: (await scene.key(name, "--weight", str(weight)))[1] for name, weight in WEIGHTS.items()}
    per_s = OFFERED * await scene.capacity(keys["gold"])
    report(f"the tenants {' and '.join(WEIGHTS)} send {per_s:.0f} requests/s together for {SHARES_S:g} s")
    began_s = time.monotonic()
    offered = dict(zip(WEIGHTS, await scene.offer(list(keys.values()), per_s, SHARES_S), strict=True))
    # Requests that were sent early were served at once, and late ones are still queued when the load ends.
    first_s, last_s = began_s + QUEUE_S, began_s + SHARES_S
    result.offered = sum(first_s <= one.sent_s < last_s for answers in offered.values() for one in answers)
    for name, answers in offered.items():
        result.served[name] = sum(one.status == 200 and first_s <= one.ended_s < last_s for one in answers)
    quiet_id, quiet = await scene.key("quiet")
    report(f"a tenant sends {1 / QUIET_EVERY_S:g} requests/s, first alone")
    (result.alone,) = await scene.offer([quiet], 1 / QUIET_EVERY_S, QUIET_S)
    flood = asyncio.create_task(scene.offer([keys["silver"]], per_s, QUIET_S + QUEUE_S))
    await asyncio.sleep(QUEUE_S)
    (result.flooded,) = await scene.offer([quiet], 1 / QUIET_EVERY_S, QUIET_S)
    everything = [*itertools.chain(*offered.values(), *await flood), *result.alone, *result.flooded]
    result.cached_tokens = sum(one.cached_tokens for one in everything)
    result.revoked_s = await scene.revoke(quiet_id, quiet)
    report(f"a key was revoked; a tenant with {RPM} requests per minute sends as many as it can, Redis is killed")
    admitted = await scene.limited((await scene.key("limited", "--rpm", str(RPM)))[1])
    times = [one.sent_s for one in admitted]
    result.in_a_minute = max(sum(one <= other < one + WINDOW_S for other in times) for one in times)
    return result


async def run(place: Place, _: argparse.Namespace) -> TenantsResult:
    with stoppable_redis(place.folder) as redis:
        own = dataclasses.replace(place, redis_url=redis.url)
        limits = httpx.Limits(max_connections=None)
        async with own.cluster() as cluster, httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
            DEMO.report(f"a router, {len(WORKERS)} workers and 2 ingresses start; logs in {place.folder}")
            scene = Scene(cluster, redis, client)
            await scene.start()
            result = await outcome(scene, DEMO.report)
            await result.verify(cluster)
    result.judge()
    return result


def main() -> int:
    return DEMO.run(run)


if __name__ == "__main__":
    sys.exit(main())
