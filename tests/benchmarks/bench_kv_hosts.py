"""Compare transfers of KV blocks by NIXL and by plain sockets, over a cable between hosts and within a host.

The hosts are namespaces of this machine, so the cable is memory and the kernel's TCP. The results compare the costs of
the transports; they do not describe a real network. Every round measures all transports once, in changing order.
Times are those of the reader's transport, from the call to the result.
"""

import argparse
import asyncio
import os
import statistics
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from forebay.workers.kv_transfer.api import Kind
from tests.harness.hosts import Host, two_hosts
from tests.harness.local import Missing
from tests.workers.kv_transfer.conftest import Other, other

CASES = ((16 << 10, 1000), (64 << 10, 256), (1 << 20, 16), (16 << 10, 16))
KINDS: tuple[Kind, ...] = ("nixl", "tcp")
SEED = 11
Pair = tuple[Other, Other]


async def pairs(stack: AsyncExitStack, hosts: tuple[Host, Host], sizes: dict[str, Any]) -> dict[tuple[str, str], Pair]:
    """Create a holder and a reader for NIXL and for sockets, each on one host and on two."""
    one, two = hosts
    found: dict[tuple[str, str], Pair] = {}
    for kind in KINDS:
        for way, host in (("cable", one), ("host", two)):
            holder, reader = [
                await stack.enter_async_context(
                    other(kind, f"{name}@1", on=on, at=on.address if kind == "tcp" else "", **sizes)
                )
                for name, on in ((f"holder-{kind}-{way}", host), (f"reader-{kind}-{way}", two))
            ]
            found[kind, way] = holder, reader
    return found


async def case(hosts: tuple[Host, Host], block_bytes: int, blocks: int, rounds: int) -> dict[tuple[str, str], Any]:
    """Return the microseconds of every round, by transport and path."""
    order = np.random.default_rng(SEED).permutation(2 * blocks)
    wanted, into = order[:blocks].tolist(), order[blocks:].tolist()
    async with AsyncExitStack() as stack:
        ways = await pairs(stack, hosts, {"block_bytes": block_bytes, "blocks": 2 * blocks, "fetch_s": 30.0})
        taken: dict[tuple[str, str], list[int]] = {way: [] for way in ways}
        for number in range(rounds + 2):
            turns = list(ways.items())
            for way, (holder, reader) in turns[number % len(turns) :] + turns[: number % len(turns)]:
                before = (await reader.stats())[0].read_us
                done = await reader.fetch(await holder.offer(str(number), wanted), into)
                after = (await reader.stats())[0].read_us
                if done != "done":
                    raise SystemExit(f"{way}: {done}")
                await holder.wait_freed("fetched", number + 1)
                if number > 1:  # the first rounds open connections and touch memory
                    taken[way].append(after - before)
        for way, (_, reader) in ways.items():
            if not await reader.has(into, wanted):
                raise SystemExit(f"{way}: the bytes are not those offered")
    return taken


def row(block_bytes: int, blocks: int, taken: dict[tuple[str, str], list[int]]) -> str:
    """Return a line of the table: median milliseconds and GB/s, then the ratio of NIXL's time to the sockets'."""
    size = block_bytes * blocks

    def cell(kind: str, way: str) -> str:
        us = statistics.median(taken[kind, way])
        return f"{us / 1e3:.2f} ms, {size / us / 1e3:.2f}"

    def ratio(way: str) -> str:
        shares = [ours / plain for ours, plain in zip(taken["nixl", way], taken["tcp", way], strict=True)]
        return f"{statistics.median(shares):.2f}"

    cells = [cell(kind, way) for way in ("cable", "host") for kind in KINDS]
    return f"| {blocks} x {block_bytes >> 10} KiB | {' | '.join([*cells, ratio('cable'), ratio('host')])} |"


async def measure(rounds: int) -> None:
    """Print a Markdown table."""
    with two_hosts() as hosts:
        print("| list | NIXL, cable | sockets, cable | NIXL, one host | sockets, one host | cable | one host |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        for block_bytes, blocks in CASES:
            print(row(block_bytes, blocks, await case(hosts, block_bytes, blocks, rounds)), flush=True)


def main() -> None:
    """Run with the options of the command line."""
    parser = argparse.ArgumentParser(prog="kv-hosts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    print(f"load {os.getloadavg()}, UCX_TLS={os.environ.get('UCX_TLS', '')}, {args.rounds} rounds")
    try:
        asyncio.run(measure(args.rounds))
    except Missing as missing:
        raise SystemExit(f"kv-hosts: {missing}") from None


if __name__ == "__main__":
    main()
