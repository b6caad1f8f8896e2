"""Process that offers arrays by NIXL and obeys commands on its standard input.

Arguments: agent name, lease in seconds.
"""

import asyncio
import base64
import sys

import msgspec
import numpy as np

from forebay.workers.kv_transfer.embeddings import EmbeddingTransfer


def array(seed: int, size: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """Return the array that `offer SEED SIZE` offers."""
    return np.random.default_rng(seed).standard_normal((size, 16), dtype=np.float32)


async def main() -> None:
    """Answer `offer SEED ROWS` and `waiting` with one line each, until the input ends."""
    offers = EmbeddingTransfer(sys.argv[1], arena_bytes=64 << 20, lease_s=float(sys.argv[2]))
    while line := await asyncio.to_thread(sys.stdin.readline):
        match line.split():
            case ["offer", seed, rows]:
                encoded = msgspec.msgpack.encode(await offers.offer(array(int(seed), int(rows))))
                answer = base64.b64encode(encoded).decode()
            case ["waiting"]:
                answer = str(offers.waiting)
            case _:
                answer = "unknown command"
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
    offers.close()


if __name__ == "__main__":
    asyncio.run(main())
