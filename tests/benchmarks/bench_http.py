"""Benchmark of forebay's control plane against Dynamo's or, with `--keys`, against forebay's without API keys.

Both sides get the same load, alternately, on one machine.

It needs a folder of peer scripts (FOREBAY_PEERS or --peers) with dynamo.sh, which starts and stops Dynamo's frontend
with mock engines. Engine time is near zero on both sides, so the benchmark measures HTTP, chat template, tokenization,
routing and streaming. forebay runs in one process, with its log in a file. Afterwards every decision in the log is
verified; the exit code is 1 if one is not.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

PORT, PEER_PORT = 18_110, 18_480
URL = f"http://127.0.0.1:{PORT}"
WORKERS = 4
READY_S = 30.0
CASES: dict[str, list[str]] = {
    "short, 1 connection": ["--conc", "1", "--requests", "800"],
    "short, 64 connections": ["--conc", "64", "--requests", "3000"],
    "short, 128 tokens out, 16 connections": ["--conc", "16", "--requests", "1000", "--max-tokens", "128"],
    "long, 16 connections": ["--conc", "16", "--requests", "600", "--words", "4000"],
}
# At the normal speed of the mock engines each token is an event of its own. In `CASES` all tokens are in one event.
STEADY = "short, 128 tokens out, 64 connections, engine at speed 1"
STEADY_CASES = {STEADY: ["--conc", "64", "--requests", "600", "--max-tokens", "128"]}
FAST, STEADY_SPEED = "1000000", "1"
FOREBAY = str(Path(sys.executable).with_name("forebay"))


@dataclass(slots=True)
class Verified:
    """The outcome of verifying the logs of all rounds.

    Attributes:
        verified: number of decisions that were derived again without a difference.
        problems: what kept the others from it.
    """

    decisions: int = 0
    verified: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, report: dict[str, Any]) -> None:
        """Add a report of `forebay verify --json`."""
        self.decisions += report["decisions"]
        self.verified += report["verified"]
        if report["divergence"] is not None:
            self.problems.append(f"divergence: {report['divergence']}")

    def check(self) -> None:
        """Raise SystemExit with code 1 unless every decision was verified, and there was one."""
        if self.verified < self.decisions or not self.decisions or self.problems:
            raise SystemExit("; ".join([f"not all decisions could be verified: {self}", *self.problems]))

    def __str__(self) -> str:
        return f"verified {self.verified} of {self.decisions} decisions"


@dataclass(frozen=True, slots=True)
class Medians:
    """Medians over the rounds of a case; NaN if no response had two events with text."""

    requests_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float
    itl_p90_ms: float
    cpu_us: float
    events: float

    def cells(self) -> str:
        """Return the cells of a table row, as in `HEADER`."""
        itl = "-" if math.isnan(self.itl_p50_ms) else f"{self.itl_p50_ms:.2f} / {self.itl_p90_ms:.2f}"
        return f"{self.requests_per_s:.0f} | {self.ttft_p50_ms:.2f} | {itl} | {self.cpu_us:.0f} | {self.events:.1f}"


HEADER = "requests/s | TTFT p50 ms | ITL p50 / p90 ms | CPU us/request | events/request"


def load(url: str, pids: str, options: list[str]) -> dict[str, Any]:
    """Run the load client, and return its measurements. Raises SystemExit if a request failed."""
    command = [sys.executable, "-m", "tests.benchmarks.http_load", "--url", url, "--pids", pids, *options]
    result: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    if result["failed"]:
        raise SystemExit(f"{result['failed']} requests failed: {result['first_failure']}")
    return result


@contextmanager
def up(log: Path | str, *options: str) -> Iterator[str]:
    """Run `forebay up` on `URL` until the body ends; yield its pid as the load client expects it."""
    command = [FOREBAY, "up", "--port", str(PORT), "--log", str(log), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        ends_s = time.monotonic() + READY_S
        while not _is_ready():
            if time.monotonic() > ends_s or process.poll() is not None:
                raise SystemExit("forebay is not ready")
            time.sleep(0.1)
        yield f"forebay={process.pid}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def _is_ready() -> bool:
    try:
        urllib.request.urlopen(f"{URL}/ready", timeout=5)
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


@contextmanager
def forebay(model: Path, verified: Verified, speedup: str = FAST, *, keys: Path | None = None) -> Iterator[str]:
    """Run forebay, with a file of API keys if given, and verify its log afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        log = f"{folder}/log.db"
        options = (
            *("--workers", str(WORKERS), "--model", str(model), "--model-name", "tiny", "--speedup", speedup),
            *("--kv-blocks", "65536", "--max-num-seqs", "512", "--max-num-batched-tokens", "65536"),
        )
        with up(log, *options, *(("--api-key-file", str(keys)) if keys else ())) as pids:
            yield pids
        command = [FOREBAY, "verify", log, "--json"]
        verified.add(json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout))


@contextmanager
def dynamo(peers: Path, speedup: str = FAST) -> Iterator[str]:
    script = str(peers / "dynamo.sh")
    command, environment = [script, "start", "kv", str(WORKERS)], {**os.environ, "SPEEDUP": speedup}
    started = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    try:
        yield started.stdout
    finally:
        subprocess.run([script, "stop"], check=True)


def medians(results: list[dict[str, Any]]) -> Medians:
    """Return the medians of the load client's measurements in several rounds of a case."""
    itl = [result["itl_ms"] or {"p50": math.nan, "p90": math.nan} for result in results]
    return Medians(
        statistics.median(result["requests_per_s"] for result in results),
        statistics.median(result["ttft_ms"]["p50"] for result in results),
        statistics.median(one["p50"] for one in itl),
        statistics.median(one["p90"] for one in itl),
        statistics.median(sum(result["cpu_us_per_request"].values()) for result in results),
        statistics.median(result["events_per_request"] for result in results),
    )


def print_cases(
    name: str,
    ours: dict[str, list[dict[str, Any]]],
    theirs: dict[str, list[dict[str, Any]]],
    *,
    peer_name: str = "Dynamo",
) -> None:
    """Print both systems' medians by case, and their ratios; of ITL the difference, forebay's minus the other's."""
    print(f"| case | | {HEADER} |\n|---|---|{'---|' * (HEADER.count('|') + 1)}")
    for case, results in ours.items():
        mine, peer = medians(results), medians(theirs[case])
        print(f"| {case} | {name} | {mine.cells()} |\n| | {peer_name} | {peer.cells()} |")
        itl = f"{mine.itl_p50_ms - peer.itl_p50_ms:+.2f} / {mine.itl_p90_ms - peer.itl_p90_ms:+.2f}"
        print(
            f"| | ratio, ITL: difference | {mine.requests_per_s / peer.requests_per_s:.2f} "
            f"| {mine.ttft_p50_ms / peer.ttft_p50_ms:.2f} | {'-' if 'nan' in itl else itl} "
            f"| {mine.cpu_us / peer.cpu_us:.2f} | |"
        )


@contextmanager
def key_file() -> Iterator[tuple[Path, str]]:
    """Yield a file with a key of a tenant that has every kind of limit, and the key."""
    with tempfile.TemporaryDirectory() as folder:
        path, many = Path(folder, "keys"), str(10**12)
        limits = [
            part for name in ("rpm", "tpm", "in-flight", "budget-day", "budget-month") for part in (f"--{name}", many)
        ]
        command = [FOREBAY, "keys", "create", "--tenant", "bench", *limits, "--file", str(path)]
        yield path, subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


Side = Callable[[str], AbstractContextManager[str]]  # from a speed of the engines to pids


def measure(sides: list[tuple[Side, str, list[str]]], rounds: int) -> list[dict[str, list[dict[str, Any]]]]:
    """Load the sides in turn, each with its URL and options of the load client; return the results by side and case.

    The order of the sides alternates, so that a machine that becomes slower favors neither of them.
    """
    found: list[dict[str, list[dict[str, Any]]]] = [{case: [] for case in (*CASES, *STEADY_CASES)} for _ in sides]
    for number in range(rounds):
        sys.stderr.write(f"round {number + 1} of {rounds}\n")
        for speedup, cases in ((FAST, CASES), (STEADY_SPEED, STEADY_CASES)):
            pairs = list(zip(sides, found, strict=True))
            for (side, url, own), results in reversed(pairs) if number % 2 else pairs:
                with side(speedup) as pids:
                    for case, options in cases.items():
                        results[case].append(load(url, pids, [*options, *own]))
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=os.environ.get("FOREBAY_PEERS"))
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "forebay-peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keys", action="store_true", help="measure keys, limits and cache salts instead of Dynamo")
    args = parser.parse_args()
    if args.peers is None and not args.keys:
        raise SystemExit("set FOREBAY_PEERS to the folder with dynamo.sh")
    model, verified = args.home / "tiny-model", Verified()
    plain = partial(forebay, model, verified), URL, list[str]()
    if args.keys:
        with key_file() as (path, key):
            keyed = partial(forebay, model, verified, keys=path), URL, ["--api-key", key]
            ours, theirs = measure([keyed, plain], args.rounds)
        print_cases("with keys", ours, theirs, peer_name="without keys")
    else:
        ours, theirs = measure([plain, (partial(dynamo, args.peers), f"http://127.0.0.1:{PEER_PORT}", [])], args.rounds)
        print_cases("forebay", ours, theirs)
    print(f"\n{verified}")
    verified.check()


if __name__ == "__main__":
    main()
