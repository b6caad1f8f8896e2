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
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import MIN_INSYNC
from tests.harness import failover
from tests.harness.brokers import StoppableBroker, create_topics_on
from tests.harness.cluster import PLAN, POOL, Cluster
from tests.harness.demos import judged
from tests.harness.failover import Counts, System
from tests.harness.local import (
    CLUSTER_BROKERS,
    CLUSTER_SESSION_S,
    StoppableRedis,
    local_kafka,
    local_kafka_cluster,
    stoppable_redis,
)

ROUTERS, INGRESSES, WORKERS = 2, 2, 4
SPEEDUP = "0.1"  # of the mock engines: about 57 ms per token, so that streams last longer than a failover
TIMES = 10  # kills of the owner, restarts of the broker, flushes of Redis
STOPS = 3
STREAMS = 200
BUSY_PROCESSES, BUSY_S = 8, 60.0
STOPPED_S = 5.0  # longer than a lease of 3 s
ASK_EVERY_S = 0.05
DENSE_S = 0.025  # between requests where a gap of 200 ms is measured
LEADER, FOLLOWER, CONTROLLER = 2, 3, 1  # numbers of the brokers


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


def report(text: str) -> None:
    """Print a line of progress."""
    print(f"demo-failover: {text}", flush=True)


def spread(seconds: Sequence[float]) -> str:
    """Return median and maximum of measurements as text."""
    return f"p50 {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s"


async def part_owner(system: System, times: int) -> Row:
    """Kill the owner again and again."""
    row = Row(f"owner killed {times} times")
    gaps: list[float] = []
    async with system.load(ASK_EVERY_S, row.counts):
        for number in range(times):
            claimed_s, gap_s = await failover.kill_owner(system)
            gaps.append(gap_s)
            report(f"kill {number + 1} of the owner: claimed after {claimed_s:.2f} s, no routing for {gap_s:.2f} s")
    row.measured = f"no routing for {spread(gaps)}"
    row.require("the median time without routing", statistics.median(gaps), BARS.owner_p50_s)
    return row


async def part_stop(system: System) -> Row:
    row = Row(f"owner stopped as planned {STOPS} times")
    gaps: list[float] = []
    async with system.load(DENSE_S, row.counts):
        for _ in range(STOPS):
            gaps.append(await failover.stop_owner(system))
            report(f"planned stop of the owner: no routing for {gaps[-1]:.2f} s")
    row.measured = f"no routing for {spread(gaps)}"
    row.require("the time without routing", max(gaps), BARS.stop_max_s)
    return row


async def part_worker(system: System, streams: int) -> Row:
    """Kill one of four workers with long streams, and stop its replacement."""
    row = Row(f"one of {WORKERS} workers killed with {streams} streams")
    lost_s, moved = await failover.kill_worker(system, "w1", streams, row.counts)
    system.cluster.worker("w1-again", "--speedup", SPEEDUP)
    await system.until_members(WORKERS)
    exit_s = await failover.stop_worker(system, "w1-again")
    system.cluster.worker("w1-more", "--speedup", SPEEDUP)
    await system.until_members(WORKERS)
    row.measured = f"{moved} streams moved; loss recorded {lost_s:.2f} s after the kill, {exit_s:+.2f} s after an exit"
    report(row.measured)
    if not moved:
        row.problems.append("the killed worker had no stream")
    row.require("the time from exit to fact", exit_s, BARS.exit_max_s)
    return row


async def part_busy(system: System, seconds: float) -> Row:
    """Run busy processes beside the system, which lose no worker and no owner."""
    row = Row(f"{BUSY_PROCESSES} busy processes for {seconds:g} s")
    before, claims = await failover.fleet_facts(system.cluster), len(await system.cluster.ownerships())
    async with system.load(ASK_EVERY_S * 2, row.counts):
        with failover.busy_processes(BUSY_PROCESSES):
            await asyncio.sleep(seconds)
    after = await failover.fleet_facts(system.cluster)
    changes = len(await system.cluster.ownerships()) - claims
    suspect, lost = after.suspect - before.suspect, after.lost - before.lost
    row.measured = f"workers {suspect} times suspect, {lost} times lost; {changes} takeovers"
    report(row.measured)
    if lost:
        row.problems.append("a worker that runs was declared lost")
    return row


async def part_broker(system: System, broker: StoppableBroker, times: int) -> Row:
    """Kill and restart the broker again and again."""
    row = Row(f"broker killed and restarted {times} times")
    away: list[float] = []
    after: list[float] = []
    pids = system.pids()
    async with system.load(ASK_EVERY_S * 2, row.counts) as clients:
        for number in range(times):
            away_s, after_s = await failover.restart_broker(system, broker, clients)
            away.append(away_s)
            after.append(after_s)
            report(f"restart {number + 1} of the broker: {away_s:.1f} s away, first response {after_s:.2f} s later")
    row.measured = f"away for {spread(away)}; first response {spread(after)} after the return"
    if system.pids() != pids:
        row.problems.append("a process was restarted")
    return row


async def part_redis(system: System, store: StoppableRedis, times: int) -> Row:
    """Flush Redis again and again, stop it for longer than a lease, and start it empty."""
    row = Row(f"Redis flushed {times} times, then stopped for {STOPPED_S:g} s and started empty")
    before = await failover.fleet_facts(system.cluster)
    async with system.load(ASK_EVERY_S, row.counts) as clients:
        for _ in range(times):
            await failover.flush_redis(system, store, clients)
        await failover.restart_redis(system, store, clients, STOPPED_S)
    after = await failover.fleet_facts(system.cluster)
    resyncs = after.resyncs - before.resyncs
    suspect, lost = after.suspect - before.suspect, after.lost - before.lost
    row.measured = f"workers {suspect} times suspect, {lost} times lost; {resyncs} caches re-announced"
    report(row.measured)
    if lost or resyncs:
        row.problems.append(row.measured)
    return row


async def part_brokers(system: System, brokers: list[StoppableBroker]) -> Row:
    """Kill the broker that leads all partitions, and restart it."""
    settings = f"replication {CLUSTER_BROKERS}, min.insync.replicas {MIN_INSYNC}, session {CLUSTER_SESSION_S} s"
    row = Row(f"leader of all partitions killed ({CLUSTER_BROKERS} brokers, {settings})")
    pids = system.pids()
    async with system.load(ASK_EVERY_S * 2, row.counts) as clients:
        gap_s, served_s = await failover.kill_leader(system, brokers[LEADER - 1], clients)
        await brokers[LEADER - 1].restart()
    row.measured = f"no routing for {gap_s:.2f} s, no response for {served_s:.2f} s"
    report(row.measured)
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
        for number in range(ROUTERS):
            cluster.router(f"r{number + 1}")
        for number in range(WORKERS):
            cluster.worker(f"w{number + 1}", "--speedup", SPEEDUP)
        for number in range(INGRESSES):
            cluster.ingress(f"i{number + 1}")
        report(f"{ROUTERS} routers, {WORKERS} workers and {INGRESSES} ingresses start")
        await cluster.until_serving(WORKERS)
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
                broker.end()
        if "brokers" in options.parts:
            report(f"{CLUSTER_BROKERS} brokers start")
            with local_kafka_cluster(folder / "brokers") as three:
                brokers = [StoppableBroker(one) for one in three]
                kafka = ",".join(one.address for one in three)
                async with running(kafka, store.url, systems[1], result, replicas=CLUSTER_BROKERS) as system:
                    result.rows.append(await part_brokers(system, brokers))
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
    """Run the demo of the command line.

    Returns:
        Exit code: 0 on success, 1 if the demo failed, 2 if it could not run.
    """
    parser = argparse.ArgumentParser(prog="demo-failover", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", type=parts_of, default=list(PARTS), help=f"of {','.join(PARTS)} (default all)")
    parser.add_argument("--times", type=int, default=TIMES, help="kills, restarts and flushes (default %(default)s)")
    parser.add_argument("--streams", type=int, default=STREAMS, help="of the killed worker's part (%(default)s)")
    parser.add_argument("--busy-s", type=float, default=BUSY_S, help="seconds of the busy part (%(default)s)")
    options = parser.parse_args()
    # The clients of this process log every attempt to reconnect to a killed broker.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    return judged(report, lambda folder: run(folder, options))


if __name__ == "__main__":
    sys.exit(main())
