"""Format of a stored block: `PREAMBLE`, `HEADER` and zeros up to one page, then the bytes of the block, page-aligned.

All numbers are little-endian; checksums are in their canonical byte order. The preamble has a checksum of its own and
never changes, so that a program can tell a file of a newer version from a damaged one. Names of files contain the block
key and the sequence hash, so listing them is enough to know what a store contains.
"""

import re
import struct

from xxhash import xxh3_64_digest, xxh3_128_digest, xxh32_intdigest

from forebay.workers.kv_tiers.identity import BlockName, KvIdentity

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

# A file with one of these faults is useless for everyone: it is too short; a checksum is wrong; it belongs to another
# block or identity; a newer version of forebay wrote it.
BAD_REASONS = ("truncated", "corrupt", "foreign", "newer")

checksum = xxh3_128_digest  # of the bytes of a block

_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{16})\.kv")
_pack_start = struct.Struct("<16s32sQ32sQ").pack
_MAGIC_AND_VERSION = PREAMBLE.size - 4


def file_bytes(block_bytes: int) -> int:
    return PAYLOAD_OFFSET + block_bytes


def file_path(name: BlockName) -> str:
    """Return the path of the file of a block in the folder of its identity: `AA/KEY-HASH.kv`."""
    key = name.key.hex()
    return f"{key[:2]}/{key}-{name.sequence_hash:016x}{SUFFIX}"


def parse_file_name(text: str) -> BlockName | None:
    """Return the name of the block in a file with this name; None for the name of another file."""
    found = _NAME.fullmatch(text)
    return None if found is None else BlockName(bytes.fromhex(found[1]), int(found[2], 16))


class BlockFormat:
    def __init__(self, identity: KvIdentity) -> None:
        self.file_bytes = file_bytes(identity.block_bytes)
        self._identity = identity.digest
        self._length = identity.block_bytes
        start = struct.pack("<8sI", MAGIC, FORMAT_VERSION)
        self._preamble = start + struct.pack("<I", xxh32_intdigest(start))

    def head(self, name: BlockName, checksum: bytes) -> bytes:
        """Return the `HEAD_BYTES` bytes of a header, without the zeros after it.

        `checksum` is the XXH3-128 of the block.
        """
        head = self._start(name) + checksum
        return head + xxh3_64_digest(head)

    def read_head(self, data: bytes, name: BlockName) -> tuple[str, bytes]:
        """Verify the first bytes of a file.

        Return "" and the checksum of the block, or one of `BAD_REASONS` and no bytes.
        """
        # Comparing bytes takes a third of the time of decoding them.
        intact = data[CHECKED_BYTES:] == xxh3_64_digest(data[:CHECKED_BYTES])
        if intact and data[:CHECKSUM_AT] == self._start(name):
            return "", data[CHECKSUM_AT:CHECKED_BYTES]
        if len(data) < HEAD_BYTES:
            return "truncated", b""
        magic, version, start = PREAMBLE.unpack_from(data)
        if magic != MAGIC or start != xxh32_intdigest(data[:_MAGIC_AND_VERSION]):
            # A file whose first pages were allocated but never written is all zeros: its writer or the machine crashed.
            return "corrupt" if any(data[:HEAD_BYTES]) else "truncated", b""
        if version > FORMAT_VERSION:
            return "newer", b""
        return "foreign" if intact and version == FORMAT_VERSION else "corrupt", b""

    def file(self, name: BlockName, block: memoryview) -> bytes:
        return self.head(name, checksum(block)).ljust(PAYLOAD_OFFSET, b"\0") + block

    def problem(self, file: memoryview, name: BlockName) -> str:
        """Return why the content of a file is not that of this block, one of `BAD_REASONS`; an empty text if it is."""
        problem, expected = self.read_head(bytes(file[:HEAD_BYTES]), name)
        if problem:
            return problem
        if len(file) < self.file_bytes:
            return "truncated"
        return "" if checksum(file[PAYLOAD_OFFSET : self.file_bytes]) == expected else "corrupt"

    def _start(self, name: BlockName) -> bytes:
        return _pack_start(self._preamble, name.key, name.sequence_hash, self._identity, self._length)
