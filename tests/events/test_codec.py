"""The wire codec: every event round-trips, and any invalid bytes raise `DecodeError`."""

import json
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from forebay.events.base import Event
from forebay.events.codec import DecodeError, decode, encode, unknown_tag
from forebay.events.requests import RequestSubmitted
from forebay.events.snapshots import Chunk, SnapshotChunk
from forebay.events.topics import (
    DEAD_LETTERS,
    DECISIONS,
    FIXED_TOPICS,
    METRICS,
    SNAPSHOTS,
    Topic,
    topic_named,
    work_topic,
)
from forebay.events.work import WorkItem
from tests.depth import examples
from tests.events.strategies import instances
from tests.harness.event_schemas import TOPICS
from tests.harness.samples import event_types, samples, tag_of

CARRYING = [topic for topic in TOPICS if topic.events is not None]
EVENTS = [pytest.param(topic, cls, id=tag_of(cls)) for topic in CARRYING for cls in event_types(topic)]
SAMPLES = {name: (topic, event) for name, topic, event, _ in samples()}
PLACES = st.integers(0, 0xFFFF)  # taken modulo the length of a record
HEAVY = examples(0.5, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def fields_of(topic: Topic, value: bytes) -> dict[str, Any]:
    fields = msgspec.json.decode(value) if topic.codec == "json" else msgspec.msgpack.decode(value)
    assert isinstance(fields, dict)
    return fields


def wire(topic: Topic, fields: object) -> bytes:
    return msgspec.json.encode(fields) if topic.codec == "json" else msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(("topic", "cls"), EVENTS)
@HEAVY
@given(data=st.data())
def test_every_event_round_trips(topic: Topic, cls: type[Event], data: st.DataObject) -> None:
    event = data.draw(instances(cls))
    assert decode(topic, encode(topic, event)) == event


@pytest.mark.parametrize("part", get_args(Chunk), ids=tag_of)
@HEAVY
@given(data=st.data())
def test_every_snapshot_part_round_trips(part: type, data: st.DataObject) -> None:
    chunk = SnapshotChunk(owner_epoch=1, number=0, parts=(data.draw(instances(part)),))
    assert decode(SNAPSHOTS, encode(SNAPSHOTS, chunk)) == chunk


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
@given(value=st.binary())
@example(value=b"")
@example(value=b"\xff")
@example(value=b"null")
@example(value=b'{"type":"\xff"}')
@example(value=b"[" * 100_000)
@example(value=b'{"x":' + b"[" * 100_000)
@example(value=b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0")
def test_random_bytes_are_rejected_by_name(topic: Topic, value: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(topic, value)


@pytest.mark.parametrize("topic", CARRYING, ids=lambda topic: topic.name)
def test_a_null_value_is_rejected_by_name(topic: Topic) -> None:
    with pytest.raises(DecodeError, match=f"{topic.name}: its value is null"):
        decode(topic, None)


@pytest.mark.parametrize("name", SAMPLES)
@given(damage=st.lists(st.tuples(PLACES, st.integers(0, 255)), min_size=1, max_size=3), length=PLACES)
def test_a_damaged_record_decodes_or_is_rejected_by_name(name: str, damage: list[tuple[int, int]], length: int) -> None:
    topic, event = SAMPLES[name]
    value = bytearray(encode(topic, event))
    for place, byte in damage:
        value[place % len(value)] = byte
    try:
        decode(topic, bytes(value[: length % (len(value) + 1)]))
    except DecodeError as error:
        assert str(error).startswith(topic.name)


@pytest.mark.parametrize("name", SAMPLES)
def test_deep_nesting_in_an_unknown_field_is_rejected_by_name(name: str) -> None:
    topic, event = SAMPLES[name]
    value = encode(topic, event)
    if topic.codec == "json":
        value = value[:-1] + b',"later":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    else:
        value = bytes([value[0] + 1]) + value[1:] + b"\xa5later" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(DecodeError):
        decode(topic, value)


@pytest.mark.parametrize("topic", CARRYING, ids=lambda topic: topic.name)
def test_an_unknown_tag_is_rejected_and_named(topic: Topic) -> None:
    with pytest.raises(DecodeError, match=r"kv\.moved"):
        decode(topic, wire(topic, {"type": "kv.moved"}))


@pytest.mark.parametrize("topic", CARRYING, ids=lambda topic: topic.name)
def test_only_a_well_formed_record_is_reported_as_an_unknown_tag(topic: Topic) -> None:
    assert unknown_tag(topic, wire(topic, {"type": "kv.moved", "more": [1]})) == "kv.moved"
    known = tag_of(event_types(topic)[0])
    for other in (wire(topic, {"type": known}), wire(topic, {"tag": "x"}), wire(topic, 5), b"", b"\xc1", b'"\xff"'):
        assert unknown_tag(topic, other) is None


@pytest.mark.parametrize("topic", [t for t in CARRYING if len(event_types(t)) > 1], ids=lambda topic: topic.name)
def test_a_missing_tag_is_rejected_if_a_topic_has_several_events(topic: Topic) -> None:
    with pytest.raises(DecodeError, match="type"):
        decode(topic, wire(topic, {"request_id": "r"}))


@pytest.mark.parametrize("name", SAMPLES)
def test_an_unknown_field_is_ignored(name: str) -> None:
    topic, event = SAMPLES[name]
    fields = fields_of(topic, encode(topic, event))
    assert decode(topic, wire(topic, fields | {"later": {"field": [1, None]}})) == event


@pytest.mark.parametrize("name", SAMPLES)
def test_a_missing_required_field_is_rejected(name: str) -> None:
    topic, event = SAMPLES[name]
    required = next((f.name for f in msgspec.structs.fields(event) if f.required), None)
    fields = fields_of(topic, encode(topic, event))
    if required is None:
        assert decode(topic, wire(topic, {"type": fields["type"]})) == type(event)()
        return
    del fields[required]
    with pytest.raises(DecodeError, match=required):
        decode(topic, wire(topic, fields))


NOT_PACKED = ("content", "data", "descriptor", "metadata")  # opaque bytes of a client, a file or another layer


def packed_fields(fields: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if isinstance(fields, bytes):
        return [] if path[-1] in NOT_PACKED else [path]
    children = fields.items() if isinstance(fields, dict) else enumerate(fields) if isinstance(fields, list) else ()
    return [found for key, child in children for found in packed_fields(child, (*path, key))]


@pytest.mark.parametrize("name", [name for name, (topic, _) in SAMPLES.items() if topic.codec == "msgpack"])
def test_partial_integers_in_packed_lists_are_rejected(name: str) -> None:
    topic, event = SAMPLES[name]
    value = encode(topic, event)
    for path in packed_fields(fields_of(topic, value)):
        fields = fields_of(topic, value)
        holder: Any = fields
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] += b"\0"
        with pytest.raises(DecodeError, match=f"{path[-1]}: 17 bytes"):
            decode(topic, wire(topic, fields))


@pytest.mark.parametrize(
    "digest", ["", "0" * 15, "0" * 17, "g" * 16, "A" * 16, "0" * 16 + "\n", " " + "0" * 15, "0x" + "0" * 14]
)
def test_a_malformed_digest_is_rejected(digest: str) -> None:
    for name in ("request.routed", "snapshot.taken"):
        _, event = SAMPLES[name]
        fields = json.loads(encode(DECISIONS, event))
        field = "table_digest" if name == "request.routed" else "digest"
        with pytest.raises(DecodeError, match=field):
            decode(DECISIONS, json.dumps(fields | {field: digest}).encode())


def test_default_values_are_not_encoded() -> None:
    for _, topic, _, least in samples():
        written = fields_of(topic, encode(topic, least)).keys() - {"type"}
        assert written == {f.name for f in msgspec.structs.fields(least) if f.required}


def test_a_topic_without_events_neither_encodes_nor_decodes() -> None:
    event = SAMPLES["load.reported"][1]
    with pytest.raises(TypeError, match="dead-letters"):
        encode(DEAD_LETTERS, event)
    with pytest.raises(DecodeError):
        decode(DEAD_LETTERS, encode(METRICS, event))


def test_a_tag_names_one_event_everywhere() -> None:
    tags = [tag_of(cls) for topic in CARRYING for cls in event_types(topic)]
    tags += [tag_of(part) for part in get_args(Chunk)]
    assert sorted(set(tags)) == sorted(tags)


def test_events_are_hashed_and_compared_by_value() -> None:
    for topic, event in SAMPLES.values():
        assert hash(decode(topic, encode(topic, event))) == hash(event)


def test_topics_are_found_by_name() -> None:
    for topic in (*FIXED_TOPICS, work_topic("default"), work_topic("a.b")):
        assert topic_named(topic.name) == topic
    for unknown in ("", "work", "work.", "workers", "request"):
        with pytest.raises(KeyError):
            topic_named(unknown)


def test_a_prompt_counts_its_tokens() -> None:
    _, event = SAMPLES["request.submitted"]
    assert isinstance(event, RequestSubmitted)
    assert event.prompt_tokens - event.withheld_tokens == len(event.token_ids) // 4 == 4
    assert event.withheld_tokens > 0


def test_a_work_item_contains_its_output_tokens() -> None:
    _, event = SAMPLES["work.item"]
    assert isinstance(event, WorkItem)
    assert msgspec.structs.replace(event, output_tokens=4).output_tokens == len(event.token_ids) // 4
    with pytest.raises(ValueError, match="output_tokens is 5, but token_ids has only 4 tokens"):
        msgspec.structs.replace(event, output_tokens=5)
