"""Format of a stored block: a header of one page, then the bytes of the block.

The header is `PREAMBLE` and `HEADER`. Zeros fill the page, so that the block begins at an aligned offset. Checksums are
in their canonical byte order. All numbers are little-endian. The preamble has a checksum of its own and never changes,
so that a program can tell a file of a newer version from a damaged one. Names of files contain the block key and the
sequence hash, so listing them is enough to know what a store contains.
"""

import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_128_digest, xxh32_intdigest

from forebay.workers.kv_tiers.identity import BlockName

FORMAT_VERSION = 1
MAGIC = b"forebyKV"
PAYLOAD_OFFSET = 4096  # a page, and the alignment that direct I/O needs
SUFFIX = ".kv"

PREAMBLE = struct.Struct("<8sII")  # magic, format version, XXH32 of the two
# Block key, sequence hash, identity digest, bytes of the block, XXH3-128 of the block, XXH3-64 of everything before it.
HEADER = struct.Struct("<32sQ32sQ16s8s")
HEAD_BYTES = PREAMBLE.size + HEADER.size
CHECKED_BYTES = HEAD_BYTES - 8
CHECKSUM_AT = CHECKED_BYTES - 16

Checksum = Callable[[memoryview], bytes]
checksum: Checksum = xxh3_128_digest

_PATH = re.compile(r"([0-9a-f]{64})-([0-9a-f]{16})\.kv")
_pack_start = struct.Struct("<16s32sQ32sQ").pack
_MAGIC_AND_VERSION = PREAMBLE.size - 4


class Head(NamedTuple):
    """Decoded header of a stored block.

    Attributes:
        sequence_hash: sequence hash for routing.
        length: bytes of the block.
        checksum: XXH3-128 of the bytes of the block.
    """

    key: bytes
    sequence_hash: int
    identity: bytes
    length: int
    checksum: bytes


def file_bytes(block_bytes: int) -> int:
    return PAYLOAD_OFFSET + block_bytes


def file_name(name: BlockName) -> str:
    """Return the name of the file of a block. Its folder is named by the first two digits of the key."""
    return f"{name.key.hex()}-{name.sequence_hash:016x}{SUFFIX}"


def parse_file_name(text: str) -> BlockName | None:
    """Return the name of the block in a file with this name; None for the name of another file."""
    found = _PATH.fullmatch(text)
    return None if found is None else BlockName(bytes.fromhex(found[1]), int(found[2], 16))


def decode_head(data: bytes) -> tuple[str, Head | None]:
    """Decode a header.

    Args:
        data: the first `HEAD_BYTES` bytes of a file, or fewer if the file is shorter.

    Returns:
        An empty text and the header, or `truncated`, `corrupt` or `newer`, and None.
    """
    if len(data) < HEAD_BYTES:
        return "truncated", None
    magic, version, start = PREAMBLE.unpack_from(data)
    if magic != MAGIC or start != xxh32_intdigest(data[:_MAGIC_AND_VERSION]):
        # A file whose first pages were allocated but never written is all zeros: its writer, or the machine, crashed.
        return ("truncated" if not any(data[:HEAD_BYTES]) else "corrupt"), None
    if version != FORMAT_VERSION:
        return ("newer" if version > FORMAT_VERSION else "corrupt"), None
    *fields, total = HEADER.unpack_from(data, PREAMBLE.size)
    if total != xxh3_64_digest(data[:CHECKED_BYTES]):
        return "corrupt", None
    return "", Head(*fields)


def head_problem(head: Head, name: BlockName, identity: bytes, length: int) -> str:
    """Return why the header of an undamaged file is not that of this block: `foreign`, or an empty text if it is."""
    expected = (name.key, name.sequence_hash, identity, length)
    return "" if head[:4] == expected else "foreign"


class HeadFormat:
    """Headers of the blocks of one identity.

    Args:
        length: bytes per block.
    """

    def __init__(self, identity: bytes, length: int) -> None:
        self._identity = identity
        self._length = length
        start = struct.pack("<8sI", MAGIC, FORMAT_VERSION)
        self._preamble = start + struct.pack("<I", xxh32_intdigest(start))

    def encode(self, name: BlockName, checksum: bytes) -> bytes:
        """Return the header of a block without the zeros after it, `HEAD_BYTES` bytes.

        Args:
            checksum: XXH3-128 of the bytes of the block.
        """
        head = self._start(name) + checksum
        return head + xxh3_64_digest(head)

    def checksum(self, data: bytes, name: BlockName) -> bytes | str:
        """Return the checksum in a header, or the reason why the header is not that of the block.

        Args:
            data: the first `HEAD_BYTES` bytes of a file, or fewer if the file is shorter.
        """
        # Comparing bytes takes a third of the time of decoding them.
        if data[:CHECKSUM_AT] == self._start(name) and data[CHECKED_BYTES:] == xxh3_64_digest(data[:CHECKED_BYTES]):
            return data[CHECKSUM_AT:CHECKED_BYTES]
        problem, head = decode_head(data)
        return problem if head is None else head_problem(head, name, self._identity, self._length)

    def _start(self, name: BlockName) -> bytes:
        return _pack_start(self._preamble, name.key, name.sequence_hash, self._identity, self._length)
