"""Benchmark of two models behind one endpoint against one model: the same load on both systems in turn.

Both run in one process with four mock workers, and the requests of the load alternate between the models. Afterwards
every decision of both logs is verified; the exit code is 1 if one is not.
"""

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forebay.ingress.model import DEFAULT_MODEL
from tests.benchmarks.bench_http import CASES, FAST, FOREBAY, PORT, WORKERS, Verified, load, wait_ready

MODELS = ("one", "other")
HEADER = "requests/s | TTFT p50 ms | CPU us/request"


@contextmanager
def forebay(models: Sequence[Path], folder: Path, verified: Verified) -> Iterator[str]:
    """Run a system with these models, and verify the log of each model afterwards."""
    log = folder / "log.db"
    command = [FOREBAY, "up", "--port", str(PORT), "--workers", str(WORKERS // len(models)), "--log", str(log)]
    command += ["--speedup", FAST, "--kv-blocks", "65536", "--max-num-seqs", "512"]
    command += [option for model in models for option in ("--model", str(model))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_ready(f"http://127.0.0.1:{PORT}/ready", process)
        yield f"forebay={process.pid}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    for model in models:
        command = [FOREBAY, "replay", "verify", str(log), "--group", model.name, "--json"]
        verified.add(json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout))
    for part in folder.glob("log.db*"):
        part.unlink()


def row(results: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the medians of requests/s, TTFT in milliseconds and CPU time in microseconds per request."""
    return (
        statistics.median(one["requests_per_s"] for one in results),
        statistics.median(one["ttft_ms"]["p50"] for one in results),
        statistics.median(sum(one["cpu_us_per_request"].values()) for one in results),
    )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    verified = Verified()
    found: dict[tuple[str, int], list[dict[str, Any]]] = {(case, count): [] for case in CASES for count in (1, 2)}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        models = [Path(shutil.copytree(DEFAULT_MODEL, folder / name)) for name in MODELS]
        for number in range(args.rounds):
            # In turn, so that a slow change of the machine affects both alike.
            for count in (1, 2) if number % 2 else (2, 1):
                with forebay(models[:count], folder, verified) as pids:
                    for case, options in CASES.items():
                        names = ",".join(MODELS[:count])
                        found[case, count].append(load(f"http://127.0.0.1:{PORT}", pids, [*options, "--model", names]))
    print(f"| case | models | {HEADER} |\n|---|---|---|---|---|")
    for case in CASES:
        one, two = row(found[case, 1]), row(found[case, 2])
        for name, values in (("1", one), ("2", two)):
            print(f"| {case} | {name} | {values[0]:.0f} | {values[1]:.2f} | {values[2]:.0f} |")
        print("| | ratio | " + " | ".join(f"{b / a:.2f}" for a, b in zip(one, two, strict=True)) + " |")
    print(f"\n{verified}")
    verified.check()


if __name__ == "__main__":
    main()
