"""Benchmark of the prefix index: speed and memory beside Dynamo's RadixTree on the same input.

The input comes from the peer's own benchmark, a file `index_dynamo.py` with `workload` and `queries`. Every case runs
in a fresh process on one core and prints JSON lines in the peer's format.
"""

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from forebay.core.block_hashes import extend_chain
from forebay.core.state.prefix_index import PrefixIndex
from forebay.events import topics
from forebay.events.base import array_u64, pack_u64
from forebay.events.codec import decode, encode
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheEvent

PEER_FILE = "index_dynamo.py"
PEER_TIMEOUT_S = 600  # one case takes about half a minute
WARM_UP_QUERIES = 50  # as in the peer's benchmark
MATCHED_QUERIES = 100  # also
REMOVED_EVENTS = 2000  # also
SINGLE_SHARE = 5  # also: a fifth of the events is split into events of one block


MEMORY = "memory"
AS_LIST = ", a list"

Line = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")


class Stored(Protocol):
    """The peer's stored event: opaque block hashes, and the hash of each block's tokens alone."""

    worker: int
    parent: int | None
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    workload: Path
    blocks: int
    workers: int
    queries: int

    @property
    def name(self) -> str:
        return f"{self.blocks} blocks, {self.workers} workers"


class Metric(NamedTuple):
    """A row of the table; `rising` means that higher is better."""

    case: str
    what: str
    unit: str
    rising: bool = False


class Wire:
    """Converts the peer's input to our events, with canonical hashes: the same prefix has the same hash."""

    def __init__(self, workers: int) -> None:
        self._names = [f"worker-{worker}" for worker in range(workers)]
        self._seqs = [count(1) for _ in range(workers)]
        self._canonical: dict[int, int] = {}

    def index(self) -> PrefixIndex:
        """Return an empty index with every worker admitted."""
        index = PrefixIndex()
        for name in self._names:
            index.add_holder(name, 0, worker_epoch=1)
        return index

    def stored(self, events: Iterable[Stored]) -> list[CacheEvent]:
        """Return the events, in order."""
        return [self._stored(event) for event in events]

    def removed(self, events: Iterable[Stored]) -> list[CacheEvent]:
        """Return events that remove the blocks of each event, last block first."""
        return [
            BlocksRemoved(
                worker_id=self._names[event.worker],
                worker_epoch=1,
                seq=next(self._seqs[event.worker]),
                sequence_hashes=pack_u64(self._canonical[block] for block in reversed(event.blocks)),
            )
            for event in events
        ]

    def restart(self) -> None:
        """Restart the sequence numbers, for an empty index."""
        self._seqs = [count(1) for _ in self._names]

    def _stored(self, event: Stored) -> BlocksStored:
        canonical = self._canonical
        parent = None if event.parent is None else canonical[event.parent]
        if event.blocks[-1] not in canonical:
            canonical.update(zip(event.blocks, extend_chain(parent, event.tokens), strict=True))
        return BlocksStored(
            worker_id=self._names[event.worker],
            worker_epoch=1,
            seq=next(self._seqs[event.worker]),
            sequence_hashes=pack_u64([canonical[block] for block in event.blocks]),
            parent_hash=parent,
        )


def load_peer(path: Path) -> ModuleType:
    """Load the peer's benchmark as a module, for its workload and its queries."""
    spec = importlib.util.spec_from_file_location("peer_index_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def run_case(case: Case) -> list[Line]:
    """Measure one case: apply, find, apply one by one, and remove."""
    peer = load_peer(case.workload)
    load = peer.workload(case.blocks, case.workers)
    wire = Wire(case.workers)
    bulk = packed(wire.stored(load.events))
    own_parts = [event for event in load.events[: load.short_events] if event.parent is not None]
    removed = packed(wire.removed(own_parts[:REMOVED_EVENTS]))
    wire.restart()
    single = packed(wire.stored(peer.one_by_one(load.events[: len(load.events) // SINGLE_SHARE])))
    listed = {
        kind + AS_LIST: [extend_chain(None, query) for query in wanted]
        for kind, wanted in peer.queries(load, case.queries).items()
    }
    queries: dict[str, list[Any]] = {
        kind.removesuffix(AS_LIST): [array_u64(pack_u64(query)) for query in wanted] for kind, wanted in listed.items()
    }
    queries |= listed

    gc.collect()
    gc.freeze()  # so that collecting the input does not count as time of the index
    index = wire.index()
    line = {"what": "apply", **measured(partial(apply_wire, index, bulk), load.blocks, len(bulk))}
    rss_per_block = round(in_fresh_process(rss_of_index, bulk, case.workers) / load.blocks)
    lines: list[Line] = [line | {"rss_per_block": rss_per_block}]
    lines += [find(index, kind, wanted) for kind, wanted in queries.items()]
    other = wire.index()
    lines.append({"what": "apply_single", **measured(partial(apply_wire, other, single), len(single), len(single))})
    blocks = sum(len(event.blocks) for event in own_parts[:REMOVED_EVENTS])
    lines.append({"what": "remove", **measured(partial(apply_wire, index, removed), blocks, len(removed))})
    return [{"case": case.name, **line} for line in lines]


def in_fresh_process(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `work` in a fresh interpreter."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *args, **kwargs).result()


def rss_of_index(records: list[bytes], workers: int) -> int:
    """Return the resident memory of an index of these records.

    Measured outside the process that created the records, where the index would reuse freed memory.
    """
    index = Wire(workers).index()
    before = rss_bytes()
    apply_wire(index, records)
    return rss_bytes() - before


def packed(events: Iterable[CacheEvent]) -> list[bytes]:
    return [encode(topics.KV_EVENTS, event) for event in events]


def apply_wire(index: PrefixIndex, records: Iterable[bytes]) -> None:
    for record in records:
        index.apply(decode(topics.KV_EVENTS, record))
    check(index)


def check(index: PrefixIndex) -> None:
    """Check that no event was skipped, because skipped events would be fast."""
    assert not +index.counts, index.counts


def find(index: PrefixIndex, kind: str, queries: Sequence[Sequence[int]]) -> Line:
    """Time `overlaps`, query by query, result included."""
    for query in queries[:WARM_UP_QUERIES]:
        index.overlaps(query)
    took_us = []
    for query in queries:
        started = time.perf_counter()
        index.overlaps(query)
        took_us.append((time.perf_counter() - started) * 1e6)
    matched = [len(index.overlaps(query)) for query in queries[:MATCHED_QUERIES]]
    took_us.sort()
    return {
        "what": "find",
        "query": kind,
        "p50_us": round(took_us[len(took_us) // 2], 1),
        "p99_us": round(took_us[len(took_us) * 99 // 100], 1),
        "mean_us": round(sum(took_us) / len(took_us), 1),
        "workers_matched": round(sum(matched) / len(matched), 1),
    }


def measured(work: Callable[[], None], blocks: int, events: int) -> Line:
    """Measure the rates of one piece of work."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "blocks": blocks,
        "events": events,
        "wall_s": round(wall_s, 3),
        "cpu_s": round(cpu_s, 3),
        "blocks_per_s": round(blocks / wall_s),
        "events_per_s": round(events / wall_s),
    }


def rss_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process, by default this one."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_peer(python: Path, case: Case) -> list[Line]:
    """Run the peer's benchmark on the same case, with its own interpreter."""
    command = [str(python), str(case.workload), "--blocks", str(case.blocks), "--workers", str(case.workers)]
    command += ["--queries", str(case.queries)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=PEER_TIMEOUT_S)
    lines: list[Line] = [json.loads(text) for text in done.stdout.splitlines()]
    return [line | {"case": case.name} for line in lines if "case" in line]


def figures(lines: Iterable[Line]) -> Iterator[tuple[Metric, float]]:
    """Yield the metrics that the table shows of each line."""
    for line in lines:
        case, what = line["case"], line["what"]
        if what == "find":
            yield Metric(case, f"find, {line['query']}", "µs p50"), line["p50_us"]
            yield Metric(case, f"find, {line['query']}", "µs p99"), line["p99_us"]
        else:
            yield Metric(case, what, "M blocks/s", rising=True), line["blocks_per_s"] / 1e6
        if "rss_per_block" in line:
            yield Metric(case, MEMORY, "B per block stored"), line["rss_per_block"]


def table(ours: Iterable[Line], peers: Iterable[Line]) -> Iterator[str]:
    """Yield a Markdown table of each side's best round; the ratio is above 1 where forebay is faster or smaller.

    Times are those of the best round, because other load on the machine only adds time. Memory is that of the worst.
    """
    mine: defaultdict[Metric, list[float]] = defaultdict(list)
    theirs: defaultdict[Metric, list[float]] = defaultdict(list)
    for figure, value in figures(ours):
        mine[figure].append(value)
    for figure, value in figures(peers):
        theirs[figure].append(value)
    yield "| case | figure | unit | forebay | Dynamo | ratio |"
    yield "|---|---|---|---:|---:|---:|"
    for figure, values in mine.items():
        best = max if figure.rising or figure.what == MEMORY else min
        here, there, ratio = best(values), "", ""
        same = figure._replace(what=figure.what.removesuffix(AS_LIST))
        if same in theirs:
            peer = best(theirs[same])
            there, ratio = f"{peer:.3g}", f"{here / peer if figure.rising else peer / here:.2f}"
        yield f"| {figure.case} | {figure.what} | {figure.unit} | {here:.3g} | {there} | {ratio} |"


def main() -> None:
    """Run the rounds; print every line as it is measured, and the table last."""
    args = arguments()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # children inherit it; the peer picks the same core
    ours: list[Line] = []
    peers: list[Line] = []

    def show(side: str, lines: list[Line]) -> list[Line]:
        for line in lines:
            print(json.dumps({"side": side} | line, ensure_ascii=False), flush=True)
        return lines

    for _ in range(args.rounds):
        for blocks in args.blocks:
            for workers in args.workers:
                case = Case(args.workload, blocks, workers, args.queries)
                ours += show("forebay", in_fresh_process(run_case, case))
                if args.peer_python is not None:
                    peers += show("dynamo", run_peer(args.peer_python, case))
    print(*table(ours, peers), sep="\n")


def integers(text: str) -> list[int]:
    """Return the numbers of an option such as `1e5,64`."""
    return [int(float(part)) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = os.environ.get("FOREBAY_PEERS")
    parser.add_argument(
        "--workload",
        type=Path,
        default=Path(folder) / PEER_FILE if folder else None,
        help=f"the peer's {PEER_FILE}; default: the one in the folder FOREBAY_PEERS",
    )
    parser.add_argument("--peer-python", type=Path, help="an interpreter with Dynamo: measure the peer in turn")
    parser.add_argument("--blocks", type=integers, default=[10**5, 10**6], help="default 1e5,1e6")
    parser.add_argument("--workers", type=integers, default=[64, 512], help="default 64,512")
    parser.add_argument("--queries", type=int, default=3000)
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds per case, of which the table shows the best (default 3)"
    )
    args = parser.parse_args()
    if args.workload is None or not args.workload.is_file():
        parser.error(f"no workload: give --workload PATH/{PEER_FILE} or set FOREBAY_PEERS to its folder")
    return args


if __name__ == "__main__":
    main()
