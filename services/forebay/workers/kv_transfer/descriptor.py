"""Encode and decode descriptors, which contain the location of offered blocks (KV or embeddings).

NIXL accepts damaged metadata, and its own format for lists of memory is a pickle. So a descriptor consists of plain
numbers and a checksum, and all fields are checked here before NIXL uses them.
"""

from typing import Annotated, Any

import msgspec
import numpy as np
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from forebay.events.base import Name, hex_digest
from forebay.events.codec import MALFORMED
from forebay.events.media import Encoded
from forebay.events.transfer import DESCRIPTOR_BYTES_MAX, Prefilled
from forebay.workers.kv_transfer.api import NIXL
from forebay.workers.kv_transfer.nixl_agent import TransferError

Slots = np.ndarray[Any, np.dtype[np.int32]]

SLOTS_MAX = 1 << 20  # a reader prepares a list of all slots of a holder: about 64 MB at this number
OFFERS_MAX = 4096  # offers of a worker at the same time; each has a generation word
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_DIGEST_BYTES = 8


class BlockLocation(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Location of offered blocks: the content of `Prefilled.descriptor` and `Encoded.descriptor`.

    The holder has one generation word (a 64-bit number) per offer in its memory. The word has the value `generation` as
    long as the holder keeps the blocks.

    Attributes:
        address: memory address of the holder's first slot. The generation words follow the last slot.
        blocks: numbers of the offered slots in the order of the prompt, packed as little-endian u32.
        word: index of the offer's generation word.
        generation: value of that word while the blocks are kept. No other offer ever uses it.
        sums: XXH3-64 of each block, packed as little-endian u64; empty if no checksum was requested.
    """

    agent: Name
    route: Annotated[bytes, msgspec.Meta(min_length=1, max_length=1 << 16)]
    address: U63
    slots: Annotated[int, msgspec.Meta(ge=1, le=SLOTS_MAX)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    blocks: bytes
    word: Annotated[int, msgspec.Meta(ge=0, lt=OFFERS_MAX)]
    generation: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    sums: bytes = b""

    @property
    def count(self) -> int:
        return len(self.blocks) // 4


def encode_location(place: BlockLocation) -> bytes:
    """Return the fields of a location and a checksum of them. Raises TransferError if there are too many blocks."""
    body = msgspec.msgpack.encode(place)
    if len(body) + _DIGEST_BYTES > DESCRIPTOR_BYTES_MAX:
        raise TransferError(
            f"{place.count} blocks do not fit into a descriptor of {DESCRIPTOR_BYTES_MAX} bytes", "full"
        )
    return body + xxh3_64_digest(body)


def slots_of(place: BlockLocation) -> Slots:
    """Return the slot numbers of the offered blocks, in order."""
    return np.frombuffer(place.blocks, dtype="<u4").astype(np.int32)


def decode_location(offered: Prefilled | Encoded, block_bytes: int) -> BlockLocation:
    """Return the decoded descriptor of an event field, for a worker with `block_bytes` bytes per block.

    Raises:
        TransferError: with reason `refused`. The descriptor is damaged or has invalid slots; or it differs from the
            event field in the worker, or from this worker in transport or block size.
    """
    holder, expected = "the encode worker", None
    if isinstance(offered, Prefilled):
        holder = expected = offered.worker_id
        if offered.connector != NIXL:
            raise _refused(f"{holder} transfers KV by {offered.connector}, this worker by {NIXL}")
    body, digest = offered.descriptor[:-_DIGEST_BYTES], offered.descriptor[-_DIGEST_BYTES:]
    if xxh3_64_digest(body) != digest:
        raise _refused(f"the descriptor of {holder} is damaged")
    try:
        place = msgspec.msgpack.decode(body, type=BlockLocation)
    except MALFORMED as error:
        raise _refused(f"cannot decode the descriptor of {holder}: {error}") from error
    if expected is not None and place.agent.rpartition("@")[0] != expected:
        raise _refused(f"the descriptor is of {place.agent}, expected one of {expected}")
    if place.block_bytes != block_bytes:
        raise _refused(f"a block of {place.agent} has {place.block_bytes} bytes, a block of this worker {block_bytes}")
    _check_blocks(place)
    _check_sums(place, offered.checksum)
    return place


def _check_blocks(place: BlockLocation) -> None:
    if not place.blocks or len(place.blocks) % 4:
        raise _refused(f"{place.agent} offers an invalid list of blocks")
    if int(slots_of(place).view("u4").max()) >= place.slots:
        raise _refused(f"{place.agent} offers a block beyond its {place.slots} slots")
    if place.address + place.slots * place.block_bytes >= 1 << 63:
        raise _refused(
            f"{place.agent} has impossible memory: {place.slots} blocks of {place.block_bytes} bytes at {place.address}"
        )


def _check_sums(place: BlockLocation, checksum: str | None) -> None:
    if checksum is None and not place.sums:
        return
    if len(place.sums) != 2 * len(place.blocks):
        raise _refused(f"{place.agent} offers {place.count} blocks but {len(place.sums) // 8} checksums")
    found = hex_digest(xxh3_64_intdigest(place.sums))
    if checksum is not None and found != checksum:
        raise _refused(f"the checksums of {place.agent} do not match {checksum}")


def _refused(text: str) -> TransferError:
    return TransferError(text, "refused")
