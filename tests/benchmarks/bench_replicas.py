"""Measure forebay on one Kafka broker, and on three with replication 3 and a delay between them.

Processes and cases are those of `kafka`, without Dynamo. Every append waits for all in-sync replicas, of which there
must be at least two. In `3 x 2 ms`, bytes between brokers take 2 ms in each direction, so a follower is 4 ms away.
Brokers and Redis are started for each measurement, and the CPU time includes the brokers but not the proxy that delays
their bytes. Unmeasured requests come first, because a JVM that has just started takes several times as much CPU time.
Every decision is verified; the exit code is 1 if one could not be.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forebay.transport.base import LogError
from infra.kafka.kafka import pid_of
from tests.benchmarks.bench_http import FAST, HEADER, STEADY, STEADY_SPEED, medians
from tests.benchmarks.bench_kafka import (
    HOP_CASES,
    MANY,
    ONE,
    PLAN,
    Measured,
    Run,
    forebay,
    measure_idle,
    print_cpu,
    print_hops,
    run_case,
)
from tests.harness.local import CLUSTER_BROKERS, local_kafka, local_kafka_cluster, local_redis
from tests.harness.processes import ProcessError

ONE_BROKER = "1 broker"
WARM_UP = 2000  # requests per start of the brokers
REQUESTS = {ONE: 300, MANY: 2000, STEADY: 400}
CASES = {FAST: (ONE, MANY), STEADY_SPEED: (STEADY,)}


def selected(wanted: list[str]) -> dict[str, list[str]]:
    """Return the wanted cases by speed of the engines."""
    found = {speedup: [case for case in cases if case in wanted] for speedup, cases in CASES.items()}
    return {speedup: cases for speedup, cases in found.items() if cases}


def label(delay_ms: float) -> str:
    return f"{CLUSTER_BROKERS} x {delay_ms:g} ms"


@contextlib.contextmanager
def brokers(variant: str, delay_ms: float, args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Run the brokers of a variant and a Redis, and yield the options with their addresses and pids."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        redis = stack.enter_context(local_redis(folder))
        if variant == ONE_BROKER:
            started = [stack.enter_context(local_kafka(folder))]
        else:
            started = stack.enter_context(local_kafka_cluster(folder, delay_ms=delay_ms, settings=args.set))
        kafka = ",".join(broker.address for broker in started)
        also = [f"broker={pid_of(broker.data)}" for broker in started]
        yield argparse.Namespace(**{**vars(args), "kafka": kafka, "redis": redis, "also": also})


async def measure(args: argparse.Namespace, variant: str, delay_ms: float, found: Measured) -> None:
    """Run all cases of one round on one variant."""
    replicated = variant != ONE_BROKER
    plan = msgspec.structs.replace(PLAN, replication=CLUSTER_BROKERS if replicated else 1)
    leader = args.leader if replicated else 0
    with brokers(variant, delay_ms, args) as running:
        for number, (speedup, cases) in enumerate(selected(args.case).items()):
            async with forebay(running, found.verified, speedup=speedup, plan=plan, leader=leader) as system:
                if not number:
                    with contextlib.suppress(SystemExit):  # brokers that have just started may respond too late
                        await run_case(system, MANY, Run(), requests=WARM_UP)
                if speedup == FAST and args.idle:
                    await measure_idle(running, system, found)
                for case in cases:
                    sys.stderr.write(f"  {case}, load {os.getloadavg()[0]:.1f}\n")
                    await run_case(system, case, found.ours[case], requests=REQUESTS[case])


def report(found: dict[str, Measured], args: argparse.Namespace) -> None:
    """Print the tables of all variants, by case."""
    for case in args.case:
        runs = {variant: measured.ours[case] for variant, measured in found.items()}
        print(f"\n## {case}\n\n| brokers | {HEADER} |\n|---|{'---|' * (HEADER.count('|') + 1)}")
        for variant, one in runs.items():
            print(f"| {variant} | {medians(one.results).cells()} |")
        print_cpu(runs)
        if case in HOP_CASES:
            print_hops(runs)
    for variant, measured in found.items():
        idle = f"; idle: {statistics.median(measured.idle):.1f} % of a core" if measured.idle else ""
        print(f"\n{variant}: {measured.verified}{idle}")


async def run(args: argparse.Namespace) -> None:
    """Measure the variants in turn, in alternating order, and print the tables."""
    variants = {ONE_BROKER: 0.0} if args.one else {}
    variants |= {label(delay_ms): delay_ms for delay_ms in args.delay_ms}
    found = {variant: Measured() for variant in variants}
    for number in range(args.rounds):
        for variant in list(variants)[:: -1 if number % 2 else 1]:
            sys.stderr.write(f"round {number + 1} of {args.rounds}: {variant}, load {os.getloadavg()[0]:.1f}\n")
            await measure(args, variant, variants[variant], found[variant])
    report(found, args)
    for measured in found.values():
        measured.verified.check()


def main() -> None:
    """Measure, and print tables with medians of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, nargs="*", default=[0, 2, 5], help="one-way delays between brokers")
    parser.add_argument("--no-one", dest="one", action="store_false", help="leave out the single broker")
    parser.add_argument("--no-idle", dest="idle", action="store_false", help="leave out the CPU time without requests")
    parser.add_argument("--case", nargs="*", choices=REQUESTS, default=list(REQUESTS), help="by default all")
    parser.add_argument("--leader", type=int, default=0, help="broker that leads all partitions; by default they vary")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="setting of the three brokers")
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "forebay-peers", help="of tiny-model")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    try:
        asyncio.run(run(args))
    except (LogError, ProcessError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
