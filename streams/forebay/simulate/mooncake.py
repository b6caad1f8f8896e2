"""Mooncake-format traces: JSON lines of timestamp (ms), input_length, output_length and hash_ids.

An id stands for 512 tokens of input. Source: the Mooncake paper's published traces (FAST '25).
"""

import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec
from xxhash import xxh3_64_intdigest

BLOCK_TOKENS = 512
TOKEN_IDS = 1_000  # prompts are made of the lowest token ids, which every vocabulary has
CACHED_BLOCKS = 4_096
TIMESTAMP_MS_MAX = 3_155_760_000_000  # a century: a clock of microseconds stays far below 64 bits at any speed


class TraceUnusable(Exception):
    """A row that cannot be played; the text names it."""


class Row(msgspec.Struct, frozen=True):
    """One request of a trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=TIMESTAMP_MS_MAX)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    hash_ids: list[int]

    def prompt(self) -> list[int]:
        """Token ids: equal ids give equal tokens."""
        tokens: list[int] = []
        for block in self.hash_ids:
            tokens += _tokens_of(block)
        return tokens[: self.input_length]

    def sequence_hashes(self, block_size: int) -> list[int]:
        """A hash for each full block of the prompt; prompts that begin with the same ids begin with the same hashes.

        They name as much as those of real tokens do, but take no tokens to compute.
        """
        hashes: list[int] = []
        before = 0
        for at, block in enumerate(self.hash_ids):
            before = xxh3_64_intdigest(b"%d" % block, before)
            # The blocks that end within this id; halved, so that the numbers after it are 64 bits long, too.
            first, end = at * BLOCK_TOKENS // block_size, (at + 1) * BLOCK_TOKENS // block_size
            hashes += range((before >> 1) + first, (before >> 1) + end)
        return hashes[: self.input_length // block_size]


def rows(path: Path, duration_s: float | None) -> Iterator[Row]:
    """The rows of the first `duration_s` in the order of their timestamps, equal ones in the file's order.

    Raises TraceUnusable.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TraceUnusable(f"{path}: cannot be read ({error.strerror})") from error
    decoder = msgspec.json.Decoder(Row)
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceUnusable(f"{path}, line {number}: {error}") from error
        if len(row.hash_ids) * BLOCK_TOKENS < row.input_length:
            text = f"{len(row.hash_ids)} hash ids do not cover {row.input_length} tokens"
            raise TraceUnusable(f"{path}, line {number}: {text}")
        if duration_s is None or row.timestamp < duration_s * 1000:
            found.append(row)
    if not found:
        raise TraceUnusable(f"{path}: holds no request to play")
    yield from sorted(found, key=lambda row: row.timestamp)


@lru_cache(maxsize=CACHED_BLOCKS)
def _tokens_of(block: int) -> tuple[int, ...]:
    rng = random.Random(block)
    return tuple(rng.randrange(TOKEN_IDS) for _ in range(BLOCK_TOKENS))
