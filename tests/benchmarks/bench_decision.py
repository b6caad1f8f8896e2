"""CPU time of one whole decision in the core, by workers and by blocks held in the prefix index.

A decision is `open_run` and `step` of a `RequestSubmitted`: the candidates, their costs, the selection, the record and
the load update. Encoding the record is measured separately. Every request hits the caches of the holders of its chain,
one of a few, so the number of requests in flight that share a chain is the same at every size. Each case runs in a
fresh process on one core.
"""

import argparse
import gc
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from forebay.core.block_hashes import extend_chain
from forebay.core.step import AnyDecision, InputEvent, claim, open_run, step
from forebay.core.world import World
from forebay.events.base import pack_u32, pack_u64
from forebay.events.codec import encode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import WorkerJoined
from forebay.events.kv import BlocksStored
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.requests import RequestSubmitted, Sampling
from forebay.events.topics import CONTROL, DECISIONS, FLEET, KV_EVENTS, PROGRESS, REQUESTS, Topic
from tests.benchmarks.bench_index import in_fresh_process, integers
from tests.benchmarks.recordings import BLOCK_SIZE, MODEL, POOL, attempt_of, worker_name, worker_spec

PROMPT_TOKENS, PROMPT_BLOCKS = 1_000, 15
CHAIN_BLOCKS = 8
HOLDERS = 8  # workers that cache each chain
CHAINS_ASKED = 128
IN_FLIGHT = 4  # requests in flight per worker
SEED = 20_261_121
EVERY_US = 100
TIMEOUT_US = 3_600_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table; `blocks` are (worker, block) pairs."""

    mode: str
    workers: int
    blocks: int
    decisions: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """CPU microseconds of each decision, sorted, without and with encoding of its record.

    `held` is the number of (worker, block) pairs, `found` the mean number of blocks that the selected worker had.
    """

    decided_us: list[float]
    recorded_us: list[float]
    held: int
    found: float


class Group:
    """A world with its workers and a changing set of requests."""

    def __init__(self, case: Case) -> None:
        self.world = World()
        self._random = random.Random(SEED)
        self._now_us = 0
        self._epochs: list[int] = []
        self._under_way: deque[RequestRouted] = deque()
        self._under_way_max = IN_FLIGHT * case.workers
        claim(self.world, 0)
        router = RouterConfig(mode=case.mode)
        self._apply(CONTROL, PoolConfigured(pool=POOL, model=MODEL, block_size=BLOCK_SIZE, router=router))
        for number in range(case.workers):
            self._epochs.append(self.world.view.get(FLEET.name, 0))
            spec = worker_spec(worker_name(number))
            self._apply(FLEET, WorkerJoined(owner_epoch=0, spec=spec, lease="", slot=number, from_offset=0))
        self._asked: list[list[int]] = []
        self.held = self._fill(case)

    def requests(self, count: int) -> Iterator[RequestSubmitted]:
        """Yield requests, each of which begins with one of the chains and continues with its own blocks."""
        for number in range(count):
            cached = self._random.choice(self._asked)
            own = [self._random.getrandbits(64) for _ in range(PROMPT_BLOCKS - CHAIN_BLOCKS)]
            yield RequestSubmitted(
                request_id=f"bench-{number}",
                model=MODEL,
                token_ids=pack_u32([number] * PROMPT_TOKENS),
                sequence_hashes=pack_u64(cached + extend_chain(cached[-1], own)),
                reply_slot=0,
                timeout_us=TIMEOUT_US,
                tie_seed=self._random.getrandbits(64),
                sampling=Sampling(max_tokens=128),
            )

    def decide(self, request: RequestSubmitted) -> tuple[float, float, RequestRouted]:
        """Decide a request; return the CPU microseconds without and with encoding, and the record."""
        self._now_us += EVERY_US
        began_ns = time.thread_time_ns()
        open_run(self.world, self._now_us)
        [routed] = step(self.world, REQUESTS.name, request, self._now_us)
        decided_ns = time.thread_time_ns()
        encode(DECISIONS, routed)
        recorded_ns = time.thread_time_ns()
        assert isinstance(routed, RequestRouted)
        self._under_way.append(routed)
        return (decided_ns - began_ns) / 1e3, (recorded_ns - began_ns) / 1e3, routed

    def settle(self) -> None:
        """End the oldest request if enough are in flight, so that the load stays constant."""
        if len(self._under_way) <= self._under_way_max:
            return
        routed = self._under_way.popleft()
        self._apply(PROGRESS, FirstTokenEmitted(**attempt_of(routed)))
        self._apply(PROGRESS, RequestFinished(**attempt_of(routed), finish_reason="length"))

    def _apply(self, topic: Topic, event: InputEvent) -> list[AnyDecision]:
        open_run(self.world, self._now_us)
        decided = step(self.world, topic.name, event, self._now_us)
        self.world.consumed.clear()  # a record lists the events applied since the previous record
        return decided

    def _fill(self, case: Case) -> int:
        """Assign the chains to the workers in turn; return the number of (worker, block) pairs."""
        holders = min(HOLDERS, case.workers)
        chains = max(CHAINS_ASKED, case.blocks // (CHAIN_BLOCKS * holders))
        for number in range(chains):
            chain = extend_chain(None, [self._random.getrandbits(64) for _ in range(CHAIN_BLOCKS)])
            if number < CHAINS_ASKED:
                self._asked.append(chain)
            for turn in range(number * holders, (number + 1) * holders):
                worker = turn % case.workers
                stored = BlocksStored(
                    worker_id=worker_name(worker),
                    worker_epoch=self._epochs[worker],
                    seq=turn // case.workers + 1,
                    sequence_hashes=pack_u64(chain),
                )
                self._apply(KV_EVENTS, stored)
        return chains * holders * CHAIN_BLOCKS


def measure(case: Case) -> Measurement:
    """Measure one case after its load has become constant."""
    group = Group(case)
    warm_up = IN_FLIGHT * case.workers
    requests = list(group.requests(warm_up + case.decisions))
    gc.collect()
    gc.freeze()  # as an owner does with a large index
    taken = []
    for request in requests:
        taken.append(group.decide(request))
        group.settle()
    taken = taken[warm_up:]
    found = statistics.fmean(routed.terms.device_overlap for *_, routed in taken)
    assert not +group.world.index.counts, group.world.index.counts
    return Measurement(sorted(one[0] for one in taken), sorted(one[1] for one in taken), group.held, found)


def row(case: Case, rounds: list[Measurement]) -> str:
    """Return a line of the table: the best round, because other load on the machine only adds time."""
    best = min(rounds, key=lambda figures: statistics.median(figures.decided_us))
    cells = (
        case.mode,
        case.workers,
        f"{best.held:,}",
        f"{best.found:.1f}",
        f"{statistics.median(best.decided_us):.0f}",
        f"{statistics.fmean(best.decided_us):.0f}",
        f"{best.decided_us[len(best.decided_us) * 99 // 100]:.0f}",
        f"{statistics.median(best.recorded_us):.0f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Measure and print a table, row by row."""
    args = arguments()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # children inherit it
    print(f"seed {SEED}; {PROMPT_BLOCKS} blocks a request, {CHAIN_BLOCKS} of them held by {HOLDERS} workers\n")
    print("| mode | workers | blocks held | found | us p50 | mean | p99 | with the record, p50 |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for mode in args.modes:
        for workers in args.workers:
            for blocks in args.blocks:
                case = Case(mode, workers, blocks, args.decisions)
                print(row(case, [in_fresh_process(measure, case) for _ in range(args.rounds)]), flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["kv"], help="default kv")
    parser.add_argument("--workers", type=integers, default=[8, 64, 512], help="default 8,64,512")
    parser.add_argument("--blocks", type=integers, default=[10**4, 10**5, 10**6], help="default 1e4,1e5,1e6")
    parser.add_argument("--decisions", type=int, default=5_000, help="decisions per round (default %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds per case, of which the table shows the best (default 3)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
