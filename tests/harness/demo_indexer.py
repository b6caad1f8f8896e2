"""`make demo-indexer`: two indexers prove their state while indexers, owners and workers are killed.

Starts Kafka, Redis, two routers, an ingress, two indexers, and two models with two mock workers each, whose small
caches evict. Sends requests at a low rate. Every 20 to 40 s it kills an indexer, an owner or a worker with SIGKILL, or
stops an indexer, and starts the process again. Exits 1 unless every request was answered, every model was followed
again after each failure, no digest differed, the indexers have read the whole journals at the end, and every decision
was derived equal.
"""

import argparse
import asyncio
import itertools
import random
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field

import httpx

from forebay.events.decisions import CacheResyncRequested
from forebay.events.topics import DECISIONS
from forebay.transport.kafka.topics import TopicPlan
from tests.harness.cluster import GROUP, Cluster
from tests.harness.demos import Demo, Place, Result, positive
from tests.harness.indexers import DIGEST, INDEXERS, Indexers
from tests.integration.stream_clients import StreamClients, problems, prompt, stream_clients

MODELS = (GROUP, "other")
WORKERS = {"w1": GROUP, "w2": GROUP, "w3": "other", "w4": "other"}
PLAN = TopicPlan(groups=len(MODELS), slots=16, replies=4, kafka_api=2)
SNAPSHOTS = ("--snapshot-every", "20")
PROMPTS, BLOCKS, KV_BLOCKS = 40, 8, 128  # the prompts of a model do not fit into its caches
TOKENS = 6
EVERY_S = 0.5  # between two requests
PAUSE_S = (20.0, 40.0)  # between two failures
DOWN_S = (0.0, 12.0)  # until a process starts again; Kafka notices the death of an indexer after 6 s
TIMEOUT_S = 20.0
FAILURES = ("indexer killed", "indexer stopped", "owner killed", "worker killed")
DEMO = Demo("demo-indexer", __doc__)


@dataclass(slots=True)
class Proofs(Result):
    """The result of the demo.

    Attributes:
        compared: digests that were equal, by indexer. Those of the last moments before a kill are missing.
        digests: digests in the journals.
        gaps: missing KV events that the owners noticed.
        followed_s: longest time after the restart of a process until every model was followed.
    """

    compared: Counter[str] = field(default_factory=Counter)
    different: int = 0
    digests: int = 0
    rebuilds: int = 0
    gaps: int = 0
    failures: int = 0
    followed_s: float = 0.0

    def line(self) -> str:
        compared = " and ".join(f"{self.compared[name]} by {name}" for name in INDEXERS)
        return (
            f"{self.failures} failures; of {self.digests} digests, {compared} were compared, {self.different} differed;"
            f" {self.rebuilds} rebuilds, {self.gaps} gaps; all followed within {self.followed_s:.1f} s of a restart;"
            f" verified {self.verified} of {self.decisions}: {self.verdict}"
        )


@dataclass(frozen=True, slots=True)
class Scene:
    """The cluster and its indexers."""

    cluster: Cluster
    indexers: Indexers
    result: Proofs

    def start(self, name: str) -> None:
        if name in INDEXERS:
            self.indexers.start(name)
        elif name in WORKERS:
            self.cluster.worker(name, "--model-name", WORKERS[name], "--kv-blocks", str(KV_BLOCKS))
        else:
            self.cluster.router(name, *SNAPSHOTS)

    async def fail(self, kind: str, chance: random.Random) -> None:
        """End a process and start it again. Raises ProcessError unless both models are followed afterwards."""
        owner = await self.cluster.owner(chance.choice(MODELS))
        name = {"i": chance.choice(INDEXERS), "o": owner, "w": chance.choice(list(WORKERS))}[kind[0]]
        if name in INDEXERS:
            self.count(name)
        if kind.endswith("killed"):
            self.cluster.kill(name)
        else:
            await self.cluster.stop(name)
        await asyncio.sleep(chance.uniform(*DOWN_S))
        self.start(name)
        began_s = time.monotonic()
        await self.cluster.until_owned()
        holders = [await self.indexers.holder(model) for model in MODELS]
        took_s = time.monotonic() - began_s
        self.result.failures += 1
        self.result.followed_s = max(self.result.followed_s, took_s)
        DEMO.report(f"{kind}: {name}; {' and '.join(holders)} follow {took_s:.1f} s after its restart")

    def count(self, name: str) -> None:
        """Add the digests that this process has compared."""
        compared, different = self.indexers.counts(name)
        self.result.compared[name] += compared
        self.result.different += different

    async def judge(self, clients: StreamClients) -> None:
        """Wait until both indexers have proven their state, then add all counts and problems to the result."""
        result = self.result
        result.problems += problems(clients.results, TOKENS)
        for model in MODELS:
            await self.indexers.proven(await self.indexers.holder(model), model)
        for name in INDEXERS:
            self.count(name)
            result.rebuilds += (self.cluster.processes.folder / f"{name}.log").read_text().count("is restored in")
        if result.different or result.rebuilds or not all(result.compared[name] for name in INDEXERS):
            result.problems.append("a digest differed, a replica was rebuilt, or an indexer compared none")
        for model in MODELS:
            events = await self.cluster.events(DECISIONS, group=model)
            result.digests += sum(isinstance(event, DIGEST) for event in events)
            result.gaps += sum(isinstance(event, CacheResyncRequested) for event in events)
            report = await self.cluster.verify(model)
            result.verified += report["verified"]
            result.decisions += report["decisions"]
        result.judge_decisions(len(clients.results))


async def send(clients: StreamClients) -> None:
    for number in itertools.count():
        clients.submit(prompt(number // 2 % PROMPTS, BLOCKS), TOKENS, MODELS[number % 2])
        await asyncio.sleep(EVERY_S)


async def run(place: Place, options: argparse.Namespace) -> Proofs:
    result, chance = Proofs(), random.Random(options.seed)
    DEMO.report(f"seed {options.seed}; logs in {place.folder}")
    async with place.cluster(PLAN) as cluster:
        with httpx.Client(timeout=TIMEOUT_S) as client:
            scene = Scene(cluster, Indexers(cluster, client), result)
            for name in ("r1", "r2", *WORKERS, *INDEXERS):
                scene.start(name)
            url = cluster.ingress("i1")
            for model in MODELS:
                await cluster.until_serving(2, model)
            async with stream_clients([url], uuid.uuid4().hex[:8]) as clients:
                sending = asyncio.create_task(send(clients))
                ends_s, kinds = time.monotonic() + options.minutes * 60, [""]
                while time.monotonic() < ends_s:
                    kinds = kinds[1:] or chance.sample(FAILURES, len(FAILURES))
                    await asyncio.sleep(chance.uniform(*PAUSE_S))
                    await scene.fail(kinds[0], chance)
                sending.cancel()
                await clients.all()
                await scene.judge(clients)
    return result


def main() -> int:
    DEMO.add("--minutes", type=positive, default=2.0, help="duration of the load (default %(default)s)")
    DEMO.add("--seed", type=int, default=1, help="seed of the failures (default %(default)s)")
    return DEMO.run(run)


if __name__ == "__main__":
    sys.exit(main())
