"""A process that offers arrays by NIXL: says where each lies, then obeys lines of its standard input."""

import base64
import select
import sys

import msgspec
import numpy as np

from forebay.workers.kv_transfer.embeddings import EmbeddingOffers

ARENA = 64 << 20


def array(seed: int, size: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """What is offered: the test makes the same."""
    return np.random.default_rng(seed).standard_normal((size, 16), dtype=np.float32)


def main() -> None:
    """`offer SEED ROWS`, `waiting`, `spoil`: an answer each. Ends with its standard input."""
    offers = EmbeddingOffers(sys.argv[1], arena_bytes=ARENA)
    while True:
        offers.poll()
        if not select.select([sys.stdin], [], [], 0.001)[0]:
            continue
        match sys.stdin.readline().split():
            case ["offer", seed, rows]:
                encoded = msgspec.msgpack.encode(offers.offer(array(int(seed), int(rows))))
                answer = base64.b64encode(encoded).decode()
            case ["waiting"]:
                answer = str(offers.waiting)
            case ["spoil"]:
                offers._arena[7] ^= 1
                answer = "spoilt"
            case _:
                break
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
    offers.close()


if __name__ == "__main__":
    main()
