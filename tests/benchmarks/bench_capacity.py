"""Measure the records and bytes per request on the disk of a broker, by topic, and the CPU time by process.

Processes are those of `kafka`. The benchmark starts its own broker and Redis. Caches are small and full before the
first case, so each stored block evicts another one. Engines run at speed 1, so each token is an event. Bytes are those
of log segments: batches with their headers, compressed from 1 KiB on. Heartbeats and snapshots depend on time and on
cached blocks, so they have lines of their own. Every decision is verified; the exit code is 1 if one could not be.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from forebay.events.topics import HEARTBEATS, SNAPSHOTS
from forebay.transport.base import LogError
from forebay.transport.kafka.topics import partitions_of
from infra.kafka.kafka import pid_of
from tests.benchmarks.bench_http import STEADY_SPEED, WORKERS, Verified, load
from tests.benchmarks.bench_kafka import KINDS, MODEL, Run, System, forebay, print_cpu
from tests.harness.local import local_kafka, local_redis
from tests.harness.processes import ProcessError

CASES = {  # 200 and 4,000 words are 408 and 8,008 tokens with the chat template
    "8,008 tokens in, 1 out": ("--words", "4000", "--max-tokens", "1"),
    "8,008 in, 128 out": ("--words", "4000", "--max-tokens", "128"),
    "408 in, 1 out": ("--words", "200", "--max-tokens", "1"),
    "408 in, 128 out": ("--words", "200", "--max-tokens", "128"),
}
KV_BLOCKS = 4096  # per worker
FILL = ("--words", "4000", "--requests", "300")  # each stores 63 new blocks of 64 tokens, as half a prompt is shared
SETTLE_S = 2.0  # the last reports follow the last response
Sizes = dict[str, tuple[float, float]]  # records and bytes, by topic


async def sizes(system: System, data: Path) -> Sizes:
    """Return the records and the bytes of the segments of every topic so far."""
    await asyncio.sleep(SETTLE_S)
    found, settings = {}, system.cluster.settings
    for topic, count in (await partitions_of(settings)).items():
        ends = [await system.cluster.log.end(topic, number) for number in range(count)]
        segments = (data / "records").glob(f"{settings.topic(topic)}-*/*.log")
        found[topic] = float(sum(ends)), float(sum(file.stat().st_size for file in segments))
    return found


def growth(before: Sizes, after: Sizes, units: float) -> Sizes:
    """Return the growth per unit by topic."""
    return {name: ((a - before[name][0]) / units, (b - before[name][1]) / units) for name, (a, b) in after.items()}


def table(columns: dict[str, Sizes]) -> None:
    """Print records and bytes by topic, without topics that did not grow."""
    print(f"\n| topic | {' | '.join(columns)} |\n|---{'|---:' * len(columns)}|")
    shown = [topic for topic in next(iter(columns.values())) if topic not in (HEARTBEATS.name, SNAPSHOTS.name)]
    for topic in shown:
        cells = [column[topic] for column in columns.values()]
        if any(records for records, _ in cells):
            print(f"| `{topic}` | {' | '.join(f'{records:.2f} · {size:,.0f}' for records, size in cells)} |")
    totals = [[sum(column[topic][part] for topic in shown) for part in (0, 1)] for column in columns.values()]
    print(f"| all | {' | '.join(f'{records:.1f} · {size:,.0f}' for records, size in totals)} |")


async def pids(system: System, data: Path) -> str:
    """Return NAME=PID of the processes, with the owner apart from the standby."""
    owner = await system.cluster.owner(MODEL)
    running = {one.name: one.process.pid for one in system.cluster.processes.running()}
    kinds = {name: "owner" if name == owner else KINDS[name[0]].replace("router", "standby") for name in running}
    return ",".join([f"{kinds[name]}={pid}" for name, pid in running.items()] + [f"broker={pid_of(data)}"])


async def measure(args: argparse.Namespace) -> None:
    """Measure the fleet without load, each case, and a snapshot; and print the tables."""
    verified, columns, runs = Verified(), dict[str, Sizes](), dict[str, Run]()
    with tempfile.TemporaryDirectory() as name, local_redis(Path(name)) as redis, local_kafka(Path(name)) as broker:
        own = argparse.Namespace(**vars(args), kafka=broker.address, redis=redis, also=[])
        async with forebay(own, verified, speedup=STEADY_SPEED, kv_blocks=KV_BLOCKS) as system:
            load(system.url, "", [*FILL, "--conc", str(args.conc)])
            before, began_s = await sizes(system, broker.data), time.monotonic()
            await asyncio.sleep(args.idle_s)
            idle = growth(before, await sizes(system, broker.data), time.monotonic() - began_s)
            for case in args.case:
                processes, before = await pids(system, broker.data), await sizes(system, broker.data)
                count = ["--warmup", "0", "--requests", str(args.requests), "--conc", str(args.conc)]
                runs[case] = Run([load(system.url, processes, [*CASES[case], *count])])
                columns[case] = growth(before, await sizes(system, broker.data), args.requests)
                print(f"{case}: {runs[case].results[0]['requests_per_s']} requests/s", file=sys.stderr)
            before = await sizes(system, broker.data)
            await system.cluster.stop(await system.cluster.owner(MODEL))  # which seals the state in a snapshot
            snapshot = growth(before, await sizes(system, broker.data), 1)[SNAPSHOTS.name]
    print(f"records · bytes per request, {args.conc} connections")
    table(columns)
    print_cpu(runs)
    records, size = idle[HEARTBEATS.name]
    print(f"\nwithout load, {WORKERS} workers, an owner and a standby: {records:.1f} heartbeats/s, {size:,.0f} bytes/s")
    table({"others, per second": idle})
    print(f"\na snapshot: {snapshot[1]:,.0f} bytes with {WORKERS * KV_BLOCKS:,} cached blocks\n\n{verified}")
    verified.check()


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "forebay-peers", help="of tiny-model")
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES), help="by default all")
    parser.add_argument("--conc", type=int, default=16, help="connections, each with one request in flight")
    parser.add_argument("--requests", type=int, default=320, help="per case")
    parser.add_argument("--idle-s", type=float, default=20.0, help="seconds without load")
    args = parser.parse_args()
    try:
        asyncio.run(measure(args))
    except (LogError, ProcessError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
