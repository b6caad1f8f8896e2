"""Compare KV transfers by our layer with NIXL alone, on the same lists of blocks.

The holder is a separate process. Every round measures both sides once, in changing order, so that other load affects
both. The ratios are those of the best rounds, and medians within a round. "NIXL alone" transfers one prompt by hand: a
transfer made from prepared lists, posted, polled and released.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from forebay.events.transfer import LEASE_US_MAX, Prefilled
from forebay.workers.kv_transfer.api import NIXL, Offer
from forebay.workers.kv_transfer.descriptor import BlockLocation, decode_location, slots_of
from forebay.workers.kv_transfer.memory import READS_MAX, Arena
from forebay.workers.kv_transfer.nixl_agent import open_agent
from forebay.workers.kv_transfer.nixl_thread import LocalAgent
from forebay.workers.kv_transfer.transport import KvTransport, open_transport

CASES = ((16 << 10, 1000), (64 << 10, 256), (1 << 20, 16), (16 << 10, 16), (64 << 10, 2048), (1 << 20, 128))
SEED = 11
LEASE_S = 3_000.0
PAUSE_S = 0.003  # so that the holder has taken the previous side's notification
HOLDER = "holder@1"


def scattered(blocks: int, seed: int) -> list[int]:
    """Return `blocks` of twice as many block numbers, in random order."""
    return [int(n) for n in np.random.default_rng(seed).permutation(2 * blocks)[:blocks]]


def hold(block_bytes: int, blocks: int, pipe: "Connection[Any, int]") -> None:
    """Run the holder process: offer the list as many times as requested, and end at 0."""

    async def act() -> None:
        transport = await open_transport(
            name=HOLDER, block_bytes=block_bytes, blocks=2 * blocks, lease_s=LEASE_S, on_free=lambda *_: None
        )
        for block in range(2 * blocks):
            transport.memory.view(block)[:] = block % 251
        wanted, made = scattered(blocks, SEED), 0
        while count := await asyncio.to_thread(pipe.recv):
            offers = [transport.offer(str(made + n), wanted, checksum=False) for n in range(count)]
            made += count
            pipe.send(offers)
        await transport.close()

    asyncio.run(act())


@contextmanager
def holder(block_bytes: int, blocks: int) -> Any:
    """Run a holder process; yield a function that returns `count` offers."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(block_bytes, blocks, theirs))
    process.start()

    def offers(count: int) -> list[Prefilled]:
        ours.send(count)
        return [prefilled(offer) for offer in ours.recv()]

    try:
        yield offers
    finally:
        ours.send(0)
        process.join()


def prefilled(offer: Offer) -> Prefilled:
    return Prefilled(
        worker_id="holder",
        worker_epoch=1,
        model="m",
        connector=NIXL,
        descriptor=offer.descriptor,
        tokens=1,
        lease_us=LEASE_US_MAX,
        checksum=offer.checksum,
    )


class Raw:
    """NIXL by hand, with a separate agent and memory."""

    def __init__(self, block_bytes: int, blocks: int, place: BlockLocation) -> None:
        self.agent = open_agent("raw@1")
        self.arena = Arena(2 * blocks, block_bytes)
        self.here = LocalAgent(self.agent, "raw@1", self.arena, list(range(READS_MAX)))
        self.peer = self.here.peers.of(place)
        self.theirs = slots_of(place)
        self.ours = self.arena.slots_of(self.arena.numbers(scattered(blocks, SEED + 1)))

    def nixl(self) -> None:
        """Transfer the list by NIXL alone."""
        handle = self.agent.make_prepped_xfer("READ", self.here.slots, self.ours, self.peer.blocks, self.theirs)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)


async def measured(act: Callable[[], Any]) -> float:
    """Return the wall seconds of a call."""
    start_s = time.perf_counter()
    done = act()
    if done is not None:
        await done
    return time.perf_counter() - start_s


async def case(block_bytes: int, blocks: int, rounds: int) -> dict[str, list[float]]:
    """Return the wall seconds of every round, by side."""
    into = scattered(blocks, SEED + 1)
    taken: dict[str, list[float]] = {}
    options: dict[str, Any] = {"block_bytes": block_bytes, "on_free": lambda *_: None}
    nixl = await open_transport(name="reader@1", blocks=2 * blocks, **options)
    with holder(block_bytes, blocks) as offers:
        raw = Raw(block_bytes, blocks, decode_location(offers(1)[0], block_bytes))
        for number in range(rounds + 2):
            (one,) = offers(1)
            sides: list[tuple[str, Callable[[], Any]]] = [
                ("nixl", raw.nixl),
                ("fetch", lambda: nixl.fetch(one, 0, into)),  # noqa: B023 - called in this round
            ]
            for side, act in sides[number % len(sides) :] + sides[: number % len(sides)]:
                await asyncio.sleep(PAUSE_S)
                seconds = await measured(act)
                if number > 1:  # the first rounds open connections and touch memory
                    taken.setdefault(side, []).append(seconds)
        check(nixl, into, scattered(blocks, SEED))
    await nixl.close()
    return taken


def check(transport: KvTransport, into: Sequence[int], wanted: Sequence[int]) -> None:
    for block, theirs in zip(into, wanted, strict=True):
        if (transport.memory.view(block) != theirs % 251).any():
            raise SystemExit("the bytes are not those offered")


def row(block_bytes: int, blocks: int, taken: dict[str, list[float]]) -> str:
    """Return a line of the table: best milliseconds and GB/s, then ratios of throughput, ours to NIXL's."""
    size = block_bytes * blocks

    def cell(side: str) -> str:
        best = min(taken[side])
        return f"{best * 1e3:.2f} ms, {size / best / 1e9:.1f}"

    pairs = [alone / ours for alone, ours in zip(taken["nixl"], taken["fetch"], strict=True)]
    ratios = f"{min(taken['nixl']) / min(taken['fetch']):.2f}, {statistics.median(pairs):.2f}"
    return f"| {blocks} x {block_bytes >> 10} KiB | {cell('nixl')} | {cell('fetch')} | {ratios} |"


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(prog="kv-transfer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    print(f"load {os.getloadavg()}, UCX_TLS={os.environ.get('UCX_TLS', '')}, {args.rounds} rounds")
    print("| list | NIXL | fetch | fetch/NIXL: best, median |")
    print("|---|---:|---:|---:|")
    for block_bytes, blocks in CASES:
        print(row(block_bytes, blocks, uvloop.run(case(block_bytes, blocks, args.rounds))), flush=True)
