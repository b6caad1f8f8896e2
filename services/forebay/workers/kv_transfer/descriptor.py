"""The descriptor: where offered blocks lie, in plain numbers, closed by a checksum of its own.

NIXL takes metadata in which a bit has flipped, and its own form of a list is a pickle; so everything is looked at here
before NIXL, or a socket, sees any of it.
"""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from forebay.events.base import Name, hex_digest, pack_u32
from forebay.events.transfer import DESCRIPTOR_BYTES_MAX, Prefilled
from forebay.workers.kv_transfer.api import Kind
from forebay.workers.kv_transfer.nixl_agent import TransferError, agent_name

if TYPE_CHECKING:
    import numpy as np

    Slots = np.ndarray[Any, np.dtype[np.int32]]

SLOTS_MAX = 1 << 20  # a reader prepares a list of all of a holder's slots: some 64 MB at that many
OFFERS_MAX = 4096  # at once; each has a generation word
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_DIGEST_BYTES = 8


class Place(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What `Prefilled.descriptor` holds, besides its checksum.

    Attributes:
        agent: the holder, `worker@epoch`.
        route: the way to it: NIXL's metadata, or `host:port`.
        address: of the holder's first slot; the generation words follow the last. 0 where the path has no use for it.
        slots: how many slots the holder's memory has.
        block_bytes: bytes of a slot.
        blocks: the offered slots in the order of the prompt, packed u32.
        word: which generation word.
        generation: its value as long as the blocks are held; never seen there before or after.
        sums: XXH3-64 of each block, packed u64; empty where not asked for.
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
        """How many blocks are offered."""
        return len(self.blocks) // 4


def encode_place(place: Place) -> bytes:
    """The descriptor. Raises TransferError when there are more blocks than one may name."""
    body = msgspec.msgpack.encode(place)
    if len(body) + _DIGEST_BYTES > DESCRIPTOR_BYTES_MAX:
        raise TransferError(
            f"{place.count} blocks do not fit into a descriptor of {DESCRIPTOR_BYTES_MAX} bytes", "full"
        )
    return body + xxh3_64_digest(body)


def pack_slots(slots: "Slots") -> bytes:
    """Slot numbers as packed u32."""
    return pack_u32(slots.tolist())


def slots_of(place: Place) -> "Slots":
    """The offered slots, in order: 1 x `place.count`."""
    import numpy  # noqa: PLC0415 - an extra

    return numpy.frombuffer(place.blocks, dtype="<u4").astype(numpy.int32)


def place_of(prefilled: Prefilled, kind: Kind, block_bytes: int) -> Place:
    """The place that a descriptor names, checked against what is said of it and against this worker's own layout.

    Raises TransferError (`refused`), naming both sides, when it is of another path, worker, epoch or block size, is
    damaged, or names slots that cannot be.
    """
    if prefilled.connector != kind:
        raise _refused(f"the blocks of {prefilled.worker_id} travel by {prefilled.connector}, this worker's by {kind}")
    body, digest = prefilled.descriptor[:-_DIGEST_BYTES], prefilled.descriptor[-_DIGEST_BYTES:]
    if xxh3_64_digest(body) != digest:
        raise _refused(f"the descriptor of {prefilled.worker_id} is damaged")
    try:
        place = msgspec.msgpack.decode(body, type=Place)
    except msgspec.MsgspecError as error:
        raise _refused(f"the descriptor of {prefilled.worker_id} is none: {error}") from error
    expected = agent_name(prefilled.worker_id, prefilled.worker_epoch)
    if place.agent != expected:
        raise _refused(f"the descriptor is of {place.agent}, not of {expected}")
    if place.block_bytes != block_bytes:
        raise _refused(f"a block of {place.agent} has {place.block_bytes} bytes, one of this worker {block_bytes}")
    _check_blocks(place)
    _check_sums(place, prefilled)
    return place


def _check_blocks(place: Place) -> None:
    if not place.blocks or len(place.blocks) % 4:
        raise _refused(f"{place.agent} offers no list of blocks")
    if int(slots_of(place).view("u4").max()) >= place.slots:
        raise _refused(f"{place.agent} offers a block beyond its {place.slots}")
    if place.address + place.slots * place.block_bytes >= 1 << 63:
        raise _refused(
            f"{place.slots} blocks of {place.block_bytes} bytes at {place.address} of {place.agent} cannot be"
        )


def _check_sums(place: Place, prefilled: Prefilled) -> None:
    if prefilled.checksum is None and not place.sums:
        return
    if len(place.sums) != 2 * len(place.blocks):
        raise _refused(f"{place.agent} offers {place.count} blocks and {len(place.sums) // 8} checksums")
    found = hex_digest(xxh3_64_intdigest(place.sums))
    if prefilled.checksum is not None and found != prefilled.checksum:
        raise _refused(f"the checksums of {place.agent} are not those of {prefilled.checksum}")


def _refused(text: str) -> TransferError:
    return TransferError(text, "refused")
