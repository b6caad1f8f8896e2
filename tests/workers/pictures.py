"""Images, and a transfer of embeddings in memory."""

import asyncio
import io
from typing import Any

import pytest

from forebay.events.media import Encoded
from forebay.workers.kv_transfer.nixl_agent import TransferError

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def png(color: tuple[int, int, int] = (200, 30, 90), size: int = 16) -> bytes:
    kept = io.BytesIO()
    Image.new("RGB", (size, size), color).save(kept, "PNG")
    return kept.getvalue()


class Memory:
    """Replacement of NIXL that keeps offers in memory."""

    def __init__(self) -> None:
        self.arrays: dict[bytes, Any] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.reading = 0
        self.cancelled = 0
        self.closed: list[str] = []

    def offers(self, name: str, **_: Any) -> "MemoryOffers":
        return MemoryOffers(self, name)

    def reader(self, name: str) -> "MemoryReader":
        return MemoryReader(self, name)


class MemoryOffers:
    def __init__(self, memory: Memory, name: str) -> None:
        self.memory, self.name, self.waiting = memory, name, 0

    async def offer(self, array: Any) -> Encoded:
        return self.offer_now(array)

    def offer_now(self, array: Any) -> Encoded:
        place = f"{self.name}:{len(self.memory.arrays)}".encode()
        self.memory.arrays[place] = array.copy()
        return Encoded(descriptor=place, shape=array.shape, dtype=array.dtype.name, checksum="0" * 16)

    def close(self) -> None:
        self.memory.closed.append(self.name)


class MemoryReader:
    def __init__(self, memory: Memory, name: str) -> None:
        self.memory, self.name = memory, name

    async def read(self, encoded: Encoded) -> Any:
        self.memory.reading += 1
        try:
            await self.memory.gate.wait()
        except asyncio.CancelledError:
            self.memory.cancelled += 1
            raise
        if encoded.descriptor not in self.memory.arrays:
            raise TransferError("nobody is there")
        return self.memory.arrays.pop(encoded.descriptor)

    def close(self) -> None:
        self.memory.closed.append(self.name)
