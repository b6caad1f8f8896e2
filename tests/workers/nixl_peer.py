"""Process that offers arrays by NIXL and obeys commands on a socket."""

import base64
import socket

import msgspec
import numpy as np

from forebay.workers.kv_transfer.embeddings import EmbeddingTransfer
from tests.workers.other_process import serve


def array(seed: int, size: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """Return the array that `offer SEED SIZE` offers."""
    return np.random.default_rng(seed).standard_normal((size, 16), dtype=np.float32)


async def main(name: str, lease_s: str, channel: socket.socket) -> None:
    """Reply to `offer SEED ROWS` and `waiting` with one line each, until the socket is closed."""
    offers = EmbeddingTransfer(name, arena_bytes=64 << 20, lease_s=float(lease_s))

    async def obey(line: str) -> str:
        match line.split():
            case ["offer", seed, rows]:
                encoded = msgspec.msgpack.encode(await offers.offer(array(int(seed), int(rows))))
                return base64.b64encode(encoded).decode()
            case ["waiting"]:
                return str(offers.waiting)
        return "unknown command"

    await serve(channel, obey)
    offers.close()
