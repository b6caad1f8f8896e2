"""Transports in this process and in other processes."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forebay.events.transfer import Prefilled
from forebay.workers.kv_transfer.api import Stats
from forebay.workers.kv_transfer.transport import KvTransport, open_transport
from tests.harness.hosts import Host
from tests.workers.kv_transfer.peer import fill, have, packed, unpacked
from tests.workers.other_process import PATIENCE_S, QUIET, OtherProcess, running

BLOCK_BYTES = 4096
BLOCKS = 64

__all__ = ["BLOCKS", "BLOCK_BYTES", "Other", "have", "held_for", "other", "transport", "within"]


def words(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


class Other(OtherProcess):
    async def offer(self, request_id: str, blocks: Sequence[int], *, checksum: bool = False) -> Prefilled:
        line = f"offer {request_id} {words(blocks)} {'sums' if checksum else '-'}"
        return unpacked(await self.ask(line), Prefilled)  # type: ignore[no-any-return]

    async def fetch(self, prefilled: Prefilled, into: Sequence[int]) -> str:
        return await self.ask(f"fetch {packed(prefilled)} {words(into)}")

    async def has(self, into: Sequence[int], blocks: Sequence[int]) -> bool:
        """Return whether the slots `into` contain the content of another process's `blocks`."""
        return await self.ask(f"have {words(into)} {words(blocks)}") == "yes"

    async def stats(self) -> tuple[Stats, dict[str, int]]:
        return unpacked(await self.ask("stats"), tuple[Stats, dict[str, int]])  # type: ignore[no-any-return]

    async def wait_freed(self, why: str, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await self.stats())[1].get(why, 0) < count:
                pass


@pytest.fixture
def by_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL without shared memory, through which the data move without their owner."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@asynccontextmanager
async def other(
    name: str, *, on: Host | None = None, environment: Mapping[str, str] = QUIET, **changes: Any
) -> AsyncIterator[Other]:
    """Run a process with a transport on this host, or on the host `on`."""
    async with running("tests.workers.kv_transfer.peer", on=on, environment=environment) as connected:
        one = Other(*connected)
        options = {"block_bytes": BLOCK_BYTES, "blocks": BLOCKS, "lease_s": 60.0, **changes}
        assert await one.ask(f"open {name} {packed(options)}") == "done"
        yield one


@asynccontextmanager
async def transport(name: str, **changes: Any) -> AsyncIterator[tuple[KvTransport, list[tuple[str, str]]]]:
    """Open a transport in this process, with the list of its freed offers."""
    freed: list[tuple[str, str]] = []
    options: dict[str, Any] = {"block_bytes": BLOCK_BYTES, "blocks": BLOCKS, "fetch_s": PATIENCE_S, **changes}
    one = await open_transport(name=name, on_free=lambda *what: freed.append(what), **options)
    try:
        fill(one, 2)
        yield one, freed
    finally:
        await one.close()


def within(one: KvTransport, fetch_s: float) -> None:
    """Set the timeout of later fetches. Only fetches that must time out may have a short one."""
    one.fetch_s = fetch_s


def held_for(one: KvTransport, lease_s: float) -> None:
    """Set the lease of later offers. Only offers that must expire may have a short one."""
    one.lease_s = lease_s
