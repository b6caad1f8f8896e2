"""`make demo-tiers`: mock workers reuse KV from memory, disks, a shared directory and a bucket, while these fail.

Starts Kafka, Redis, an S3 server, a router, an ingress and four mock workers with real bytes in their tiers. Clients
hold conversations, while block files and objects are truncated, flipped and deleted, and while the bucket denies access
and then stops. Then one worker is killed and restarted with its disk, and new workers replace all others, so that they
load what those computed. A mock worker checks every byte that it loads, and ends if one is wrong. Exits 1 unless every
answer is exact, every decision was verified, and hits from host memory, disk and both stores were seen. Kafka and Redis
of your own: FOREBAY_KAFKA (host:port) and FOREBAY_REDIS (URL), as for `make demo-kafka`.
"""

import argparse
import asyncio
import sys
from dataclasses import dataclass, field

from tests.harness.demos import Demo, Place, positive
from tests.harness.demos import Result as DemoResult
from tests.harness.s3 import faulty_s3
from tests.harness.tier_system import Reuse, TierSystem
from tests.integration.stream_clients import StreamResult, stream_clients

ON_DIRECTORY, ON_BUCKET = ("w1", "w2"), ("w3", "w4")
# A worker with host memory copies most blocks there before it loads them, so these load from disk or store.
WITHOUT_HOST = ("w2", "w4")
CONVERSATIONS, TURNS = 24, 8
FAILS_S = 4.0  # how long the bucket denies access, and how long it is stopped
AGAIN = 8  # conversations that continue after a restart
DEMO = Demo("demo-tiers", __doc__)


@dataclass(slots=True)
class Result(DemoResult):
    """The result of the demo.

    Attributes:
        exact: number of answers with exactly the expected tokens.
        wrong: a line for each other answer.
        reuse: KV loaded under load, by tier.
        restarted: KV loaded by the restarted worker.
        newcomers: KV loaded by the new workers, by the kind of their store.
        stale: blocks that workers expected in a shared store and could not use.
    """

    exact: int = 0
    wrong: list[str] = field(default_factory=list)
    reuse: Reuse = field(default_factory=Reuse)
    restarted: Reuse = field(default_factory=Reuse)
    newcomers: dict[str, Reuse] = field(default_factory=dict)
    damaged: dict[str, int] = field(default_factory=dict)
    stale: int = 0

    def judge(self) -> None:
        """Add every unmet requirement to `problems`."""
        self.problems += self.wrong[:3]
        if not self.exact:
            self.problems.append("no answer arrived")
        self.problems += [
            f"no KV was loaded from {tier} under load" for tier in ("host", "disk") if not self.reuse.tokens[tier]
        ]
        if not self.restarted.tokens["disk"]:
            self.problems.append("the restarted worker loaded no KV from its disk")
        for kind in ("directory", "bucket"):
            if not self.newcomers.get(kind, Reuse()).own:
                self.problems.append(f"the new worker loaded no KV from the {kind}")
        if not self.damaged:
            self.problems.append("nothing was damaged")
        self.judge_decisions()

    def line(self) -> str:
        return (
            f"{self.exact} answers exact, {len(self.wrong)} wrong; {sum(self.damaged.values())} blocks damaged, "
            f"{self.stale} stale entries of stores found; verified {self.verified} of {self.decisions}: {self.verdict}"
        )


async def under_load(system: TierSystem, result: Result, turns: int) -> None:
    """Hold conversations while blocks are damaged, and while the bucket fails twice."""
    DEMO.report(
        f"{CONVERSATIONS} conversations of {turns} turns begin; blocks are truncated, flipped and deleted meanwhile"
    )
    async with system.damaging():
        talking = asyncio.create_task(system.converse(range(CONVERSATIONS), turns))
        for failure, fail in (("denies access", system.bucket.deny), ("is stopped", system.bucket.stop)):
            await asyncio.wait([talking], timeout=FAILS_S)
            await asyncio.to_thread(fail)
            DEMO.report(f"the bucket {failure} for {FAILS_S:g} s")
            await asyncio.wait([talking], timeout=FAILS_S)
            await asyncio.to_thread(system.bucket.start)
        results = await talking
    result.reuse = await system.reuse(results)
    result.damaged = dict(system.damage.done)
    DEMO.report(f"prompt tokens loaded instead of computed: {result.reuse.line()}")
    DEMO.report("damaged: " + ", ".join(f"{count} {kind}s" for kind, count in sorted(result.damaged.items())))


async def only(
    system: TierSystem, name: str, leaving: tuple[str, ...], served_by: tuple[str, ...]
) -> list[StreamResult]:
    """Let workers leave, and continue some conversations of certain workers on the worker that remains."""
    for other in leaving:
        await system.cluster.stop(other)
    await system.cluster.until_members(name)
    return await system.converse(system.served_by(*served_by)[:AGAIN], 1)


async def after_load(system: TierSystem, result: Result) -> None:
    """Restart a worker with its disk, and replace all workers by new ones with the same stores."""
    await system.restart("w1")
    DEMO.report("kill -9 of w1, which starts again with its disk; the other workers leave")
    result.restarted = await system.reuse(await only(system, "w1", ("w2", *ON_BUCKET), ("w1",)))
    DEMO.report(f"the restarted w1 loaded {result.restarted.line()}")
    previous = "w1"
    for name, kind, others in (("w5", "directory", ON_DIRECTORY), ("w6", "bucket", ON_BUCKET)):
        system.worker(name, bucket=kind == "bucket")
        await system.cluster.until_members(previous, name)
        found = result.newcomers[kind] = await system.reuse(await only(system, name, (previous,), others))
        DEMO.report(
            f"{name} is new, with the same {kind}, and loaded {found.line()}; {found.own:,} only others had computed"
        )
        previous = name


async def run(place: Place, options: argparse.Namespace) -> Result:
    result = Result()
    with faulty_s3("kv-blocks") as bucket:
        async with place.cluster() as cluster, stream_clients([cluster.ingress("i1")], "demo") as clients:
            cluster.router("r1")
            system = TierSystem(cluster, clients, place.folder, bucket)
            for name in (*ON_DIRECTORY, *ON_BUCKET):
                system.worker(name, bucket=name in ON_BUCKET, host=name not in WITHOUT_HOST)
            DEMO.report(
                f"four workers start, {' and '.join(ON_DIRECTORY)} with a shared directory, "
                f"{' and '.join(ON_BUCKET)} with the bucket {bucket.url}/{bucket.bucket}, "
                f"{' and '.join(WITHOUT_HOST)} without host memory; logs in {place.folder}"
            )
            await cluster.until_serving(len(ON_DIRECTORY + ON_BUCKET))
            await under_load(system, result, options.turns)
            await after_load(system, result)
            result.stale = await system.stale()
            await result.verify(cluster)
            result.exact, result.wrong = system.exact, system.wrong
    result.judge()
    return result


def main() -> int:
    DEMO.add(
        "--turns", type=lambda text: round(positive(text)), default=TURNS, help="turns per conversation (%(default)s)"
    )
    return DEMO.run(run)


if __name__ == "__main__":
    sys.exit(main())
