"""`make demo-ledger`: the ledger equals what clients counted, to the token.

Starts Kafka, Redis, two routers, three mock workers, an ingress and two writers of the ledger. Clients send requests
and add up the `usage` of the responses. They repeat failed requests with the same idempotency key. Meanwhile a writer,
the owner and a worker are killed with SIGKILL in turn, and started again. At the end the routers stop as planned.
Exits 1 unless the bill has exactly the requests and the tokens that the clients counted, `forebay bill verify` derives
every record again without a difference, and every decision was derived equal.
"""

import argparse
import asyncio
import csv
import io
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from infra.kafka.kafka import HOST
from tests.benchmarks.http_load import Connection, connect
from tests.harness.cluster import FOREBAY, GROUP, Cluster
from tests.harness.demos import Demo, Place, Result
from tests.harness.failover import lost
from tests.harness.processes import ProcessError
from tests.integration.stream_clients import prompt

WORKERS = ("w1", "w2", "w3")
WRITERS = ("l1", "l2")
CONCURRENCY = 64
KILLS = 6  # of a writer, the owner and a worker in turn
BILLED_WITHIN_S = 600.0
TIMEOUT_S = 300.0
RETRY_S = 0.1
PROMPTS = 200  # different ones, so that many tokens are cached
SUMS = ("requests", "incomplete", "prompt_tokens", "cached_tokens", "output_tokens")
SPEEDUP = 100.0
DEMO = Demo("demo-ledger", __doc__)


@dataclass(slots=True, kw_only=True)
class LedgerResult(Result):
    """The result of the demo. `billed` has the sums of the ledger, without the requests that clients sent again."""

    requests: int
    counted: Counter[str] = field(default_factory=Counter)
    billed: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    kills: int = 0
    records: int = 0
    derived: int = 0

    def judge(self) -> None:
        """Add every unmet requirement to `problems`."""
        if self.counted["requests"] != self.requests:
            self.problems.append(f"{self.requests - self.counted['requests']} requests were not answered")
        for name in SUMS:
            if self.counted[name] != self.billed[name]:
                self.problems.append(f"clients counted {self.counted[name]} {name}, the bill has {self.billed[name]}")
        if self.derived != self.records or not self.records:
            self.problems.append(f"{self.derived} of {self.records} records of the ledger were derived again")
        self.judge_decisions(self.requests)

    def line(self) -> str:
        sums = ", ".join(f"{self.billed[name]} {name}" for name in SUMS if name != "incomplete")
        return (
            f"billed {sums}; {self.repeated} requests were sent again; {self.kills} kills, {self.records} records,"
            f" verified {self.verified} of {self.decisions}: {self.verdict}"
        )


class Clients:
    """Clients that send requests without streams, and count the usage in the responses.

    Attributes:
        counted: sums of the responses so far.
        repeated: number of times that a request failed, and was sent again.
    """

    def __init__(self, url: str) -> None:
        self.counted: Counter[str] = Counter()
        self.repeated = 0
        self._url = url

    async def run(self, requests: int) -> None:
        numbers = iter(range(requests))

        async def send() -> None:
            connection = await connect(self._url)
            try:
                for number in numbers:
                    await self._send(connection, number)
            finally:
                connection.close()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(CONCURRENCY, requests)):
                tasks.create_task(send())

    async def _send(self, connection: Connection, number: int) -> None:
        body = {"model": GROUP, "prompt": prompt(number % PROMPTS), "max_tokens": 1 + number % 16, "ignore_eos": True}
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        head += f"Idempotency-Key: {number}\r\n"  # a request that failed may be on the log: run and count it once
        request = f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw
        while True:
            async with asyncio.timeout(TIMEOUT_S):
                response = await connection.send(request)
            if response.status == "200":
                break
            if response.status < "500":
                raise ProcessError(f"request {number}: {response.received.decode()}")
            self.repeated += 1
            await asyncio.sleep(RETRY_S)
        usage = json.loads(response.received[response.body_at :])["usage"]
        found = {"prompt_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        self.counted.update(requests=1, cached_tokens=usage["prompt_tokens_details"]["cached_tokens"], **found)


class Scene:
    """A cluster with two writers of the ledger."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._worker = ("--speedup", str(SPEEDUP))

    async def start(self) -> None:
        await self._cluster.serve(("r1", "r2"), WORKERS, ("i1",), worker=self._worker)
        for name in WRITERS:
            self._start_writer(name)

    async def play(self, requests: int, kills: int) -> Clients:
        """Send requests, and kill a process each time that a share of them was answered."""
        clients = Clients(self._cluster.urls["i1"])
        running = asyncio.create_task(clients.run(requests))
        try:
            for number in range(kills):
                share = (number + 1) * requests // (kills + 1)

                def has_passed(share: int = share) -> bool:
                    return running.done() or clients.counted["requests"] >= share

                text = f"{share} requests were answered"
                await self._cluster.until(text, has_passed, within_s=TIMEOUT_S * kills)
                DEMO.report(f"kill -9 of {await self._kill(number)} after {clients.counted['requests']} requests")
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return clients

    async def stop(self) -> None:
        """Stop the owner and then the writers as planned, so that the ledger has everything."""
        for name in ("r1", "r2", *WRITERS):
            await self._cluster.stop(name)

    async def billed(self) -> Counter[str]:
        """Return the sums of the bills of the month of yesterday and of today, without incomplete requests."""
        now, found = datetime.now(UTC), Counter(dict.fromkeys(SUMS, 0))
        for month in {moment.strftime("%Y-%m") for moment in (now, now - timedelta(days=1))}:
            for row in csv.DictReader(io.StringIO(await self._bill("show", "--csv", "--month", month))):
                found.update({name: int(row[name]) for name in SUMS})
        found["requests"] -= found.pop("incomplete")  # without a stream, an incomplete response has no tokens
        return found

    async def verified(self) -> dict[str, Any]:
        """Verify the ledger, also against its own report, and return the report of the only chain."""
        anchor = self._cluster.processes.folder / "anchor"
        anchor.write_text(await self._bill("verify", "--json"))
        (report,) = json.loads(await self._bill("verify", "--json", "--anchor", str(anchor)))
        return dict(report)

    def _start_writer(self, name: str) -> None:
        self._cluster.processes.start(name, [FOREBAY, "ledger", *self._cluster.where, "--every-s", "1"])

    async def _kill(self, number: int) -> str:
        """Kill a writer, the owner or a worker, and start it again. Return what was killed."""
        cluster = self._cluster
        kind, at = number % 3, number // 3
        if kind == 0:
            name = WRITERS[at % len(WRITERS)]
            cluster.kill(name)
            self._start_writer(name)
            return f"writer {name}"
        if kind == 1:
            name = await cluster.owner()
            cluster.kill(name)
            await cluster.until("the standby owns the group", cluster.owner, lambda owner: owner != name)
            cluster.router(name)
            return f"owner {name}"
        name = WORKERS[at % len(WORKERS)]
        cluster.kill(name)
        await lost(cluster, name)
        cluster.worker(name, *self._worker)
        return f"worker {name}"

    async def _bill(self, action: str, *arguments: str) -> str:
        return await self._cluster.printed(f"bill-{action}", "bill", action, *arguments, within_s=BILLED_WITHIN_S)


async def outcome(cluster: Cluster, requests: int, kills: int) -> LedgerResult:
    """Run the demo on a cluster in which nothing runs yet."""
    result, scene = LedgerResult(requests=requests, kills=kills), Scene(cluster)
    await scene.start()
    clients = await scene.play(requests, kills)
    await scene.stop()
    result.counted, result.repeated = clients.counted, clients.repeated
    result.billed = await scene.billed()
    report = await scene.verified()
    result.records, result.derived = report["records"], report["derived"]
    result.problems += report["differences"]
    await result.verify(cluster)
    result.judge()
    return result


async def run(place: Place, options: argparse.Namespace) -> LedgerResult:
    async with place.cluster() as cluster:
        DEMO.report(f"2 routers, {len(WORKERS)} workers, an ingress and 2 writers start; logs in {place.folder}")
        return await outcome(cluster, options.requests, KILLS)


def main() -> int:
    DEMO.add("--requests", type=int, default=5_000, metavar="N", help="(default %(default)s)")
    return DEMO.run(run)


if __name__ == "__main__":
    sys.exit(main())
