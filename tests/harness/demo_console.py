"""`make demo-console`: look at an incident in the console.

Starts Kafka, Redis, an ingress, two routers, mock workers and a console, plays a trace, kills a worker and later the
router that owns the group with SIGKILL, checks that the console shows both, and leaves the console open. Exits 1 if the
console does not show the incident. Kafka and Redis of your own: FOREBAY_KAFKA (host:port) and FOREBAY_REDIS (URL).
"""

import argparse
import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.harness.cluster import Cluster
from tests.harness.demo_kafka import trace_of
from tests.harness.demos import ANSWERED_WITHIN_S, Demo, Place, begin_trace, until_routed
from tests.harness.demos import Result as DemoResult
from tests.harness.local import free_ports

TOKEN = "demo"  # the console listens on loopback, and ends with the demo
KILLED = "w2"
SHOWN_WITHIN_S = 30.0
BEFORE_US = 1_000_000  # the page opens this long before the worker was lost
DEMO = Demo("demo-console", __doc__)


@dataclass(slots=True)
class Result(DemoResult):
    owner: str = ""

    def line(self) -> str:
        return f"the console showed the loss of worker {KILLED} and the takeover from {self.owner}: {self.verdict}"


async def play(cluster: Cluster, trace: Path, total: int, result: Result) -> None:
    """Play the trace, kill a worker after a third of its `total` requests and the owner after two thirds."""
    begin_trace(cluster, trace)
    await until_routed(cluster, total / 3)
    cluster.kill(KILLED)
    DEMO.report(f"kill -9 of worker {KILLED}")
    await until_routed(cluster, total * 2 / 3)
    result.owner = owner = await cluster.owner()
    cluster.kill(owner)
    DEMO.report(f"kill -9 of {owner}, which owns the group")
    await cluster.taken_over(owner, within_s=60.0)
    await cluster.finish("trace", within_s=ANSWERED_WITHIN_S)


async def shown(client: httpx.AsyncClient) -> tuple[dict[str, Any], dict[str, Any]]:
    """Wait until the console has markers of the loss and of the takeover, and return these markers."""
    async with asyncio.timeout(SHOWN_WITHIN_S):
        while True:
            found = (await client.get("/v1/console/markers")).raise_for_status().json()["markers"]
            lost = [one for one in found if one["kind"] == "worker_lost" and KILLED in one["text"]]
            takeovers = [one for one in found if one["kind"] == "takeover"]
            if lost and len(takeovers) > 1:
                return lost[0], takeovers[-1]
            await asyncio.sleep(0.2)


async def check(client: httpx.AsyncClient, lost: dict[str, Any], takeover: dict[str, Any], result: Result) -> None:
    """Check that the fleet at both moments shows what happened."""

    async def status(at_us: int) -> dict[str, Any]:
        reply = await client.get("/v1/console/fleet", params={"at_us": at_us})
        found: dict[str, Any] = reply.raise_for_status().json()["status"]
        return found

    before, after = await status(lost["at_us"] - BEFORE_US), await status(lost["at_us"] + 1)
    names = [{one["worker_id"] for one in moment["workers"]} for moment in (before, after)]
    if KILLED not in names[0] or KILLED in names[1]:
        result.problems.append(f"{KILLED} must be in the fleet before its loss and not after it")
    later = await status(takeover["at_us"] + BEFORE_US)
    owners = [moment["owner"]["owner_id"] for moment in (before, later)]
    if owners[0] != result.owner or owners[1] == result.owner:
        result.problems.append(f"expected another owner than {result.owner} after the takeover, got {owners}")


async def run(place: Place, options: argparse.Namespace) -> Result:
    trace, total = trace_of(place.folder)
    token_file = place.folder / "console-token"
    token_file.write_text(TOKEN)
    result, port = Result(), options.port or free_ports(1)
    url = f"http://127.0.0.1:{port}"
    async with (
        place.cluster() as cluster,
        httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60) as client,
    ):
        workers = [f"w{number + 1}" for number in range(options.workers)]
        await cluster.serve(("r1", "r2"), workers, worker=("--speedup", "4"))
        given = ("--cache-dir", str(place.folder), "--token-file", str(token_file), "--url", cluster.urls["i1"])
        cluster.begin("console", "console", *cluster.where, "--port", str(port), *given)
        DEMO.report(
            f"two routers, {options.workers} mock workers, an ingress and a console run; logs in {place.folder}"
        )
        await play(cluster, trace, total, result)
        lost, takeover = await shown(client)
        await check(client, lost, takeover, result)
        if not result.problems and not options.exit:
            at_us = lost["at_us"] - BEFORE_US
            DEMO.report(f"open {url}/#/fleet?at={at_us}&token={TOKEN} for the second before worker {KILLED} was lost")
            DEMO.report(f"the admin token for actions is in {place.folder / 'admin-token'}; stop with Ctrl-C")
            await asyncio.Event().wait()
    return result


def main() -> int:
    DEMO.add("--workers", type=int, default=4, choices=range(2, 17), metavar="2-16", help="(%(default)s)")
    DEMO.add("--port", type=int, default=8100, help="port of the console (default %(default)s)")
    DEMO.add("--exit", action="store_true", help="end after the checks")
    return DEMO.run(run)


if __name__ == "__main__":
    sys.exit(main())
