"""Benchmark of verifying recordings: speed, decoding and checksums included, and peak memory.

Each recording is made by driving the core (see `recordings`), then verified in fresh processes on one core. Rates use
CPU time, which other load on the machine affects least. The table shows the best round and the median. The first rows
are conversations, `KV events` has almost only KV events, and `full caches` has large caches and snapshots. The last row
is ten times as long as the previous row, and must not need more memory.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.replay.verify.verify import verify
from forebay.transport.sqlite.log import SqliteLog
from tests.benchmarks.bench_index import in_fresh_process, integers
from tests.benchmarks.recordings import SEED, Shape, WrittenCounts, write_recording

LONGER = 10
KV_CACHED, KV_MORE = 16_384, 128
FULL_CACHED = 16_384
MIB = 1 << 20
BARS = {8: 5_000, 64: 2_000}  # required decisions per second, by workers
BLOCKS_BAR = 1_000_000  # required blocks per second


@dataclass(frozen=True, slots=True)
class Case:
    """A row: a recording, and the required decisions or blocks per second; 0 for no requirement."""

    name: str
    shape: Shape
    decisions_bar: int = 0
    blocks_bar: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    cpu_s: float
    wall_s: float
    rss_mib: float
    snapshots: int


def make(path: Path, shape: Shape) -> WrittenCounts:
    return asyncio.run(write_recording(path, shape))


def measure(path: Path) -> Round:
    """Verify a recording; exit if verification fails."""
    log = SqliteLog.open(path, readonly=True)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    report = asyncio.run(verify(log))
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    log.close()
    if report.divergence is not None or report.unverified or report.verified != report.decisions:
        raise SystemExit(f"{path} is not verified: {report}")
    return Round(cpu_s, wall_s, peak_mib(), report.snapshots)


def peak_mib() -> float:
    """Return the peak resident memory of this program; `ru_maxrss` would start with that of its parent."""
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024 / MIB


def cases(args: argparse.Namespace) -> list[Case]:
    """Return the rows, in order."""
    decisions = args.decisions
    rows = [Case("conversations", Shape(workers, decisions), BARS.get(workers, 0)) for workers in args.workers]
    rows.append(Case("KV events", Shape(8, decisions // KV_MORE, KV_CACHED, KV_MORE), blocks_bar=BLOCKS_BAR))
    rows.append(Case("full caches", Shape(64, decisions, FULL_CACHED, 2), BARS[64]))
    short = Shape(8, decisions, tokens=False)
    rows.append(Case("without tokens", short, BARS[8]))
    rows.append(Case(f"without tokens, {LONGER}x", replace(short, decisions=LONGER * decisions), BARS[8]))
    return [row for row in rows if args.only in row.name]


def row(case: Case, written: WrittenCounts, size: int, rounds: list[Round]) -> str:
    best = min(one.cpu_s for one in rounds)
    median = statistics.median(one.cpu_s for one in rounds)
    ratio = ""
    if bar := case.decisions_bar or case.blocks_bar:
        counted = written.decisions if case.decisions_bar else written.blocks
        ratio = f"{counted / best / bar:.2f}, {counted / median / bar:.2f}"
    cells = (
        case.name,
        case.shape.workers,
        f"{written.decisions:,}",
        f"{size / MIB:.0f}",
        f"{written.events / written.decisions:.1f}",
        f"{written.decisions / best:,.0f}",
        f"{written.decisions / median:,.0f}",
        f"{written.events / best:,.0f}",
        f"{written.blocks / best:,.0f}",
        ratio,
        rounds[0].snapshots,
        f"{max(one.rss_mib for one in rounds):.0f}",
        f"{statistics.median(one.cpu_s / one.wall_s for one in rounds):.2f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Measure and print a table, row by row."""
    args = arguments()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # children inherit it
    print(f"seed {SEED}; {args.rounds} rounds; bars: {BARS} decisions/s by workers, {BLOCKS_BAR:,} blocks/s\n")
    print(
        "| recording | workers | decisions | MiB | events/decision | decisions/s best | median | events/s | blocks/s "
        "| of the bar, best and median | snapshots | peak MiB | CPU/wall |"
    )
    print(f"|---{'|---:' * 12}|")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for number, case in enumerate(cases(args)):
            path = Path(folder) / f"{number}.db"
            written = in_fresh_process(make, path, case.shape)
            rounds = [in_fresh_process(measure, path) for _ in range(args.rounds)]
            print(row(case, written, path.stat().st_size, rounds), flush=True)
            path.unlink()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=integers, default=[8, 64, 512], help="default 8,64,512")
    parser.add_argument("--decisions", type=int, default=20_000, help="decisions per recording (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per recording (default %(default)s)")
    parser.add_argument("--only", default="", help="run only rows whose name contains this text")
    parser.add_argument("--folder", type=Path, help="folder for the recordings, some hundred MiB")
    return parser.parse_args()


if __name__ == "__main__":
    main()
