"""Common form of the KV events of all engines. Performs no I/O.

Block hashes in these events are the engine's own hashes as u64. They have no meaning outside of one rank, so hashes of
different workers or ranks are never compared.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Generic, TypeVar

import msgspec

from forebay.core.block_hashes import NO_MM_HASHES
from forebay.engine_model.steps import StoreChange
from forebay.events.base import U64_BYTES, U64_MASK, pack_u32
from forebay.events.kv import Tier
from forebay.kv_tiers.tier_content import SourceTier

MEDIA: Mapping[str, Tier] = {
    "GPU": "device",
    "DEVICE": "device",
    "CPU": "host",
    "CPU_PINNED": "host",
    "CPU_TIER1": "host",
    "CPU_TIER2": "disk",
    "DISK": "disk",
    "NVME": "disk",
    "STORAGE": "disk",
}
SHARED_MEDIA = frozenset({"EXTERNAL", "NETWORK", "REMOTE", "SHARED"})  # storage shared by workers

OWNER = "forebay"  # `ownership` in events of forebay's own connector
SHARED, SHARED_STALE = "SHARED", "SHARED_STALE"  # media of its shared store; stale blocks were not found there


class KvEventError(ValueError):
    """A KV event of an engine is invalid. The message names its position in the batch."""


class StoredBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Event: consecutive full blocks of a prompt have entered a tier.

    They follow the block `parent`, None at the beginning. Token ids are packed as little-endian u32. The base model has
    no `lora_name`.

    Attributes:
        tier: tier that the blocks have entered; `store` for storage that workers share.
        cache_salt: salt of the prompt's hashes. It is used only if `parent` is None.
        mm_hashes: by block index in this event, the `forebay.core.block_hashes.mm_hash` values of the images, videos
            and sounds in the block. Blocks without any are omitted.
    """

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: bytes
    block_size: int
    tier: SourceTier = "device"
    lora_name: str = ""
    cache_salt: str = ""
    mm_hashes: Mapping[int, Iterable[int]] = NO_MM_HASHES


class RemovedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Event: blocks have left a tier. If it is None, they have left every tier in which they were."""

    hashes: tuple[int, ...]
    tier: SourceTier | None = "device"


class MovedBlock(msgspec.Struct, frozen=True):
    """Event: a block that was stored before is now in this tier, and in no other."""

    hash: int
    tier: Tier


class ClearedBlocks(msgspec.Struct, frozen=True):
    """Event: the cache of the rank is empty, in every tier that belongs to the rank."""


class OwnStored(msgspec.Struct, frozen=True, kw_only=True):
    """Event: forebay's connector in the engine has stored consecutive blocks, and names them by sequence hash.

    The parent is None if it is unknown.
    """

    parent: int | None
    hashes: tuple[int, ...]
    tier: Tier


class OwnRemoved(msgspec.Struct, frozen=True, kw_only=True):
    hashes: tuple[int, ...]
    tier: Tier


EngineEvent = StoredBlocks | RemovedBlocks | MovedBlock | ClearedBlocks | OwnStored | OwnRemoved | StoreChange


class Batch(msgspec.Struct, frozen=True):
    """Events that an engine published together.

    `skipped` counts events that a prefix index does not need, by reason.
    """

    events: tuple[EngineEvent, ...]
    skipped: Counter[str] = msgspec.field(default_factory=Counter)


Decode = Callable[[bytes], Batch]
"""Decoder of the payloads of an engine's socket. Raises only KvEventError, for any bytes."""


def tier_of(
    medium: str | None, locality: str | None, skipped: Counter[str], *, has_store: bool = False
) -> SourceTier | None:
    """Return the tier of an event's storage medium (None is device memory), or count a skipped event and return None.

    Events of unknown media are skipped.

    Args:
        locality: `REMOTE` for storage that workers share.
        has_store: whether the storage that workers share has a name for the router. Otherwise its events are skipped.
    """
    if medium in SHARED_MEDIA or locality == "REMOTE":
        if has_store:
            return "store"
        skipped["shared"] += 1
        return None
    tier = "device" if medium is None else MEDIA.get(medium)
    if tier is None:
        skipped["unknown_medium"] += 1
    return tier


def as_u64(engine_hash: int | bytes) -> int:
    """Return an engine's block hash as u64. Raises KvEventError for an empty hash.

    The bits of a signed hash are kept. Of a longer hash only the low 64 bits are kept, as in vLLM.
    """
    if isinstance(engine_hash, int):
        return engine_hash & U64_MASK
    if not engine_hash:
        raise KvEventError("a block hash is empty")
    return int.from_bytes(engine_hash[-U64_BYTES:], "big")


def packed_tokens(token_ids: Sequence[int], blocks: int, block_size: int) -> bytes:
    """Return the token ids of full blocks, packed as little-endian u32.

    Raises KvEventError if the number of tokens is wrong, or a token id is not a u32.
    """
    if block_size < 1 or len(token_ids) != blocks * block_size:
        raise KvEventError(f"{len(token_ids)} tokens do not fill {blocks} blocks of {block_size}")
    try:
        return pack_u32(token_ids)
    except OverflowError as error:
        raise KvEventError(f"a token id is not a u32: {error}") from error


T = TypeVar("T", bound=msgspec.Struct)

ARRAYS = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})  # first bytes of msgpack arrays
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # RecursionError: deep nesting


class BatchDecoder(Generic[T]):
    """Decodes batches of vLLM and SGLang, in every encoding that their releases use, into structs.

    A batch is an array [time, events, rank] or, in some vLLM releases, a map. Its events are maps with a `type`, or,
    before vLLM 0.27, arrays that begin with the type. The tag of a struct is the type on the wire, and the order of its
    fields is that of the arrays. Additional fields are ignored.
    """

    def __init__(self, kinds: Sequence[type[T]]) -> None:
        self._types = {str(kind.__struct_config__.tag) for kind in kinds}
        self._maps: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(reduce(or_, kinds))
        rows = [msgspec.defstruct(f"{kind.__name__}Row", [], bases=(kind,), array_like=True) for kind in kinds]
        self._arrays: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(reduce(or_, rows))

    def decode(self, payload: bytes) -> tuple[list[T], Counter[str]]:
        """Return the events of known types, and the number of other events under the key `unknown_event`.

        Raises KvEventError if the batch or an event of a known type is malformed.
        """
        try:
            raw = (_ARRAY if payload[:1] and payload[0] in ARRAYS else _MAP).decode(payload).events
        except MALFORMED as error:
            raise KvEventError(f"cannot decode the batch: {error}") from error
        events: list[T] = []
        skipped: Counter[str] = Counter()
        for at, event in enumerate(raw):
            try:
                events.append(self._event(event))
            except MALFORMED as error:
                if self._is_known(event):
                    raise KvEventError(f"cannot decode event {at}: {error}") from error
                skipped["unknown_event"] += 1
        return events, skipped

    def _event(self, event: msgspec.Raw) -> T:
        return (self._arrays if bytes(event)[0] in ARRAYS else self._maps).decode(event)

    def _is_known(self, event: msgspec.Raw) -> bool:
        """Return whether an event has a known type, or a form whose type cannot be determined."""
        try:
            if bytes(event)[0] not in ARRAYS:
                return _TAGGED.decode(event).type in self._types
            row = _ROW.decode(event)
            return not row or _TEXT.decode(row[0]) in self._types
        except MALFORMED:
            return True


class _BatchMap(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]


class _Batch(_BatchMap, array_like=True):
    pass


class _Tagged(msgspec.Struct):
    type: str


_ARRAY = msgspec.msgpack.Decoder(_Batch)
_MAP = msgspec.msgpack.Decoder(_BatchMap)
_TAGGED = msgspec.msgpack.Decoder(_Tagged)
_ROW = msgspec.msgpack.Decoder(list[msgspec.Raw])
_TEXT = msgspec.msgpack.Decoder(str)
