"""Compare file transfers of a KV tier with NIXL alone, on files of the same sizes, and show what checksums cost.

"NIXL alone" opens the files, registers memory and files, moves all blocks by one transfer of the POSIX plugin, and
closes the files. A write creates new files, in as many folders as a store has. Every round measures all sides once, in
changing order, so that other load affects all of them. A ratio is the median over the rounds of the time of NIXL alone
divided by the time of the side. The second ratio is that of the CPU time of all threads, which other load does not
change.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from forebay.workers.kv_tiers import block_format
from forebay.workers.kv_tiers.block_store import BlockStore
from forebay.workers.kv_tiers.disk import DirectoryStore
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity
from forebay.workers.kv_transfer.nixl_agent import load_nixl

CASES = ((64, 1 << 20), (256, 128 << 10), (16, 8 << 20))
DEADLINE_S = 60.0
WARM_UP = 2  # rounds that touch memory and load code
SIDES = ("nixl", "store", "store, no checksum")


class Blocks:
    """Memory and names of the blocks of one case."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.array = np.random.default_rng(1).integers(0, 255, count * size, dtype=np.uint8)
        self.into = np.zeros_like(self.array)
        self.address: int = self.into.ctypes.data
        self.rows = [memoryview(self.array[at : at + size]) for at in range(0, count * size, size)]  # type: ignore[arg-type]
        self.targets = [memoryview(self.into[at : at + size]) for at in range(0, count * size, size)]  # type: ignore[arg-type]

    def names(self, number: int) -> list[BlockName]:
        """Return names that differ from those of other numbers."""
        rng = np.random.default_rng([number, self.count])
        return [BlockName(rng.bytes(32), place) for place in range(self.count)]

    def check(self) -> None:
        if not (self.array == self.into).all():
            raise SystemExit("the bytes read are not those written")


class Raw:
    """Transfers by NIXL alone."""

    def __init__(self, folder: Path, blocks: Blocks) -> None:
        nixl = load_nixl()
        self._agent = nixl.nixl_agent("raw", nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend("POSIX", {"use_aio": "true"})
        self._folder, self._blocks = folder, blocks
        for number in range(256):
            (folder / f"{number:02x}").mkdir(parents=True)

    def path(self, name: BlockName) -> str:
        """Return the path of a file, in one of as many folders as a store has."""
        key = name.key.hex()
        return f"{self._folder}/{key[:2]}/{key}"

    def move(self, operation: str, names: list[BlockName]) -> None:
        """Read or write one file per block."""
        flags = os.O_RDONLY if operation == "READ" else os.O_WRONLY | os.O_CREAT | os.O_EXCL
        size, agent = self._blocks.size, self._agent
        base = self._blocks.address if operation == "READ" else self._blocks.array.ctypes.data
        fds = [os.open(self.path(name), flags, 0o666) for name in names]
        memory = agent.register_memory([(base, size * len(fds), 0, "")], mem_type="DRAM")
        files = agent.register_memory([(0, size, fd, "") for fd in fds], mem_type="FILE")
        here = agent.get_xfer_descs([(base + place * size, size, 0) for place in range(len(fds))], mem_type="DRAM")
        there = agent.get_xfer_descs([(0, size, fd) for fd in fds], mem_type="FILE")
        handle = agent.initialize_xfer(operation, here, there, "raw", b"")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        agent.deregister_memory(files)
        agent.deregister_memory(memory)
        for fd in fds:
            os.close(fd)


def no_checksum(_: memoryview) -> bytes:
    """Return an empty checksum, to measure transfers without checksums."""
    return bytes(16)


def identity_of(blocks: Blocks) -> KvIdentity:
    return KvIdentity(weights="", tp_rank=0, tp_size=1, layout="", dtype="", block_size=16, block_bytes=blocks.size)


@contextlib.contextmanager
def stores(folder: Path, blocks: Blocks) -> Iterator[dict[str, BlockStore]]:
    """Open a store per side."""
    opened: dict[str, BlockStore] = {}
    for side in SIDES[1:]:
        opened[side] = DirectoryStore(
            folder / side.replace(" ", "-"),
            identity_of(blocks),
            quota_bytes=1 << 50,
            shared=False,
            owner="benchmark",
        )
    yield opened
    for store in opened.values():
        store.close()


def measured(act: Callable[[], Any]) -> tuple[float, float]:
    """Return the wall and CPU seconds of a call."""
    start_s, cpu_s = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start_s, time.process_time() - cpu_s


def require(results: list[str]) -> None:
    """Check that every block was moved."""
    if any(results):
        raise SystemExit(f"blocks were not moved: {results}")


def case(folder: Path, blocks: Blocks, rounds: int) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return the seconds of every round, by operation and side."""
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    raw = Raw(folder / "raw", blocks)
    with stores(folder, blocks) as opened:
        for number in range(WARM_UP + rounds):
            names = blocks.names(number)
            for operation in ("WRITE", "READ"):
                acts = {"nixl": lambda: raw.move(operation, names)}  # noqa: B023 - called in this round
                for side, store in opened.items():
                    acts[side] = act(store, operation, names, blocks)
                for side in SIDES[number % len(SIDES) :] + SIDES[: number % len(SIDES)]:
                    blocks.into[:] = 0
                    checksum = no_checksum if side.endswith("no checksum") else block_format.checksum
                    with mock.patch.object(block_format, "checksum", checksum):
                        seconds = measured(acts[side])
                    if operation == "READ":
                        blocks.check()
                    if number >= WARM_UP:
                        taken.setdefault((operation, side), []).append(seconds)
            for store in opened.values():  # the page cache must have room for the files of all sides
                store.remove(names)
            for name in names:
                Path(raw.path(name)).unlink()
    return taken


def act(store: BlockStore, operation: str, names: list[BlockName], blocks: Blocks) -> Callable[[], None]:
    """Return a function that reads or writes all blocks by a store."""
    if operation == "READ":
        return lambda: require(store.read(names, blocks.targets, DEADLINE_S))
    return lambda: require(store.write(list(zip(names, blocks.rows, strict=True)), DEADLINE_S))


def row(blocks: Blocks, operation: str, taken: dict[tuple[str, str], list[tuple[float, float]]]) -> str:
    """Return a line of the table: GB/s in the median round, and the median ratio to NIXL alone."""
    cells = []
    for side in SIDES:
        walls, cpus = zip(*taken[operation, side], strict=True)
        alone_walls, alone_cpus = zip(*taken[operation, "nixl"], strict=True)
        speed = blocks.count * blocks.size / statistics.median(walls) / 1e9
        ratio = statistics.median(one / other for one, other in zip(alone_walls, walls, strict=True))
        cpu = statistics.median(one / other for one, other in zip(alone_cpus, cpus, strict=True))
        cells.append(f"{speed:.2f}" if side == "nixl" else f"{speed:.2f}, {ratio:.2f}, {cpu:.2f}")
    return f"| {operation.lower()} | {blocks.count} x {blocks.size >> 10} KiB | {' | '.join(cells)} |"


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(prog="tiers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="existing folder on the disk to measure")
    args = parser.parse_args()
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    print(f"load {os.getloadavg()}, {args.rounds} rounds; GB/s, ratio to NIXL alone, ratio of CPU time")
    print("| | files | " + " | ".join(SIDES) + " |")
    print("|---|---|" + "---:|" * len(SIDES))
    for count, size in CASES:
        blocks = Blocks(count, size)
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            taken = case(Path(folder), blocks, args.rounds)
        for operation in ("WRITE", "READ"):
            print(row(blocks, operation, taken), flush=True)
