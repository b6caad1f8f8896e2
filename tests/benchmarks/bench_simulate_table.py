"""Benchmark that compares policies with Dynamo's offline replay in a Markdown table.

It needs Mooncake's traces, conversation_trace.jsonl and synthetic_trace.jsonl, in the folder `mooncake` under
FOREBAY_TRACES. Dynamo's rows need FOREBAY_DYNAMO_PYTHON, a Python with ai-dynamo, and replay_dynamo.py in the folder
FOREBAY_PEERS; without these the rows are left out. forebay's rows run the command `forebay simulate`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

COMMAND = (sys.executable, "-m", "forebay.cli", "simulate")
TRACES = ("conversation", "synthetic")
POLICIES = ("kv", "round-robin", "random", "power-of-two", "least-loaded")
PEER_FILE = "replay_dynamo.py"
PEER_MODES = {"kv_router": "kv", "round_robin": "round-robin"}
BLOCKS = 16_384
RUN_TIMEOUT_S = 1_800


@dataclass(frozen=True, slots=True)
class Case:
    trace: Path
    workers: int

    @property
    def name(self) -> str:
        """Return the name of the trace without the common suffix."""
        return self.trace.stem.removesuffix("_trace")


@dataclass(frozen=True, slots=True)
class Result:
    reuse: float
    balance: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float


def simulated(case: Case) -> dict[str, Result]:
    policies = [word for policy in POLICIES for word in ("--policy", policy)]
    options = ["--workers", str(case.workers), "--kv-blocks", str(BLOCKS), "--json", *policies]
    command = [*COMMAND, str(case.trace), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=RUN_TIMEOUT_S, check=True)
    result = json.loads(done.stdout)
    return {
        policy: Result(
            reuse=one["prefix_reuse"],
            balance=one["load_max_over_mean"],
            ttft_mean_ms=one["ttft_ms"]["mean"],
            ttft_p50_ms=one["ttft_ms"]["p50"],
            ttft_p99_ms=one["ttft_ms"]["p99"],
        )
        for policy, one in result["policies"].items()
    }


def replayed(case: Case, python: Path, script: Path, repeats: int) -> dict[str, list[Result]]:
    """Return Dynamo's results, one per run, by our name of the policy."""
    command = [str(python), str(script), str(case.trace), "--workers", str(case.workers), "--blocks", str(BLOCKS)]
    command += ["--repeat", str(repeats), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=RUN_TIMEOUT_S, check=True)
    runs: dict[str, list[Result]] = {policy: [] for policy in PEER_MODES.values()}
    for line in map(json.loads, done.stdout.splitlines()):
        if "mode" in line:  # other lines compare the runs
            ttft = line["ttft_ms"]
            one = Result(line["reuse"], line["imbalance"], ttft["mean"], ttft["p50"], ttft["p99"])
            runs[PEER_MODES[line["mode"]]].append(one)
    return runs


def rows(case: Case, ours: dict[str, Result], peers: dict[str, list[Result]]) -> Iterator[str]:
    for policy, figures in ours.items():
        if runs := peers.get(policy):
            yield f"| {case.name} | {case.workers} | {policy} | Dynamo | {shown(runs)} |"
        yield f"| {case.name} | {case.workers} | {policy} | forebay | {shown([figures])} |"


def shown(runs: Sequence[Result]) -> str:
    """Return the columns: the mean of the runs and, if they differ, the range."""
    ttft = [spread([run.ttft_mean_ms for run in runs], ".1f")]
    ttft += [
        f"{statistics.fmean(values):,.0f}"
        for values in zip(*((r.ttft_p50_ms, r.ttft_p99_ms) for r in runs), strict=True)
    ]
    reuse, balance = spread([run.reuse for run in runs], ".4f"), spread([run.balance for run in runs], ".3f")
    return f"{reuse} | {balance} | {' / '.join(ttft)}"


def spread(values: Sequence[float], width: str) -> str:
    """Return the mean, and the range if the values differ."""
    mean, low, high = (f"{value:{width}}" for value in (statistics.fmean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def table(args: argparse.Namespace) -> None:
    """Run every case and print the table as it grows."""
    print(
        "| trace | workers | policy | | reuse | max/mean | TTFT mean / p50 / p99 ms |\n|---|---:|---|---|---|---|---|"
    )
    for case in cases(args):
        ours = simulated(case)
        peers: dict[str, list[Result]] = {}
        if args.dynamo_python and args.peers:
            peers = replayed(case, args.dynamo_python, args.peers / PEER_FILE, args.repeat)
        print(*rows(case, ours, peers), sep="\n", flush=True)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield all traces with all numbers of workers."""
    for name in args.trace:
        for workers in args.workers:
            yield Case(args.traces / "mooncake" / f"{name}_trace.jsonl", workers)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, variable, description in (
        ("--traces", "FOREBAY_TRACES", "the folder that holds mooncake/"),
        ("--dynamo-python", "FOREBAY_DYNAMO_PYTHON", "a Python that has ai-dynamo"),
        ("--peers", "FOREBAY_PEERS", f"the folder that holds {PEER_FILE}"),
    ):
        default = os.environ.get(variable)
        parser.add_argument(
            option, type=Path, default=default and Path(default), help=f"{description}; default: {variable}"
        )
    parser.add_argument("--trace", choices=TRACES, action="append", help="default: all")
    parser.add_argument("--workers", type=lambda text: [int(part) for part in text.split(",")], default=[8, 16])
    parser.add_argument("--repeat", type=int, default=3, help="runs of Dynamo's; its KV router is randomized")
    args = parser.parse_args()
    args.trace = args.trace or TRACES
    missing = [case.trace for case in cases(args) if not case.trace.is_file()] if args.traces else ["--traces"]
    if missing:
        parser.error(f"set FOREBAY_TRACES to the folder that holds mooncake/: there is no {missing[0]}")
    table(args)


if __name__ == "__main__":
    main()
