"""CPU time of the tier manager for one prompt, with many resident blocks in each of host, disk and store.

Every call gets new key objects, whose hashes are not known yet, as in a worker. New prompts replace old blocks, because
all tiers are full.
"""

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence

from forebay.kv_tiers.manager import TierLimits, TierManager, TierSet, Write
from forebay.workers.kv_tiers.identity import BlockName

PROMPT_BLOCKS = 256
MEASURED = 500  # prompts per case

Names = list[BlockName]


def prompt(number: int) -> Names:
    """Return new objects with the names of the blocks of a prompt."""
    first = number * PROMPT_BLOCKS
    return [BlockName(hashlib.sha256(str(at).encode()).digest(), at) for at in range(first, first + PROMPT_BLOCKS)]


def finish(manager: TierManager[BlockName], writes: Sequence[Write[BlockName]]) -> None:
    """End writes and those that follow."""
    pending = list(writes)
    while pending:
        pending += manager.written(pending.pop().number)


def measure(label: str, numbers: Sequence[int], call: Callable[[Names], object]) -> None:
    """Print the CPU time of a call per prompt."""
    times = []
    for number in numbers:
        names = prompt(number)
        start_ns = time.thread_time_ns()
        call(names)
        times.append((time.thread_time_ns() - start_ns) / 1e3)
    cuts = statistics.quantiles(times, n=100)
    print(f"{label:44} {cuts[49]:7.0f} us median {cuts[98]:7.0f} us p99")


def load(manager: TierManager[BlockName], names: Names) -> None:
    """Match and load a prompt."""
    for one in manager.load(names, 0, manager.match(names)):
        manager.loaded(one.number)


def main() -> None:
    """Fill the tiers, and measure each operation."""
    parser = argparse.ArgumentParser(prog="bench tier-manager", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks per tier")
    prompts = parser.parse_args().blocks // PROMPT_BLOCKS
    through, filtered = (TierLimits(blocks=prompts * PROMPT_BLOCKS, filter=flag) for flag in (False, True))
    manager: TierManager[BlockName] = TierManager(TierSet(host=through, disk=filtered, store=filtered))
    for _ in range(2):
        for number in range(prompts):
            finish(manager, manager.offer(prompt(number)))
        manager.changes()
    print(f"{manager.count('host'):,} blocks in host, {manager.count('disk'):,} on disk, {PROMPT_BLOCKS} per prompt")
    known = range(0, prompts, max(1, prompts // MEASURED))
    new = range(prompts, prompts + MEASURED)
    measure("match", known, manager.match)
    measure("match, load, loaded", known, lambda names: load(manager, names))
    measure("offer of a prompt that all tiers have", known, manager.offer)
    measure("offer of a new prompt, written to host", new, lambda names: finish(manager, manager.offer(names)))
    measure("second offer, written to disk and store", new, lambda names: finish(manager, manager.offer(names)))
