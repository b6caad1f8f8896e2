"""Benchmark of a console's catalog: the pass that indexes a log, and the time to show a random moment afterwards.

The pass runs in one process and reports its rate, the size of the catalog and the peak memory. Then a fresh process
shows seeded random moments and explains seeded random requests, as the reader of a console does. The bar is the 95th
percentile of a moment.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from forebay.events.requests import RequestSubmitted
from forebay.events.topics import REQUESTS
from forebay.replay.catalog.contents import SCHEMAS, new_observers
from forebay.replay.catalog.follow import Follower
from forebay.replay.catalog.live import LivePublisher
from forebay.replay.catalog.seek import catalog_explanation, catalog_position
from forebay.replay.catalog.store import Store
from forebay.transport.history.reader import decode_or_none
from forebay.transport.sqlite.log import SqliteLog
from tests.benchmarks.bench_index import in_fresh_process
from tests.benchmarks.bench_replay import make, peak_mib
from tests.benchmarks.recordings import MODEL, SEED, Shape

MOMENT_BAR_MS = 500
PARTITION = 0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Pass:
    """The pass over a log.

    Attributes:
        wall_s: duration in seconds.
        cpu_s: CPU time in seconds.
        gap_ms: longest time in which no other task of the process ran.
    """

    records: int
    wall_s: float
    cpu_s: float
    size_mib: float
    checkpoints: int
    rss_mib: float
    gap_ms: float


@dataclass(frozen=True, slots=True)
class Latencies:
    """Times of moments or explanations in milliseconds: wall clock and CPU time."""

    wall_ms: list[float]
    cpu_ms: list[float]


def index(path: Path, catalog: Path) -> Pass:
    return asyncio.run(_index(path, catalog))


async def _index(path: Path, catalog: Path) -> Pass:
    log = SqliteLog.open(path, readonly=True)
    store = await Store.open(catalog, log, PARTITION, SCHEMAS)
    follower = Follower(log, PARTITION, store, new_observers)
    follower.on_pause = LivePublisher(log, PARTITION, MODEL, follower).publish
    gaps: list[float] = [0.0]
    watch = asyncio.create_task(_watch(gaps))
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    await follower.catch_up()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    watch.cancel()
    if follower.error:
        raise SystemExit(f"{path} cannot be indexed: {follower.error}")
    (count,) = store.connection.execute("SELECT count(*) FROM checkpoints").fetchone()
    state = follower.state
    done = Pass(
        records=state.end_offset - state.begin_offset,
        wall_s=wall_s,
        cpu_s=cpu_s,
        size_mib=store.size / MIB,
        checkpoints=count,
        rss_mib=peak_mib(),
        gap_ms=max(gaps) * 1_000,
    )
    store.close()
    log.close()
    return done


async def _watch(gaps: list[float]) -> None:
    last_s = time.perf_counter()
    while True:
        await asyncio.sleep(0)
        now_s = time.perf_counter()
        gaps[0], last_s = max(gaps[0], now_s - last_s), now_s


def show_moments(path: Path, catalog: Path, count: int) -> Latencies:
    async def show(log: SqliteLog, store: Store, rng: random.Random) -> None:
        await (await catalog_position(log, PARTITION, store, time_us=rng.randrange(*_span(store)))).moment()

    return asyncio.run(_measure(path, catalog, count, show))


def explain_requests(path: Path, catalog: Path, count: int) -> Latencies:
    async def show(log: SqliteLog, store: Store, rng: random.Random) -> None:
        offset = rng.randrange(await log.end(REQUESTS.name, PARTITION))
        (record,) = await log.read(REQUESTS.name, PARTITION, offset, 1)
        event = decode_or_none(REQUESTS, record.value)
        assert isinstance(event, RequestSubmitted)
        await catalog_explanation(log, PARTITION, store, event.request_id)

    return asyncio.run(_measure(path, catalog, count, show))


async def _measure(
    path: Path, catalog: Path, count: int, show: Callable[[SqliteLog, Store, random.Random], Awaitable[None]]
) -> Latencies:
    log, store, rng = SqliteLog.open(path, readonly=True), Store.read(catalog), random.Random(SEED)
    found = Latencies([], [])
    for _ in range(count):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        await show(log, store, rng)
        found.wall_ms.append((time.perf_counter() - wall_s) * 1_000)
        found.cpu_ms.append((time.process_time() - cpu_s) * 1_000)
    store.close()
    log.close()
    return found


def _span(store: Store) -> tuple[int, int]:
    committed = store.committed
    assert committed is not None, "the catalog is complete"
    (end_us,) = store.connection.execute("SELECT max(now_us) FROM checkpoints").fetchone()
    return committed.begin_us, int(end_us)


def row(name: str, found: Latencies) -> str:
    cells = [name, str(len(found.wall_ms))]
    for times in (found.wall_ms, found.cpu_ms):
        p95 = statistics.quantiles(times, n=20)[-1]
        cells += [f"{statistics.median(times):.0f}", f"{p95:.0f}", f"{max(times):.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure and print the tables."""
    args = arguments()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path, catalog = args.log or Path(folder) / "log.db", Path(folder) / "catalog"
        if args.log is None:
            in_fresh_process(make, path, Shape(args.workers, args.decisions))
        done = in_fresh_process(index, path, catalog)
        print(
            "| records | wall s | CPU s | records/s | records per CPU second | checkpoints | MiB | peak MiB | gap ms |"
        )
        print(f"|{'---:|' * 9}")
        print(
            f"| {done.records:,} | {done.wall_s:.1f} | {done.cpu_s:.1f} | {done.records / done.wall_s:,.0f} "
            f"| {done.records / done.cpu_s:,.0f} | {done.checkpoints} | {done.size_mib:.0f} | {done.rss_mib:.0f} "
            f"| {done.gap_ms:.0f} |\n",
            flush=True,
        )
        load = os.getloadavg()[0]
        print(f"seed {SEED}; bar: p95 of a moment at most {MOMENT_BAR_MS} ms; load average {load:.1f}\n")
        print("| result | count | p50 ms | p95 ms | max ms | p50 CPU ms | p95 CPU ms | max CPU ms |")
        print(f"|---|{'---:|' * 7}")
        print(row("moment", in_fresh_process(show_moments, path, catalog, args.moments)), flush=True)
        print(row("explanation", in_fresh_process(explain_requests, path, catalog, args.moments)), flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="an existing log with one group, instead of a new one")
    parser.add_argument("--decisions", type=int, default=200_000, help="decisions of a new log (default %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="workers of a new log (default %(default)s)")
    parser.add_argument("--moments", type=int, default=200, help="random moments (default %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder for the log and the catalog, some GiB")
    return parser.parse_args()


if __name__ == "__main__":
    main()
