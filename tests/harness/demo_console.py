"""`make demo-console`: look at an incident in the console.

Starts Kafka, Redis, an ingress, two routers, mock workers and a console, plays a trace, kills a worker and later the
router that owns the group with SIGKILL, checks that the console shows both, and leaves the console open. Exits 1 if the
console does not show the incident. Kafka and Redis of your own: FOREBAY_KAFKA (host:port) and FOREBAY_REDIS (URL).
"""

import argparse
import asyncio
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from forebay.simulate.reading import open_workload
from forebay.simulate.workload import WorkloadOptions
from tests.harness.cluster import Cluster, remove_topics
from tests.harness.demo_kafka import SEED, write_trace
from tests.harness.demos import demo
from tests.harness.local import free_ports

TOKEN = "demo"  # the console listens on loopback, and ends with the demo
SHOWN_WITHIN_S = 30.0
ANSWERED_WITHIN_S = 300.0
BEFORE_US = 1_000_000  # the page opens this long before the worker was lost


@dataclass(slots=True)
class Result:
    worker: str = ""
    owner: str = ""
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        verdict = f"FAILED ({'; '.join(self.problems)})" if self.problems else "ok"
        return f"the console showed the loss of worker {self.worker} and the takeover from {self.owner}: {verdict}"


def report(text: str) -> None:
    """Print a line of progress."""
    print(f"demo-console: {text}", flush=True)


async def play(cluster: Cluster, trace: Path, total: int, result: Result) -> None:
    """Play the trace, kill a worker after a third of its `total` requests and the owner after two thirds."""
    cluster.begin("trace", "trace", str(trace), "--json", "--url", next(iter(cluster.urls.values())))

    async def routed(share: float) -> None:
        async def reached() -> int | None:
            count = await cluster.routed()
            return count if count >= total * share else None

        await cluster.processes.until(f"{share:.0%} of the requests are routed", reached, within_s=ANSWERED_WITHIN_S)

    await routed(1 / 3)
    result.worker = "w2"
    cluster.kill(result.worker)
    report(f"kill -9 of worker {result.worker}")
    await routed(2 / 3)
    owner = await cluster.owner()
    assert owner is not None, "requests were routed"
    result.owner = owner
    cluster.kill(owner)
    report(f"kill -9 of {owner}, which owns the group")
    await cluster.taken_over(owner, within_s=60.0)
    await cluster.finish("trace", within_s=ANSWERED_WITHIN_S)


async def shown(url: str, worker: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Wait until the console has markers of the loss and of the takeover, and return these markers."""
    async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}) as client:
        async with asyncio.timeout(SHOWN_WITHIN_S):
            while True:
                found = (await client.get("/v1/console/markers")).raise_for_status().json()["markers"]
                lost = [one for one in found if one["kind"] == "worker_lost" and worker in one["text"]]
                takeovers = [one for one in found if one["kind"] == "takeover"]
                if lost and len(takeovers) > 1:
                    return lost[0], takeovers[-1]
                await asyncio.sleep(0.2)


async def check(url: str, lost: dict[str, Any], takeover: dict[str, Any], result: Result) -> None:
    """Check that the fleet at both moments shows what happened."""
    async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60) as client:

        async def fleet(at_us: int) -> dict[str, Any]:
            reply = await client.get("/v1/console/fleet", params={"at_us": at_us})
            found: dict[str, Any] = reply.raise_for_status().json()
            return found

        before, after = await fleet(lost["at_us"] - BEFORE_US), await fleet(lost["at_us"] + 1)
        names = [{one["worker_id"] for one in moment["status"]["workers"]} for moment in (before, after)]
        if result.worker not in names[0] or result.worker in names[1]:
            result.problems.append(f"{result.worker} must be in the fleet before its loss and not after it")
        later = await fleet(takeover["at_us"] + BEFORE_US)
        owners = [moment["status"]["owner"]["owner_id"] for moment in (before, later)]
        if owners[0] != result.owner or owners[1] == result.owner:
            result.problems.append(f"expected another owner than {result.owner} after the takeover, got {owners}")


async def run(kafka: str, redis_url: str, folder: Path, options: argparse.Namespace, *, keep: bool) -> Result:
    trace = folder / "trace.jsonl"
    write_trace(trace, SEED)
    token_file = folder / "console-token"
    token_file.write_text(TOKEN)
    total = open_workload(str(trace), WorkloadOptions()).survey().requests
    result, namespace = Result(), f"demo-{uuid.uuid4().hex[:8]}"
    port = options.port or free_ports(1)
    url = f"http://127.0.0.1:{port}"
    try:
        async with Cluster(kafka, redis_url, namespace, folder) as cluster:
            for name in ("r1", "r2"):
                cluster.router(name)
            for number in range(options.workers):
                cluster.worker(f"w{number + 1}", "--speedup", "4")
            ingress = cluster.ingress("i1")
            await cluster.until_serving(options.workers)
            options_of_console = ("--kafka", kafka, "--namespace", namespace, "--port", str(port))
            given = ("--cache-dir", str(folder), "--token-file", str(token_file), "--url", ingress)
            cluster.begin("console", "console", *options_of_console, *given)
            report(f"two routers, {options.workers} mock workers, an ingress and a console run; logs in {folder}")
            await play(cluster, trace, total, result)
            lost, takeover = await shown(url, result.worker)
            await check(url, lost, takeover, result)
            if not result.problems and not options.exit:
                at_us = lost["at_us"] - BEFORE_US
                report(
                    f"open {url}/#/fleet?at={at_us}&token={TOKEN} for the second before worker {result.worker} was lost"
                )
                report(f"the admin token for actions is in {folder / 'admin-token'}; stop with Ctrl-C")
                await asyncio.Event().wait()
    finally:
        if not keep:
            await remove_topics(kafka, namespace)
    return result


def main() -> int:
    """Run the demo of the command line.

    Returns:
        Exit code: 0 on success, 1 if the console did not show the incident, 2 if the demo could not run.
    """
    parser = argparse.ArgumentParser(prog="demo-console", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=4, choices=range(2, 17), metavar="2-16", help="(%(default)s)")
    parser.add_argument("--port", type=int, default=8100, help="port of the console (default %(default)s)")
    parser.add_argument("--exit", action="store_true", help="end after the checks")
    options = parser.parse_args()
    return demo(report, lambda kafka, redis_url, folder, keep: run(kafka, redis_url, folder, options, keep=keep))


if __name__ == "__main__":
    sys.exit(main())
