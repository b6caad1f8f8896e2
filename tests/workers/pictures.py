"""Images, and a transfer of embeddings in memory."""

import asyncio
import io
from hashlib import sha256
from typing import Any

import pytest

from forebay.core.block_hashes import mm_hashes, sequence_hashes
from forebay.events.base import pack_u32
from forebay.events.media import Encoded, Media
from forebay.workers.kv_transfer.nixl_agent import TransferError

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def png(color: tuple[int, int, int] = (200, 30, 90), size: int = 16) -> bytes:
    kept = io.BytesIO()
    Image.new("RGB", (size, size), color).save(kept, "PNG")
    return kept.getvalue()


def shown(color: tuple[int, int, int], first_token: int = 1) -> Media:
    """Return an image with four placeholder tokens."""
    content = png(color)
    digest = sha256(content).hexdigest()
    return Media(kind="image", mime="image/png", digest=digest, first_token=first_token, tokens=4, content=content)


def hashes_with(prompt: list[int], *media: Media) -> bytes:
    """Return the packed sequence hashes of a prompt with images, in blocks of four tokens."""
    return sequence_hashes(pack_u32(prompt), 4, mm_hashes=mm_hashes(media, 4))


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
