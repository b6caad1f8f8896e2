"""Benchmark of the simulator: requests per second and peak memory, by number of workers and requests.

Each run is a process of its own, `forebay simulate --policy kv`. CPU time covers the whole process, because other load
on the machine affects it least. The arrival rate grows with the number of workers, so that all of them are busy. If
FOREBAY_DYNAMO_PYTHON and FOREBAY_PEERS are set, Dynamo's offline replay runs alternately on the same trace, with its KV
router and mock engines of the same size. Both are limited to one core.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TRACE = Path("mooncake") / "conversation_trace.jsonl"
PEER_FILE = "replay_dynamo.py"
AS_RECORDED = 16  # number of workers up to which arrivals keep the recorded rate
LINEAR = 16  # number of workers up to which the number of requests grows
KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Case:
    """A row, which uses the first `requests` requests of the trace."""

    workers: int
    requests: int
    whole: bool

    @property
    def speed(self) -> float:
        """Return the divisor of the times between arrivals."""
        return max(1.0, self.workers / AS_RECORDED)

    def ours(self, trace: Path) -> list[str]:
        options = ["--workers", str(self.workers), "--speed", str(self.speed), "--requests", str(self.requests)]
        return [sys.executable, "-m", "forebay.cli", "simulate", str(trace), "--policy", "kv", "--json", *options]

    def dynamo(self, trace: Path, python: Path, peers: Path) -> list[str]:
        """Return Dynamo's command line."""
        options = ["--workers", str(self.workers), "--speedup", str(self.speed), "--mode", "kv_router", "--json"]
        return [str(python), str(peers / PEER_FILE), str(trace), *options]


def run(command: Sequence[str]) -> tuple[float, float]:
    """Run a command; return its CPU seconds and peak MiB, or exit if it fails."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / KIB


def row(case: Case, ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> str:
    cpu_s = [cpu for cpu, _ in ours]
    cells = [
        case.workers,
        f"{case.requests:,}",
        f"{case.speed:g}",
        f"{min(cpu_s):.2f}",
        f"{statistics.median(cpu_s):.2f}",
        f"{case.requests / min(cpu_s):,.0f}",
        f"{min(cpu_s) / case.requests * 1e6:,.0f}",
        f"{max(peak for _, peak in ours):.0f}",
    ]
    if theirs:
        peer_s = [cpu for cpu, _ in theirs]
        ratio = statistics.median(mine / other for mine, other in zip(cpu_s, peer_s, strict=True))
        cells += [f"{min(peer_s):.2f}", f"{max(peak for _, peak in theirs):.0f}", f"{ratio:.2f}"]
    else:
        cells += [""] * 3
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Measure and print a table, row by row."""
    args = arguments()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # children inherit it
    trace = args.traces / TRACE
    requests = len(trace.read_bytes().splitlines())
    rows = [Case(workers, requests, whole=True) for workers in args.workers]
    rows += [Case(LINEAR, requests // part, whole=False) for part in (4, 2)]
    print(
        "| workers | requests | speed | CPU s best | median | requests/s | CPU us a request | peak MiB "
        "| Dynamo: CPU s best | peak MiB | ours / Dynamo's CPU, median of pairs |"
    )
    print(f"|{'---:|' * 11}")
    for case in rows:
        ours, theirs = [], []
        for _ in range(args.rounds):
            ours.append(run(case.ours(trace)))
            if case.whole and args.dynamo_python and args.peers:
                theirs.append(run(case.dynamo(trace, args.dynamo_python, args.peers)))
        print(row(case, ours, theirs), flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""

    def folder(variable: str) -> Path | None:
        text = os.environ.get(variable)
        return Path(text) if text else None

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=folder("FOREBAY_TRACES"), help=f"the folder with {TRACE}")
    parser.add_argument("--dynamo-python", type=Path, default=folder("FOREBAY_DYNAMO_PYTHON"))
    parser.add_argument("--peers", type=Path, default=folder("FOREBAY_PEERS"), help=f"the folder with {PEER_FILE}")
    parser.add_argument(
        "--workers", type=lambda text: [int(part) for part in text.split(",")], default=[8, 16, 64, 512]
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds per row (default %(default)s)")
    args = parser.parse_args()
    if args.traces is None:
        parser.error("set FOREBAY_TRACES, or give --traces")
    return args


if __name__ == "__main__":
    main()
