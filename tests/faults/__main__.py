"""`python -m tests.faults`: search for faults of the control plane with seeded simulations.

Prints the failing seed, the violated invariant and the smallest plan that still violates it. The log of that plan is
saved in `.fuzz` for `forebay explain`, `at` and `verify`. Exits 1 if a seed fails. docs/reliability.md describes
the faults and the invariants.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from forebay.transport.base import Draft, Record
from forebay.transport.sqlite.log import SqliteLog
from tests.faults.plan import DEPTHS, KINDS, depth_of, draw_plan, read_plan
from tests.faults.search import Tally, results_of, shrink
from tests.faults.simulation import Result, simulate

FOLDER = Path(".fuzz")
PROGRESS_S = 10.0
SHRINK_S = 60.0
APPEND_MAX = 500
FAILED_MAX = 5  # seeds that are reported with a smaller plan


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args(arguments)
    if options.plan is not None:
        return _run_one(simulate(read_plan(options.plan)))
    if options.seed is not None:
        return _run_one(simulate(draw_plan(options.seed, options.depth or depth_of(options.seed))))
    first = random.SystemRandom().randrange(1 << 31) if options.first is None else options.first
    print(f"fuzz: seeds from {first}; repeat one with: make fuzz SEED=n")
    tally, failed = _search(range(first, first + options.seeds), options)
    _print_tally(tally)
    for result in [] if options.until_failed else failed[:FAILED_MAX]:
        _run_one(shrink(result, SHRINK_S))
    if failed:
        print(f"fuzz: {len(failed)} of {tally.seeds} seeds failed: {[result.plan.seed for result in failed]}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds")
    parser.add_argument("--first", type=int, help="first seed; drawn if it is not given")
    parser.add_argument("--seed", type=int, help="run only this seed, and save its log")
    parser.add_argument("--plan", type=Path, help="run only this plan, a file of an earlier failure")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further seed after this time")
    parser.add_argument("--until-failed", action="store_true", help="stop at the first failing seed")
    parser.add_argument("--depth", choices=DEPTHS, help="kafka runs the Kafka transport; default: by the seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    return parser


def _search(seeds: Iterable[int], options: argparse.Namespace) -> tuple[Tally, list[Result]]:
    """Simulate the seeds, and return sums and the results with a violation."""
    tally, failed = Tally(), []
    began_s = reported_s = time.monotonic()
    for result in results_of(seeds, options.depth, options.jobs, options.seconds):
        tally.add(result)
        if result.violation:
            failed.append(result)
            print(f"fuzz: seed {result.plan.seed}: {result.violation[:200]}", flush=True)
            if options.until_failed:
                return tally, failed
        now_s = time.monotonic()
        if now_s - reported_s >= PROGRESS_S:
            reported_s = now_s
            print(f"fuzz: {tally.seeds} seeds, {tally.requests} requests, {now_s - began_s:.0f} s", flush=True)
    return tally, failed


def _run_one(result: Result) -> int:
    """Print one result in detail, and save its log and its plan."""
    plan = result.plan
    print(f"fuzz: seed {plan.seed}: {result.violation or 'no violation'}")
    print(f"      trace {result.trace_hash}, {result.choices} choices, {result.virtual_s:.1f} s of virtual time")
    FOLDER.mkdir(exist_ok=True)
    log, kept = FOLDER / f"seed-{plan.seed}.db", FOLDER / f"seed-{plan.seed}.json"
    plan.save(kept)
    log.unlink(missing_ok=True)
    asyncio.run(_save(result.partitions, log))
    if result.violation:
        print(f"      {len(plan.requests)} requests and {len(plan.faults)} faults are left:")
        for fault in plan.faults:
            print(
                f"      {fault.at_ms / 1000:7.3f} s  {fault.kind} {fault.target} {fault.duration_ms} ms x{fault.amount}"
            )
        for planned in plan.requests:
            print(f"      {planned.at_ms / 1000:7.3f} s  request {planned.name} to {planned.ingress}")
    print(f"      repeat it: .venv/bin/python -m tests.faults --plan {kept}")
    print(f"      its log:   .venv/bin/forebay explain {log} REQUEST")
    return 1 if result.violation else 0


async def _save(partitions: dict[tuple[str, int], list[Record]], path: Path) -> None:
    """Write the records of all partitions at their offsets to a new file. The times of the appends are not kept."""
    log = SqliteLog.open(path)
    try:
        for (topic, partition), records in partitions.items():
            drafts = [Draft(topic, partition, record.value, record.key, record.headers) for record in records]
            for begin in range(0, len(drafts), APPEND_MAX):
                await log.append(drafts[begin : begin + APPEND_MAX])
    finally:
        log.close()


def _print_tally(tally: Tally) -> None:
    print(f"{tally.seeds} seeds, {tally.requests} requests, {tally.virtual_s:.0f} s of virtual time")
    print(f"{tally.choices} choices of the scheduler, {tally.callbacks} callbacks")
    rate = tally.requests / tally.cpu_s if tally.cpu_s else 0.0
    print(f"{tally.cpu_s:.0f} s of CPU, {rate:.0f} requests per second of CPU")
    print("outcomes: " + ", ".join(f"{name} {number}" for name, number in tally.outcomes.most_common()))
    width = max(map(len, KINDS))
    for kind in KINDS:
        print(f"  {kind:{width}} {tally.fired[kind]:8}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
