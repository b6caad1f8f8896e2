"""Process with a transport. It obeys commands on a socket and replies with one line to each."""

import asyncio
import base64
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from forebay.events.transfer import Prefilled
from forebay.workers.kv_transfer.api import NIXL
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.kv_transfer.transport import KvTransport, open_transport
from tests.workers.other_process import serve


def fill(transport: KvTransport, seed: int) -> None:
    """Write the `content` of each block."""
    for block in range(transport.memory.blocks):
        transport.memory.view(block)[:] = content(seed, block, transport.memory.block_bytes)


def content(seed: int, block: int, block_bytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """The bytes of a block, none like another's."""
    words = np.arange(block_bytes // 8, dtype=np.uint64) + np.uint64((seed << 40) + (block << 20))
    return (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


def prefilled(transport: KvTransport, request_id: str, blocks: Sequence[int], *, checksum: bool = False) -> Prefilled:
    """Return an offer as an event part."""
    worker_id, _, epoch = transport.name.rpartition("@")
    offer = transport.offer(request_id, blocks, checksum=checksum)
    return Prefilled(
        worker_id=worker_id,
        worker_epoch=int(epoch),
        model="m",
        connector=NIXL,
        descriptor=offer.descriptor,
        tokens=1,
        lease_us=int(transport.lease_s * 1e6),
        bytes=offer.bytes,
        checksum=offer.checksum,
    )


def packed(value: Any) -> str:
    return base64.b64encode(msgspec.msgpack.encode(value)).decode()


def unpacked(text: str, kind: Any) -> Any:
    """The inverse of `packed`."""
    return msgspec.msgpack.decode(base64.b64decode(text), type=kind)


def have(one: KvTransport, into: Sequence[int], blocks: Sequence[int], seed: int = 1) -> bool:
    """Return whether the content of a peer's blocks has arrived."""
    wanted = [content(seed, block, one.memory.block_bytes) for block in blocks]
    return all(np.array_equal(one.memory.view(mine), bytes_) for mine, bytes_ in zip(into, wanted, strict=True))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


class Peer:
    def __init__(self) -> None:
        self.transport: KvTransport
        self.freed: Counter[str] = Counter()
        self.versions: dict[str, int] = {}
        self.begun: asyncio.Task[str]

    def on_free(self, request_id: str, why: str) -> None:
        """Count the offer. Overwrite blocks of a race at once, as an engine would."""
        self.freed[why] += 1
        if request_id in self.versions:
            for block in range(self.transport.memory.blocks):
                self.transport.memory.view(block)[:] = 0xEE

    async def fetch(self, text: str, into: str) -> str:
        """Fetch, and return `done` or the reason of the failure."""
        try:
            await self.transport.fetch(unpacked(text, Prefilled), 0, _numbers(into))
        except TransferError as error:
            return error.reason
        return "done"

    async def obey(self, line: str) -> str:
        """Execute a command and return its reply."""
        match line.split():
            case ["open", name, text]:
                options = unpacked(text, dict[str, Any])
                self.transport = await open_transport(name=name, on_free=self.on_free, **options)
                fill(self.transport, 1)
            case ["offer", request_id, blocks, checksum]:
                return packed(prefilled(self.transport, request_id, _numbers(blocks), checksum=checksum == "sums"))
            case ["race", version, lease_s]:
                # Else what is written over may be of this version.
                while self.transport.stats.held_offers:  # noqa: ASYNC110 - a condition of another's
                    await asyncio.sleep(0)
                for block in range(self.transport.memory.blocks):
                    self.transport.memory.view(block)[:] = int(version)
                self.versions[f"v{version}"] = int(version)
                self.transport.lease_s = float(lease_s)
                return packed(prefilled(self.transport, f"v{version}", list(range(self.transport.memory.blocks))))
            case ["fetch", text, into]:
                return await self.fetch(text, into)
            case ["begin", text, into]:
                self.begun = asyncio.create_task(self.fetch(text, into))
            case ["end"]:
                return await self.begun
            case ["have", into, blocks]:
                return "yes" if have(self.transport, _numbers(into), _numbers(blocks)) else "no"
            case ["write", into, byte]:
                for block in _numbers(into):
                    self.transport.memory.view(block)[:] = int(byte)
            case ["still", into, byte]:
                rows = [self.transport.memory.view(block) for block in _numbers(into)]
                return "yes" if all((row == int(byte)).all() for row in rows) else "no"
            case ["spoil", block]:
                self.transport.memory.view(int(block))[5] ^= 1
            case ["stats"]:
                return packed((self.transport.stats, dict(self.freed)))
            case _:
                return "what?"
        return "done"


async def main(channel: socket.socket) -> None:
    """Obey until the socket is closed."""
    peer = Peer()
    await serve(channel, peer.obey)
    await peer.transport.close()
