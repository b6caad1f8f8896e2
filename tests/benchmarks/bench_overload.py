"""What clients get when five times as many requests come as the engines can run: `forebay up`, mock engines.

Two runs on one system, by a load generator in a process of its own: a tenth of the capacity for the latency without
load, then the overload. Capacity follows from the mock engines' pace; the process needs CPU to spare, so look at the
load averages that are printed. With `--cpu-bound` engines have room for everything, and the process itself is what is
short.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_http import wait_ready

PORT = 18_130
ENGINE = ("--workers", "4", "--max-num-seqs", "2")
MAX_TOKENS = 100
CAPACITY_PER_S = 12.5  # four workers, two sequences each, 0.64 s per request of 100 tokens
TIMES = 5.0


def offer(pid: int, rate: float, seconds: float, max_tokens: int) -> dict[str, Any]:
    """Offer load in a process of its own; what became of it."""
    command = [
        *(sys.executable, "-m", "tests.benchmarks.overload_load", "--to", f"127.0.0.1:{PORT}", "--pids", str(pid)),
        *("--rate", str(rate), "--seconds", str(seconds), "--max-tokens", str(max_tokens)),
    ]
    result: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the overload (%(default)s)")
    parser.add_argument("--cpu-bound", action="store_true", help="10,000 requests at 500/s, engines as by default")
    args = parser.parse_args()
    program = str(Path(sys.executable).with_name("forebay"))
    engine, tokens = ((), 16) if args.cpu_bound else (ENGINE, MAX_TOKENS)
    calm, rate, seconds = CAPACITY_PER_S / 10, CAPACITY_PER_S * TIMES, args.seconds
    if args.cpu_bound:
        rate, seconds = 500.0, 20.0
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "up", "--port", str(PORT), "--log", f"{folder}/log.db", *engine]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            wait_ready(f"http://127.0.0.1:{PORT}/ready", process)
            for name, runs in (("unloaded", (calm, 20.0)), ("overload", (rate, seconds))):
                print(f"{name}: {runs[0]:g} requests/s for {runs[1]:g} s, load averages {os.getloadavg()}")
                print(json.dumps(offer(process.pid, runs[0], runs[1], tokens), indent=2), flush=True)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


if __name__ == "__main__":
    main()
