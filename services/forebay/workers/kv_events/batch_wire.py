"""Decode batches of KV events from msgpack, in every encoding that releases of vLLM and SGLang use.

A batch is an array [time, events, rank] or, in some vLLM releases, a map. Its events are maps with a `type`, or, before
vLLM 0.27, arrays that begin with the type. Additional fields are ignored.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from forebay.workers.kv_events.engine_events import KvEventError

T = TypeVar("T", bound=msgspec.Struct)

ARRAYS = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})  # first bytes of msgpack arrays
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # RecursionError: deep nesting


class BatchDecoder(Generic[T]):
    """Decodes batches into structs.

    Args:
        kinds: struct types. The tag of each is the type of an event on the wire. The order of its fields is the order
            of the elements in events that are arrays.
    """

    def __init__(self, kinds: Sequence[type[T]]) -> None:
        self._types = {str(kind.__struct_config__.tag) for kind in kinds}
        self._maps: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(_union(kinds))
        rows = [msgspec.defstruct(f"{kind.__name__}Row", [], bases=(kind,), array_like=True) for kind in kinds]
        self._arrays: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(_union(rows))

    def decode(self, payload: bytes) -> tuple[list[T], Counter[str]]:
        """Return the events of known types, and the number of other events under the key `unknown_event`.

        Raises:
            KvEventError: the batch or an event of a known type is malformed.
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


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class _BatchMap(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]


class _Tagged(msgspec.Struct):
    type: str


_ARRAY = msgspec.msgpack.Decoder(_Batch)
_MAP = msgspec.msgpack.Decoder(_BatchMap)
_TAGGED = msgspec.msgpack.Decoder(_Tagged)
_ROW = msgspec.msgpack.Decoder(list[msgspec.Raw])
_TEXT = msgspec.msgpack.Decoder(str)


def _union(kinds: Sequence[Any]) -> Any:
    union = kinds[0]
    for kind in kinds[1:]:
        union |= kind
    return union
