"""Benchmark of forebay's control plane against Dynamo's: the same load on both, alternately, on one machine.

It needs a folder of peer scripts (FOREBAY_PEERS or --peers): load.py, the load client, and dynamo.sh, which starts and
stops Dynamo's frontend with mock engines. Engine time is near zero on both sides, so the benchmark measures HTTP, chat
template, tokenization, routing and streaming. forebay runs in one process, with its log in a file.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PORT, PEER_PORT = 18_110, 18_480
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
STEADY_TOKENS = 128


def load(peers: Path, python: str, url: str, pids: str, options: list[str]) -> dict[str, Any]:
    command = [python, str(peers / "load.py"), "--url", url, "--pids", pids, "--quickack", "--json", *options]
    result: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if result["failed"]:
        raise SystemExit(f"{result['failed']} requests failed: {result['first_failure']}")
    return result


@contextmanager
def forebay(model: Path, speedup: str = FAST) -> Iterator[str]:
    program = str(Path(sys.executable).with_name("forebay"))
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(program, "up", "--port", str(PORT), "--workers", str(WORKERS), "--log", f"{folder}/log.db"),
            *("--model", str(model), "--model-name", "tiny", "--speedup", speedup, "--kv-blocks", "65536"),
            *("--max-num-seqs", "512", "--max-num-batched-tokens", "65536"),
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            wait_ready(f"http://127.0.0.1:{PORT}/ready", process)
            yield f"forebay={process.pid}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def wait_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    ends_s = time.monotonic() + READY_S
    while time.monotonic() < ends_s and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5)
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
        else:
            return
    raise SystemExit("forebay is not ready")


@contextmanager
def dynamo(peers: Path, speedup: str = FAST) -> Iterator[str]:
    script = str(peers / "dynamo.sh")
    command, environment = [script, "start", "kv", str(WORKERS)], {**os.environ, "SPEEDUP": speedup}
    started = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    try:
        yield started.stdout
    finally:
        subprocess.run([script, "stop"], check=True)


def medians(results: list[dict[str, Any]]) -> tuple[float, float, float, float]:
    """Return medians: requests per second, TTFT p50 in ms, CPU us per request of all processes, events per request."""
    return (
        statistics.median(result["requests_per_s"] for result in results),
        statistics.median(result["ttft_ms"]["p50"] for result in results),
        statistics.median(sum(result["cpu_us_per_request"].values()) for result in results),
        statistics.median(result["events_per_request"] for result in results),
    )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=os.environ.get("FOREBAY_PEERS"))
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "forebay-peers")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.peers is None:
        raise SystemExit("set FOREBAY_PEERS to the folder with load.py and dynamo.sh")
    python = str(args.home / "venv" / "bin" / "python")
    ours: dict[str, list[dict[str, Any]]] = {case: [] for case in (*CASES, *STEADY_CASES)}
    theirs: dict[str, list[dict[str, Any]]] = {case: [] for case in ours}
    for number in range(args.rounds):
        sys.stderr.write(f"round {number + 1} of {args.rounds}\n")
        for speedup, cases in ((FAST, CASES), (STEADY_SPEED, STEADY_CASES)):
            with forebay(args.home / "tiny-model", speedup) as pids:
                for case, options in cases.items():
                    ours[case].append(load(args.peers, python, f"http://127.0.0.1:{PORT}", pids, options))
            with dynamo(args.peers, speedup) as pids:
                for case, options in cases.items():
                    theirs[case].append(load(args.peers, python, f"http://127.0.0.1:{PEER_PORT}", pids, options))
    print("| case | | requests/s | TTFT p50 ms | CPU us/request | events/request |")
    print("|---|---|---|---|---|---|")
    for case, results in ours.items():
        mine, peer = medians(results), medians(theirs[case])
        print(f"| {case} | forebay | {mine[0]:.0f} | {mine[1]:.2f} | {mine[2]:.0f} | {mine[3]:.1f} |")
        print(f"| | Dynamo | {peer[0]:.0f} | {peer[1]:.2f} | {peer[2]:.0f} | {peer[3]:.1f} |")
        print(f"| | ratio | {mine[0] / peer[0]:.2f} | {mine[1] / peer[1]:.2f} | {mine[2] / peer[2]:.2f} | |")


if __name__ == "__main__":
    main()
