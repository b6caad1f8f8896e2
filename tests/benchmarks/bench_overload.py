"""Benchmark of overload: client latencies when requests arrive at five times the capacity of the mock engines.

The load client makes two runs on one system: a tenth of the capacity, for the latency without load, then the overload.
The capacity follows from the step times of the mock engines. The system, `forebay up`, needs spare CPU: check the load
averages that are printed.
"""

import argparse
import json
import tempfile

from tests.benchmarks.bench_http import URL, WORKERS, load, up

MAX_TOKENS = 100
CAPACITY_PER_S = 12.5  # four workers, two sequences each, 0.64 s per request of 100 tokens
TIMES = 5.0
UNLOADED_S = 20.0
MODEL = "forebay-default"


def measure(pids: str, seconds: float) -> None:
    """Apply a light load and then the overload, and print the results."""
    runs = {"unloaded": (CAPACITY_PER_S / 10, UNLOADED_S), "overload": (CAPACITY_PER_S * TIMES, seconds)}
    for name, (per_s, for_s) in runs.items():
        requests = round(per_s * for_s)
        options = {"rate": per_s, "requests": requests, "max-tokens": MAX_TOKENS, "words": 50, "model": MODEL}
        words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
        print(f"{name}: {per_s:g} requests/s for {for_s:g} s")
        print(json.dumps(load(URL, pids, [*words, "--warmup", "0"]), indent=2), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the overload (default %(default)s)")
    parser.add_argument("router", nargs="*", help="options of the router, after --")
    args = parser.parse_args()
    engine = ("--workers", str(WORKERS), "--max-num-seqs", "2")
    with tempfile.TemporaryDirectory() as folder, up(f"{folder}/log.db", *engine, *args.router) as pids:
        measure(pids, args.seconds)


if __name__ == "__main__":
    main()
