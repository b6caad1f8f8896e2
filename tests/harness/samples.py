"""Golden wire samples: one folder per event tag, written once by `make schemas` and never rewritten.

A sample pins the wire: a record written under a tag must decode to the same values forever.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from forebay.events.base import Event, pack_u64
from forebay.events.codec import encode
from forebay.events.control import QueueClass, QueueConfig
from forebay.events.pools import GridPool, PoolGrid, PriorityOverride
from forebay.events.snapshots import Chunk, SnapshotChunk
from forebay.events.topics import SNAPSHOTS, Topic
from forebay.events.work import WorkItem
from tests.harness.event_schemas import TOPICS

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "tests/events/samples"
_U64_FIELDS = {"content", "parent_hash", "tie_seed"}  # these fields use all 64 bits, so readers must not round them


def event_types(topic: Topic) -> tuple[type[Event], ...]:
    if topic.events is None:
        return ()
    return get_args(topic.events) or (topic.events,)


def tag_of(cls: type) -> str:
    """Return the wire tag of an event or of a tagged part."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return str(info.tag)


def example(cls: type, *, full: bool) -> Any:
    """Return a deterministic struct with every field set, or with the required fields only."""
    return _value(inspect.type_info(cls), "", full)


def samples() -> Iterator[tuple[str, Topic, Event, Event]]:
    """Yield name, topic, full and minimal example of every event, and of a snapshot chunk with each kind of part."""
    for topic in TOPICS:
        for cls in event_types(topic):
            if cls is not SnapshotChunk:
                yield tag_of(cls), topic, example(cls, full=True), example(cls, full=False)
    for part in get_args(Chunk):
        full, least = (SnapshotChunk(owner_epoch=7, number=1, parts=(example(part, full=f),)) for f in (True, False))
        yield f"{tag_of(SnapshotChunk)}.{tag_of(part)}", SNAPSHOTS, full, least
    every_part = (example(SnapshotChunk, full=f) for f in (True, False))
    yield tag_of(SnapshotChunk), SNAPSHOTS, *every_part


def readable(value: Any) -> Any:
    """Return a readable form of a decoded value: every field named, defaults included, and bytes as hex."""
    if isinstance(value, msgspec.Struct):
        fields = {name: readable(getattr(value, name)) for name in value.__struct_fields__}
        tag = value.__struct_config__.tag
        return fields if tag is None else {"type": tag, **fields}
    if isinstance(value, tuple):
        return [readable(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def main() -> None:
    for name, topic, full, least in samples():
        folder = SAMPLES / name
        if folder.exists():
            continue
        folder.mkdir(parents=True)
        (folder / f"full.{topic.codec}").write_bytes(encode(topic, full))
        (folder / f"least.{topic.codec}").write_bytes(encode(topic, least))
        expected = {"topic": topic.name, "full": readable(full), "least": readable(least)}
        (folder / "expected.json").write_text(json.dumps(expected, indent=2, ensure_ascii=False) + "\n")


def _value(info: inspect.Type, name: str, full: bool) -> Any:
    number = zlib.crc32(name.encode()) % 900 + 100
    match info:
        case inspect.Metadata(type=bare):
            return _value(bare, name, full)
        case inspect.StructType(cls=cls) if cls is QueueConfig:
            # The fields of this type constrain each other.
            return QueueConfig(
                threshold=1.5, policy="wspt", classes=(QueueClass(), QueueClass(quantum=512, uncached_tokens_min=64))
            )
        case inspect.StructType(cls=cls) if cls is PoolGrid:
            return PoolGrid(
                role="decode",
                target="itl",
                isl_min=16,
                isl_max=32_000,
                target_min_ms=5.5,
                target_max_ms=100.5,
                default_target_ms=20.5,
                pools=(GridPool(pool="short", priority=-1), GridPool(pool="long", priority=2)),
                cells=(("short", "short"), ("short", "long")),
                overrides=(PriorityOverride(min_priority=-5, max_priority=9, pool="long"),),
            )
        case inspect.StructType():
            fields = {f.name: _field(f, full) for f in info.fields if f.required or full}
            if info.cls is WorkItem and full:
                fields["output_tokens"] = 1  # at most the number of tokens
            return info.cls(**fields)
        case inspect.VarTupleType(item_type=inspect.UnionType(types=types)) if full:
            return tuple(_value(alternative, name, full) for alternative in types)
        case inspect.VarTupleType(item_type=item):
            return (_value(item, name, full),) if full else ()
        case inspect.UnionType(types=types):
            return _value(next(t for t in types if not isinstance(t, inspect.NoneType)), name, full)
        case inspect.IntType(le=int(most)) if most < number:
            return most
        case inspect.IntType():
            return 2**64 - number if name in _U64_FIELDS else number
        case inspect.FloatType(le=float(most)) if most <= 1.0:
            return 0.25
        case inspect.FloatType():
            return number + 0.25
        case inspect.StrType(pattern=None, min_length=None):
            return f"{name}: naïve"
        case inspect.StrType(pattern=None):
            return f"{name}-{number}"
        case inspect.StrType(max_length=int(length)):
            return f"{number:0{length}x}"  # digests, of a length
        case inspect.BytesType():
            return pack_u64([number, 2**64 - number])
        case inspect.BoolType():
            return True
        case inspect.LiteralType(values=values):
            return values[0]
    raise TypeError(f"{name}: no example of {info}")


def _field(field: inspect.Field, full: bool) -> Any:
    if isinstance(field.type, inspect.LiteralType):
        others = [value for value in field.type.values if value != field.default]
        return others[0] if others else field.default
    if isinstance(field.type, inspect.BoolType):
        return field.default is not True
    return _value(field.type, field.name, full)


if __name__ == "__main__":
    main()
