"""`make demo-failover`: owners, workers, brokers and Redis die under load, and no request is lost, repeated or hung.

Starts Kafka, Redis, two ingresses, two routers and four mock workers of its own, and breaks them one part after the
other, while clients send requests. At the end it derives every decision again in a separate process. Exits 1 unless
every bar of `Bars` holds. The parts are:

owner: kill the owner of the group with SIGKILL again and again, each time with a new standby. stop: stop it as planned.
worker: kill one of four workers with 200 streams; stop another one.
busy: run eight busy processes beside the system.
broker: kill the broker and restart it with its data.
redis: flush Redis, and restart it empty.
brokers: on three brokers with replication 3, kill the broker that leads all partitions.
"""

import argparse
import asyncio
import contextlib
import logging
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import redis

from forebay.events.decisions import CacheResyncRequested
from forebay.events.fleet import WorkerLost, WorkerSuspect
from forebay.events.topics import DECISIONS, FLEET
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import MIN_INSYNC
from tests.harness.brokers import StoppableBroker, create_topics_on
from tests.harness.cluster import PLAN, POOL, Cluster
from tests.harness.demos import Demo
from tests.harness.failover import PATIENCE_S, TAKEN_S, Counts, System, lost, stop_worker
from tests.harness.local import (
    CLUSTER_BROKERS,
    CLUSTER_SESSION_S,
    StoppableRedis,
    local_kafka,
    local_kafka_cluster,
    stoppable_redis,
)
from tests.integration.stream_clients import prompt

ROUTERS, INGRESSES, WORKERS = ("r1", "r2"), ("i1", "i2"), ("w1", "w2", "w3", "w4")
SPEEDUP = "0.1"  # of the mock engines: about 57 ms per token, so that streams last longer than a failover
TIMES = 10  # kills of the owner, restarts of the broker, flushes of Redis
STOPS = 3
STREAMS = 200
BUSY_PROCESSES, BUSY_S = 8, 60.0
STOPPED_S = 5.0  # longer than a lease of 3 s
ASK_EVERY_S = 0.05
DENSE_S = 0.025  # between requests where a gap of 200 ms is measured
LEADER, FOLLOWER, CONTROLLER = 2, 3, 1  # numbers of the brokers
LONG_TOKENS = 120
UNACKNOWLEDGED_US = 500_000  # an owner makes its last decision before an outage within this time
DEMO = Demo("demo-failover", __doc__)


class Bars(msgspec.Struct, frozen=True):
    """Limits in seconds, beside that no request is lost, repeated or hung.

    Attributes:
        owner_p50_s: median time without routing after a kill of the owner.
        stop_max_s: maximum time without routing after a planned stop of the owner.
        exit_max_s: maximum time from the exit of a stopped worker to the fact on `fleet`.
        leader_max_s: maximum time without routing after a kill of the broker that leads all partitions.
    """

    owner_p50_s: float = 1.5
    stop_max_s: float = 0.2
    exit_max_s: float = 1.0
    leader_max_s: float = CLUSTER_SESSION_S + 3.0


BARS = Bars()


@dataclass(slots=True)
class Row:
    """The result of one part.

    Attributes:
        attack: what happened to the system.
        problems: unmet bars and requests that suffered.
    """

    attack: str
    counts: Counts = field(default_factory=Counts)
    measured: str = ""
    problems: list[str] = field(default_factory=list)

    def require(self, what: str, value: float, limit: float) -> None:
        """Add a problem if a measurement in seconds exceeds its limit."""
        if value > limit:
            self.problems.append(f"{what} is {value:.2f} s, the limit is {limit:g} s")

    def line(self) -> str:
        verdict = "ok" if not self.problems else f"FAILED: {'; '.join(self.problems[:3])}"
        counts = self.counts
        return (
            f"{self.attack} | {counts.sent} | {counts.rejected} | {len(counts.problems)} | {self.measured} | {verdict}"
        )


@dataclass(slots=True)
class Result:
    rows: list[Row] = field(default_factory=list)
    verified: list[tuple[int, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Add every unmet requirement to `problems`."""
        for row in self.rows:
            row.problems += row.counts.problems
            self.problems += [f"{row.attack}: {problem}" for problem in row.problems]
        for verified, decisions in self.verified:
            if verified != decisions or not decisions:
                self.problems.append(f"{verified} of {decisions} decisions were derived equal")

    def line(self) -> str:
        """Return the table and the last line of the demo."""
        table = [
            "attack | requests | rejected and sent again | lost, repeated, hung or wrong | measured | verdict",
            *(row.line() for row in self.rows),
        ]
        decisions = ", ".join(f"{verified} of {all_}" for verified, all_ in self.verified)
        verdict = f"FAILED ({len(self.problems)} problems)" if self.problems else "ok"
        return "\n  ".join(["results", *table, f"verified {decisions}: {verdict}"])


def spread(seconds: Sequence[float]) -> str:
    return f"p50 {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s"


async def part_owner(system: System, times: int) -> Row:
    """Kill the owner again and again, each time with a new standby."""
    row, cluster = Row(f"owner killed {times} times"), system.cluster
    gaps: list[float] = []
    async with system.load(ASK_EVERY_S, row.counts):
        for number in range(times):
            owner = await cluster.owner()
            killed_us = cluster.kill(owner)
            newest = await cluster.taken_over(owner, within_s=TAKEN_S)
            assert newest.first_routed_us is not None
            await system.replace_router()
            claimed_s, gap_s = (newest.claimed_us - killed_us) / 1e6, (newest.first_routed_us - killed_us) / 1e6
            gaps.append(gap_s)
            DEMO.report(
                f"kill {number + 1} of the owner: claimed after {claimed_s:.2f} s, no routing for {gap_s:.2f} s"
            )
    row.measured = f"no routing for {spread(gaps)}"
    row.require("the median time without routing", statistics.median(gaps), BARS.owner_p50_s)
    return row


async def part_stop(system: System) -> Row:
    """Stop the owner as planned, each time with a new standby."""
    row, cluster = Row(f"owner stopped as planned {STOPS} times"), system.cluster
    gaps: list[float] = []
    async with system.load(DENSE_S, row.counts):
        for _ in range(STOPS):
            owner = await cluster.owner()
            await cluster.stop(owner)
            newest = await cluster.taken_over(owner, within_s=TAKEN_S)
            before = next(one for one in reversed(await cluster.ownerships()) if one.router == owner)
            assert newest.first_routed_us is not None
            assert before.last_routed_us is not None
            await system.replace_router()
            gaps.append((newest.first_routed_us - before.last_routed_us) / 1e6)
            DEMO.report(f"planned stop of the owner: no routing for {gaps[-1]:.2f} s")
    row.measured = f"no routing for {spread(gaps)}"
    row.require("the time without routing", max(gaps), BARS.stop_max_s)
    return row


async def part_worker(system: System, streams: int) -> Row:
    """Kill one of four workers once all of its long streams have begun, and stop its replacement."""
    row, cluster = Row(f"one of {len(WORKERS)} workers killed with {streams} streams"), system.cluster
    async with system.clients() as clients:
        results = [clients.submit(prompt(number), LONG_TOKENS) for number in range(streams)]
        begun = lambda: all(one.text or one.problem for one in results)  # noqa: E731
        await cluster.until("all streams have begun", begun, within_s=PATIENCE_S)
        killed_us = cluster.kill("w1")
        lost_s = ((await lost(cluster, "w1")).at_us - killed_us) / 1e6
        await clients.all()
        system.count(clients, LONG_TOKENS, row.counts)
        moved = sum(one.attempts > 1 for one in results if one.served)
    cluster.worker("w1-again", "--speedup", SPEEDUP)
    await cluster.until_members(count=len(WORKERS))
    exit_s = await stop_worker(cluster, "w1-again")
    cluster.worker("w1-more", "--speedup", SPEEDUP)
    await cluster.until_members(count=len(WORKERS))
    row.measured = f"{moved} streams moved; loss recorded {lost_s:.2f} s after the kill, {exit_s:+.2f} s after an exit"
    if not moved:
        row.problems.append("the killed worker had no stream")
    row.require("the time from exit to fact", exit_s, BARS.exit_max_s)
    return row


async def fleet_facts(cluster: Cluster) -> Counter[type]:
    """Count suspect and lost workers, and orders to re-announce a cache, since the beginning of the log."""
    facts = await cluster.events(FLEET, WorkerSuspect | WorkerLost)
    return Counter(map(type, [*facts, *await cluster.events(DECISIONS, CacheResyncRequested)]))


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


async def part_busy(system: System, seconds: float) -> Row:
    """Run busy processes beside the system, which lose no worker and no owner."""
    row = Row(f"{BUSY_PROCESSES} busy processes for {seconds:g} s")
    before, claims = await fleet_facts(system.cluster), len(await system.cluster.ownerships())
    async with system.load(ASK_EVERY_S * 2, row.counts):
        with busy_processes(BUSY_PROCESSES):
            await asyncio.sleep(seconds)
    new = await fleet_facts(system.cluster) - before
    changes = len(await system.cluster.ownerships()) - claims
    row.measured = f"workers {new[WorkerSuspect]} times suspect, {new[WorkerLost]} times lost; {changes} takeovers"
    if new[WorkerLost]:
        row.problems.append("a worker that runs was declared lost")
    return row


async def part_broker(system: System, broker: StoppableBroker, times: int) -> Row:
    """Kill the broker and restart it with its data, again and again."""
    row = Row(f"broker killed and restarted {times} times")
    away: list[float] = []
    after: list[float] = []
    pids = system.pids()
    async with system.load(ASK_EVERY_S * 2, row.counts) as clients:
        for number in range(times):
            broker.kill()
            killed_s, first = time.monotonic(), len(clients.results)
            await broker.restart()
            back_s = time.monotonic()
            await system.until_served(clients, 1, first)
            away.append(back_s - killed_s)
            after.append(time.monotonic() - back_s)
            await system.until_served(clients, 20, first)
            times_s = f"{away[-1]:.1f} s away, first response {after[-1]:.2f} s later"
            DEMO.report(f"restart {number + 1} of the broker: {times_s}")
    row.measured = f"away for {spread(away)}; first response {spread(after)} after the return"
    if system.pids() != pids:
        row.problems.append("a process was restarted")
    return row


async def part_redis(system: System, store: StoppableRedis, times: int) -> Row:
    """Flush Redis again and again, stop it for longer than a lease, and start it empty."""
    row, cluster = (
        Row(f"Redis flushed {times} times, then stopped for {STOPPED_S:g} s and started empty"),
        system.cluster,
    )
    before, members = await fleet_facts(cluster), len(await cluster.members())

    async def until_held() -> None:
        with redis.Redis.from_url(store.url) as client:
            leases = lambda: list(client.scan_iter(match=f"{cluster.namespace}:lease:*"))  # noqa: E731
            await cluster.until("leases are held again", leases, lambda found: len(found) == members)

    async with system.load(ASK_EVERY_S, row.counts) as clients:
        for _ in range(times):
            first = len(clients.results)
            with redis.Redis.from_url(store.url) as client:
                client.flushall()
            await until_held()
            await system.until_served(clients, 20, first)
        store.stop()
        first = len(clients.results)
        await asyncio.sleep(STOPPED_S)
        await system.until_served(clients, 20, first)
        await asyncio.to_thread(store.start)
        await until_held()
        await system.until_served(clients, 20, len(clients.results))
    new = await fleet_facts(cluster) - before
    lost_workers, resyncs = new[WorkerLost], new[CacheResyncRequested]
    row.measured = (
        f"workers {new[WorkerSuspect]} times suspect, {lost_workers} times lost; {resyncs} caches re-announced"
    )
    if lost_workers or resyncs:
        row.problems.append(row.measured)
    return row


async def part_brokers(system: System, brokers: list[StoppableBroker]) -> Row:
    """Kill the broker that leads all partitions, and restart it."""
    settings = f"replication {CLUSTER_BROKERS}, min.insync.replicas {MIN_INSYNC}, session {CLUSTER_SESSION_S} s"
    row = Row(f"leader of all partitions killed ({CLUSTER_BROKERS} brokers, {settings})")
    pids, leader = system.pids(), brokers[LEADER - 1]
    async with system.load(ASK_EVERY_S * 2, row.counts) as clients:
        leader.kill()
        killed_us = time.time_ns() // 1000
        await system.until_served(clients, 1, len(clients.results))
        served_s = time.time_ns() / 1e9 - killed_us / 1e6
        # A decision of the moment of the kill waits for its acknowledgement. Later ones are made once it has arrived.
        begin_us = killed_us + UNACKNOWLEDGED_US
        routed_us = min(at for one in await system.cluster.ownerships() for at in one.routed_us if at > begin_us)
        await leader.restart()
    gap_s = (routed_us - killed_us) / 1e6
    row.measured = f"no routing for {gap_s:.2f} s, no response for {served_s:.2f} s"
    row.require("the time without routing", gap_s, BARS.leader_max_s)
    if system.pids() != pids:
        row.problems.append("a process was restarted")
    return row


@contextlib.asynccontextmanager
async def running(
    kafka: str, redis_url: str, folder: Path, result: Result, *, replicas: int = 1
) -> AsyncIterator[System]:
    """Run a system, and verify its log at the end."""
    namespace = f"demo-{uuid.uuid4().hex[:8]}"
    plan = msgspec.structs.replace(PLAN, replication=replicas)
    if replicas > 1:
        nodes = [LEADER, FOLLOWER, CONTROLLER]
        await create_topics_on(KafkaSettings(kafka, namespace), plan, [POOL], nodes)
    async with Cluster(kafka, redis_url, namespace, folder, plan) as cluster:
        DEMO.report(f"{len(ROUTERS)} routers, {len(WORKERS)} workers and {len(INGRESSES)} ingresses start")
        await cluster.serve(ROUTERS, WORKERS, INGRESSES, worker=("--speedup", SPEEDUP))
        system = System(cluster)
        yield system
        result.problems += await system.settled()
        verified = await cluster.verify()
        result.verified.append((verified["verified"], verified["decisions"]))
        if verified["divergence"] is not None:
            result.problems.append(f"a divergence: {verified['divergence']}")


Part = Callable[[System], Awaitable[Row]]


async def run(folder: Path, options: argparse.Namespace) -> Result:
    result = Result()
    systems = folder / "one", folder / "three"
    for system_folder in systems:
        await asyncio.to_thread(system_folder.mkdir)
    with stoppable_redis(folder) as store:
        parts: dict[str, Part] = {
            "owner": lambda system: part_owner(system, options.times),
            "stop": part_stop,
            "worker": lambda system: part_worker(system, options.streams),
            "busy": lambda system: part_busy(system, options.busy_s),
            "redis": lambda system: part_redis(system, store, options.times),
        }
        chosen = [part for name, part in parts.items() if name in options.parts]
        if chosen or "broker" in options.parts:
            with local_kafka(folder / "kafka") as one:
                broker = StoppableBroker(one)
                if "broker" in options.parts:
                    chosen.append(lambda system: part_broker(system, broker, options.times))
                async with running(one.address, store.url, systems[0], result) as system:
                    for part in chosen:
                        result.rows.append(await part(system))
                        DEMO.report(result.rows[-1].measured)
                broker.end()
        if "brokers" in options.parts:
            DEMO.report(f"{CLUSTER_BROKERS} brokers start")
            with local_kafka_cluster(folder / "brokers") as three:
                brokers = [StoppableBroker(one) for one in three]
                kafka = ",".join(one.address for one in three)
                async with running(kafka, store.url, systems[1], result, replicas=CLUSTER_BROKERS) as system:
                    result.rows.append(await part_brokers(system, brokers))
                    DEMO.report(result.rows[-1].measured)
                for each in brokers:
                    each.end()
    result.judge()
    return result


PARTS = ("owner", "stop", "worker", "busy", "redis", "broker", "brokers")


def parts_of(text: str) -> list[str]:
    """Parse the names of parts, separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown parts {unknown}; parts are: {', '.join(PARTS)}")
    return names


def main() -> int:
    DEMO.add("--parts", type=parts_of, default=list(PARTS), help=f"of {','.join(PARTS)} (default all)")
    DEMO.add("--times", type=int, default=TIMES, help="kills, restarts and flushes (default %(default)s)")
    DEMO.add("--streams", type=int, default=STREAMS, help="of the killed worker's part (%(default)s)")
    DEMO.add("--busy-s", type=float, default=BUSY_S, help="seconds of the busy part (%(default)s)")
    # The clients of this process log every attempt to reconnect to a killed broker.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    return DEMO.run_alone(run)


if __name__ == "__main__":
    sys.exit(main())
