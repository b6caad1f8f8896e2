"""KV transfers between two hosts, and failures of a host or of the network.

The hosts are namespaces of this machine, which share nothing but the cable. Where they cannot be made it is skipped.
"""

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("numpy", reason="numpy is not installed")
pytest.importorskip("nixl_cu12", reason="NIXL (nixl-cu12) is not installed")

from forebay.events.transfer import Prefilled
from tests.harness.hosts import DEVICE, Host, private_networks, two_hosts
from tests.harness.local import Missing
from tests.workers.kv_transfer.conftest import Other, other, words
from tests.workers.kv_transfer.peer import packed
from tests.workers.other_process import PATIENCE_S, QUIET, TIMEOUT_S

BLOCK_BYTES = 1 << 20
BLOCKS = 64
ALL = range(BLOCKS)
PART = 8 * BLOCK_BYTES  # what has crossed the cable when it is cut, or the holder is killed
FETCH_S = 6.0  # what crosses an intact cable takes a tenth of it, on a busy machine a second
# A host that is silent is taken for dead after some 3 s, not 16.
IMPATIENT = {**QUIET, "UCX_TCP_KEEPIDLE": "1s", "UCX_TCP_KEEPINTVL": "1s", "UCX_TCP_KEEPCNT": "2"}
SIZES: dict[str, Any] = {"block_bytes": BLOCK_BYTES, "blocks": BLOCKS}

pytestmark = pytest.mark.timeout(TIMEOUT_S)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as made:
            yield made
    except Missing as missing:
        pytest.skip(str(missing))


async def begin_and_pause(holder: Other, reader: Other, one: Host, offer: Prefilled) -> None:
    """Begin a fetch, and stop the reader when `PART` has left the holder's host.

    Holder and reader run in turns. In its turn the holder fills the buffers of the kernels, which are smaller than the
    transfer. Hence the transfer cannot end, however slow this process is.
    """
    began = one.sent_bytes()
    holder.signal(signal.SIGSTOP)
    assert await reader.ask(f"begin {packed(offer)} {words(ALL)}") == "done"
    async with asyncio.timeout(PATIENCE_S):
        while True:
            reader.signal(signal.SIGSTOP)
            holder.signal(signal.SIGCONT)
            if one.sent_bytes() >= began + PART:
                return
            holder.signal(signal.SIGSTOP)
            reader.signal(signal.SIGCONT)
            await asyncio.sleep(0)
            one.sent_bytes()  # takes a while, in which the reader runs


async def kept_apart(reader: Other) -> int:
    return (await reader.stats())[0].quarantined_blocks


async def none_kept_apart(reader: Other) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while await kept_apart(reader):
        assert time.monotonic() < deadline_s, "slots are kept for ever"


async def cut_in_the_middle(holder: Other, reader: Other, one: Host) -> str:
    """Cut the cable during the second transfer, and return how the fetch ends."""
    assert await reader.fetch(await holder.offer("before", ALL), ALL) == "done"
    await begin_and_pause(holder, reader, one, await holder.offer("a", ALL))
    one.cut()
    reader.signal(signal.SIGCONT)
    return await reader.ask("end")


async def test_nixl_hosts_blocks_are_transferred_between_hosts(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    async with other("p@1", on=one, **SIZES) as holder, other("d@1", on=two, **SIZES) as reader:
        blocks, into = range(0, BLOCKS, 2), range(BLOCKS // 2, BLOCKS)
        offer, began = await holder.offer("a", blocks, checksum=True), one.sent_bytes()
        assert await reader.fetch(offer, into) == "done"
        assert await reader.has(into, blocks)
        assert one.sent_bytes() - began > len(blocks) * BLOCK_BYTES, "they came by another way"
        await holder.wait_freed("fetched", 1)
        stats, _ = await reader.stats()
        assert (stats.blocks, stats.retries, stats.corrupt, stats.failed) == (len(blocks), 0, 0, {})


@pytest.mark.slow
async def test_nixl_hosts_temporary_network_failure(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    async with other("p@1", on=one, **SIZES) as holder, other("d@1", on=two, fetch_s=FETCH_S, **SIZES) as reader:
        assert await cut_in_the_middle(holder, reader, one) == "deadline"
        assert await kept_apart(reader) == BLOCKS, "they may be written to yet"
        assert await reader.ask(f"write {words(ALL)} 85") == "done"
        one.mend()
        await none_kept_apart(reader)
        assert await reader.ask(f"still {words(ALL)} 85") == "yes", "what came late was written to blocks in use"
        assert await reader.fetch(await holder.offer("b", ALL), ALL) == "done"
        assert await reader.has(ALL, ALL)


@pytest.mark.slow
async def test_nixl_hosts_permanent_network_failure(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    async with (
        other("p@1", on=one, lease_s=FETCH_S, environment=IMPATIENT, **SIZES) as holder,
        other("d@1", on=two, fetch_s=FETCH_S, environment=IMPATIENT, **SIZES) as reader,
        other("p@2", on=two, **SIZES) as near,
    ):
        assert await cut_in_the_middle(holder, reader, one) in ("deadline", "gone"), "whichever is noticed first"
        await holder.wait_freed("expired", 1)
        await none_kept_apart(reader)
        assert await reader.fetch(await near.offer("b", ALL), ALL) == "done"
        assert await reader.has(ALL, ALL)


@pytest.mark.slow
async def test_nixl_hosts_unreachable_holder_does_not_delay_other_reads(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    async with (
        other("p@1", on=one, **SIZES) as far,
        other("p@2", on=two, **SIZES) as near,
        other("d@1", on=two, fetch_s=FETCH_S, **SIZES) as reader,
    ):
        offer = await far.offer("a", [0])
        one.cut()
        assert await reader.ask(f"begin {packed(offer)} 0") == "done"
        assert await reader.fetch(await near.offer("b", [7]), [1]) == "done", "it waited for the one that is off"
        assert await reader.has([1], [7])
        assert await reader.ask("end") in ("deadline", "gone")


async def test_nixl_hosts_advertise_their_shared_network(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    private_networks(hosts)
    async with (
        other("p@1", on=one, interface=DEVICE, **SIZES) as holder,
        other("d@1", on=two, interface=DEVICE, fetch_s=FETCH_S, **SIZES) as reader,
    ):
        assert await reader.fetch(await holder.offer("a", ALL), ALL) == "done"
        assert await reader.has(ALL, ALL)
