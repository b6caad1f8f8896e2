"""Speed and memory of the prefix index, beside Dynamo's RadixTree on the same input; never part of the tests.

The input comes from the peer's own benchmark, a file `index_dynamo.py` with `workload` and `queries`. Every case
runs in a fresh process on one core, and prints JSON lines in the form of the peer's.
"""

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, Protocol

from forebay.core.blocks import extend_chain
from forebay.core.prefix_index import PrefixIndex
from forebay.events import topics
from forebay.events.base import pack_u64
from forebay.events.codec import decode, encode
from forebay.events.kv import AnyKvEvent, BlocksRemoved, BlocksStored

PEER_FILE = "index_dynamo.py"
PEER_TIMEOUT_S = 600  # one case takes about half a minute
WARM_UP_QUERIES = 50  # as many as the peer's benchmark
MATCHED_QUERIES = 100  # also
REMOVED_EVENTS = 2000  # also
SINGLE_SHARE = 5  # also: a fifth of the events is split into events of one block

Line = dict[str, Any]


class Stored(Protocol):
    """The peer's stored event: opaque block hashes, and the hash of each block's tokens alone."""

    worker: int
    parent: int | None
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the benchmark in a process of its own."""

    workload: Path
    blocks: int
    workers: int
    queries: int


class Wire:
    """The peer's input as our events: hashes become canonical, so the same prefix has the same hash."""

    def __init__(self, workers: int) -> None:
        self._names = [f"worker-{worker}" for worker in range(workers)]
        self._seqs = [count(1) for _ in range(workers)]
        self._canonical: dict[int, int] = {}

    def index(self) -> PrefixIndex:
        """An empty index with every worker admitted."""
        index = PrefixIndex()
        for name in self._names:
            index.add_holder(name, 0, worker_epoch=1)
        return index

    def stored(self, events: Iterable[Stored]) -> list[AnyKvEvent]:
        """The events, in order."""
        return [self._stored(event) for event in events]

    def removed(self, events: Iterable[Stored]) -> list[AnyKvEvent]:
        """The blocks of each event removed again, last block first."""
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
        """The next events go to an empty index: sequence numbers start again."""
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
    """The peer's benchmark as a module, for its workload and its queries."""
    spec = importlib.util.spec_from_file_location("peer_index_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def run_case(case: Case) -> list[Line]:
    """Measure one case: apply, find, apply one by one, remove, and apply without decoding."""
    peer = load_peer(case.workload)
    load = peer.workload(case.blocks, case.workers)
    wire = Wire(case.workers)
    stored = wire.stored(load.events)
    own_parts = [event for event in load.events[: load.short_events] if event.parent is not None]
    removed = packed(wire.removed(own_parts[:REMOVED_EVENTS]))
    wire.restart()
    single = packed(wire.stored(peer.one_by_one(load.events[: len(load.events) // SINGLE_SHARE])))
    bulk = packed(stored)
    queries = {
        kind: [extend_chain(None, query) for query in wanted]
        for kind, wanted in peer.queries(load, case.queries).items()
    }

    gc.collect()
    gc.freeze()  # the input is ours, not the index's: it must not be collected on the index's time
    index, rss = wire.index(), rss_bytes()
    line = {"what": "apply", **measured(lambda: apply_wire(index, bulk), load.blocks, len(bulk))}
    lines: list[Line] = [line | {"rss_per_block": round((rss_bytes() - rss) / load.blocks)}]
    lines += [find(index, kind, wanted) for kind, wanted in queries.items()]
    other = wire.index()
    lines.append({"what": "apply_single", **measured(lambda: apply_wire(other, single), len(single), len(single))})
    blocks = sum(len(event.blocks) for event in own_parts[:REMOVED_EVENTS])
    lines.append({"what": "remove", **measured(lambda: apply_wire(index, removed), blocks, len(removed))})
    del index, other
    fresh = wire.index()
    lines.append({"what": "apply_decoded", **measured(lambda: apply(fresh, stored), load.blocks, len(stored))})
    return [{"case": f"{case.blocks} × {case.workers}", **line} for line in lines]


def packed(events: Iterable[AnyKvEvent]) -> list[bytes]:
    """Events as they are on the topic."""
    return [encode(topics.KV_EVENTS, event) for event in events]


def apply_wire(index: PrefixIndex, records: Iterable[bytes]) -> None:
    """Decode and fold: what the owner does with each record of the topic."""
    for record in records:
        index.apply(decode(topics.KV_EVENTS, record))
    check(index)


def apply(index: PrefixIndex, events: Iterable[AnyKvEvent]) -> None:
    """Fold events that were decoded before."""
    for event in events:
        index.apply(event)
    check(index)


def check(index: PrefixIndex) -> None:
    """A wrong input would be fast: nothing may have been skipped."""
    assert not +index.counts, index.counts


def find(index: PrefixIndex, kind: str, queries: Sequence[list[int]]) -> Line:
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
    """Rates of one piece of work."""
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


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_peer(python: Path, case: Case) -> list[Line]:
    """The peer's benchmark on the same case, by its own interpreter."""
    command = [str(python), str(case.workload), "--blocks", str(case.blocks), "--workers", str(case.workers)]
    command += ["--queries", str(case.queries)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=PEER_TIMEOUT_S)
    lines: list[Line] = [json.loads(text) for text in done.stdout.splitlines()]
    return [line for line in lines if "case" in line]


def figures(lines: Iterable[Line]) -> Iterator[tuple[tuple[str, str, str], float, bool]]:
    """(case, figure and unit), value, and whether more is better."""
    for line in lines:
        case, what = line["case"], line["what"]
        if what == "find":
            yield (case, f"find, {line['query']}", "µs p50"), line["p50_us"], False
            yield (case, f"find, {line['query']}", "µs p99"), line["p99_us"], False
        else:
            yield (case, what, "M blocks/s"), line["blocks_per_s"] / 1e6, True
        if "rss_per_block" in line:
            yield (case, "memory", "B per block stored"), line["rss_per_block"], False


def table(ours: Iterable[Line], peers: Iterable[Line]) -> Iterator[str]:
    """A Markdown table of medians over the rounds; a ratio above 1 is in our favour."""
    collected: dict[tuple[str, str, str], tuple[list[float], list[float], bool]] = {}
    for side, lines in enumerate((ours, peers)):
        for key, value, rising in figures(lines):
            collected.setdefault(key, ([], [], rising))[side].append(value)  # type: ignore[union-attr] # a list
    yield "| blocks × workers | figure | unit | forebay | Dynamo | forebay is |"
    yield "|---|---|---|---:|---:|---:|"
    for (case, figure, unit), (mine, theirs, rising) in collected.items():
        ratio = ""
        if mine and theirs:
            faster = median(mine) / median(theirs) if rising else median(theirs) / median(mine)
            ratio = f"{faster:.2f}×"
        cells = [f"{median(values):.3g}" if values else "" for values in (mine, theirs)]
        yield f"| {case} | {figure} | {unit} | {cells[0]} | {cells[1]} | {ratio} |"


def main() -> None:
    """Run the rounds, print every line as it comes, and the table last."""
    args = arguments()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # children inherit it; the peer picks the same core
    ours: list[Line] = []
    peers: list[Line] = []

    def show(side: str, lines: list[Line]) -> list[Line]:
        for line in lines:
            print(json.dumps({"side": side} | line, ensure_ascii=False), flush=True)
        return lines

    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for _ in range(args.rounds):
            for blocks in args.blocks:
                for workers in args.workers:
                    case = Case(args.workload, blocks, workers, args.queries)
                    ours += show("forebay", pool.apply(run_case, (case,)))
                    if args.peer_python is not None:
                        peers += show("dynamo", run_peer(args.peer_python, case))
    print(*table(ours, peers), sep="\n")


def arguments() -> argparse.Namespace:
    """The command line."""

    def integers(text: str) -> list[int]:
        return [int(float(part)) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = os.environ.get("FOREBAY_PEERS")
    parser.add_argument(
        "--workload",
        type=Path,
        default=Path(folder) / PEER_FILE if folder else None,
        help=f"the peer's {PEER_FILE}; default: the one in the folder that FOREBAY_PEERS names",
    )
    parser.add_argument("--peer-python", type=Path, help="an interpreter with Dynamo: measure the peer in turn")
    parser.add_argument("--blocks", type=integers, default=[10**5, 10**6], help="default 1e5,1e6")
    parser.add_argument("--workers", type=integers, default=[64], help="default 64")
    parser.add_argument("--queries", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3, help="default 3; the table shows medians")
    args = parser.parse_args()
    if args.workload is None or not args.workload.is_file():
        parser.error(f"no workload: give --workload PATH/{PEER_FILE} or set FOREBAY_PEERS to its folder")
    return args


if __name__ == "__main__":
    main()
