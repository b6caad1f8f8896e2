"""A process with a transport of its own: obeys lines of its standard input, with an answer each; ends with it."""

import asyncio
import base64
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from forebay.events.transfer import Prefilled
from forebay.workers.kv_transfer.api import KvTransport
from forebay.workers.kv_transfer.transport import open_transport
from forebay.workers.nixl_agent import TransferError


def fill(transport: KvTransport, seed: int) -> None:
    """Write to all blocks what `content` says of them."""
    for block in range(transport.memory.blocks):
        transport.memory.view(block)[:] = content(seed, block, transport.memory.block_bytes)


def content(seed: int, block: int, block_bytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """The bytes of a block, none like another's."""
    words = np.arange(block_bytes // 8, dtype=np.uint64) + np.uint64((seed << 40) + (block << 20))
    return (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


def prefilled(transport: KvTransport, request_id: str, blocks: Sequence[int], *, checksum: bool = False) -> Prefilled:
    """An offer as the log has it."""
    worker_id, _, epoch = transport.name.rpartition("@")
    offer = transport.offer(request_id, blocks, checksum=checksum)
    return Prefilled(
        worker_id=worker_id,
        worker_epoch=int(epoch),
        model="m",
        connector=transport.kind,
        descriptor=offer.descriptor,
        tokens=1,
        lease_us=int(transport.lease_s * 1e6),
        bytes=offer.bytes,
        checksum=offer.checksum,
    )


def packed(value: Any) -> str:
    """As one word of text."""
    return base64.b64encode(msgspec.msgpack.encode(value)).decode()


def unpacked(text: str, kind: Any) -> Any:
    """The inverse of `packed`."""
    return msgspec.msgpack.decode(base64.b64decode(text), type=kind)


class Peer:
    """What the lines ask."""

    def __init__(self) -> None:
        self.transport: KvTransport
        self.given_back: Counter[str] = Counter()
        self.versions: dict[str, int] = {}

    def on_given_back(self, request_id: str, why: str) -> None:
        """Count; what was offered for a race is written over at once, as an engine would."""
        self.given_back[why] += 1
        if request_id in self.versions:
            for block in range(self.transport.memory.blocks):
                self.transport.memory.view(block)[:] = 0xEE

    async def obey(self, words: list[str]) -> str:
        """Answer a line."""
        match words:
            case ["open", kind, name, block_bytes, blocks, lease_s]:
                options: Any = {"block_bytes": int(block_bytes), "blocks": int(blocks), "lease_s": float(lease_s)}
                self.transport = await open_transport(
                    kind,  # type: ignore[arg-type]
                    name=name,
                    on_given_back=self.on_given_back,
                    **options,
                )
                fill(self.transport, 1)
            case ["offer", request_id, blocks, checksum]:
                numbers = [int(number) for number in blocks.split(",")]
                return packed(prefilled(self.transport, request_id, numbers, checksum=checksum == "sums"))
            case ["race", version, lease_s]:
                # Else what is written over may be of this version.
                while self.transport.stats.held_offers:  # noqa: ASYNC110 - a condition of another's
                    await asyncio.sleep(0)
                for block in range(self.transport.memory.blocks):
                    self.transport.memory.view(block)[:] = int(version)
                self.versions[f"v{version}"] = int(version)
                self.transport._offers._lease_s = float(lease_s)  # type: ignore[attr-defined]
                return packed(prefilled(self.transport, f"v{version}", list(range(self.transport.memory.blocks))))
            case ["fetch", text, into]:
                try:
                    numbers = [int(number) for number in into.split(",")]
                    await self.transport.fetch(unpacked(text, Prefilled), 0, numbers)
                except TransferError as error:
                    return error.reason
            case ["spoil", block]:
                self.transport.memory.view(int(block))[5] ^= 1
            case ["stats"]:
                return packed((self.transport.stats, dict(self.given_back)))
            case _:
                return "what?"
        return "done"


async def main() -> None:
    """Until the input ends."""
    peer = Peer()
    while line := await asyncio.to_thread(sys.stdin.readline):
        sys.stdout.write(await peer.obey(line.split()) + "\n")
        sys.stdout.flush()
    await peer.transport.close()


if __name__ == "__main__":
    asyncio.run(main())
