"""The bytes of Kafka: batches of any content are decoded; requests and responses are those of aiokafka's schemas."""

import contextlib
import gzip
from collections.abc import Sequence
from itertools import islice
from typing import Any

import cramjam
import pytest
from aiokafka import TopicPartition
from aiokafka.codec import lz4_encode, snappy_encode, zstd_encode
from aiokafka.protocol.fetch import FetchRequest, FetchRequest_v11, FetchResponse_v11
from aiokafka.protocol.produce import (
    ProduceRequest,
    ProduceRequest_v7,
    ProduceRequest_v8,
    ProduceResponse_v7,
    ProduceResponse_v8,
)
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.codec import DecodeError
from forebay.transport.base import Record, event_of
from forebay.transport.dead_letters import CONTENT_BYTES_MAX, HEADERS_BYTES_MAX, dead_letter
from forebay.transport.kafka.batches import DECOMPRESSED_BYTES_MAX
from forebay.transport.kafka.consumer import Batches, DenseRecords
from forebay.transport.kafka.protocol import (
    FETCH,
    PRODUCE,
    VERSIONS,
    ResponseInvalid,
    fetch_body,
    fetched,
    header,
    produce_body,
    produced,
)
from forebay.transport.kafka.tail import AT_MS_MAX, record_of
from forebay.transport.kafka.writer import RECORD_BYTES_MAX, size_of
from tests.depth import examples
from tests.harness.event_schemas import TOPICS
from tests.raw_batches import (
    CODECS,
    CONTROL,
    GZIP,
    LOG_APPEND_TIME,
    LZ4,
    SNAPPY,
    TRANSACTIONAL,
    ZSTD,
    RawBatch,
    RawRecord,
)

PLACE = TopicPartition("forebay.requests", 3)
READ_UNCOMMITTED, READ_COMMITTED = 0, 1
PRODUCER = 7

texts = st.none() | st.binary(max_size=40)
raw_records = st.builds(
    RawRecord,
    value=texts,
    key=texts,
    headers=st.lists(st.tuples(st.binary(max_size=9), texts), max_size=3),
    delay_ms=st.integers(-(2**61), 2**61),
)
raw_batches = st.builds(
    RawBatch,
    records=st.lists(raw_records, min_size=1, max_size=4),
    timestamp_ms=st.integers(-(2**61), 2**61),
    codec=st.sampled_from(CODECS),
    attributes=st.sampled_from([0, LOG_APPEND_TIME, TRANSACTIONAL]),
)


def delivered(
    data: bytes, *, offset: int = 0, isolation: int = READ_UNCOMMITTED, aborted: Sequence[tuple[int, int]] = ()
) -> list[Any]:
    """Return the records that a consumer delivers from these bytes, from `offset` on."""
    return list(DenseRecords(PLACE, Batches(data), aborted, offset, None, None, True, isolation))


def read(data: bytes, **options: Any) -> list[Record]:
    return [record_of("requests", message) for message in delivered(data, **options)]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@given(batch=raw_batches)
def test_every_field_of_a_record_round_trips(batch: RawBatch) -> None:
    records = read(batch.encoded())
    assert [record.offset for record in records] == list(range(len(batch.records)))
    for raw, record in zip(batch.records, records, strict=True):
        assert (record.value, record.key) == (raw.value or b"", raw.key)
        assert (record.fault is None) == (raw.value is not None)
        assert 0 <= record.at_us <= AT_MS_MAX * 1000
        names = {name.decode(errors="backslashreplace") for name, _ in raw.headers}
        assert set(record.headers or {}) == names


@given(data=st.data(), batches=st.lists(raw_batches, min_size=1, max_size=3))
def test_damaged_batches_keep_their_offsets(data: st.DataObject, batches: list[RawBatch]) -> None:
    wire, offset = b"", 0
    for batch in batches:
        object.__setattr__(batch, "offset", offset)
        offset += len(batch.records)
        encoded = batch.encoded()
        if data.draw(st.booleans()):  # behind the batch header, which a broker keeps intact
            encoded = flipped(encoded, data.draw(st.integers(61, len(encoded) - 1)))
        wire += encoded
    start = data.draw(st.integers(0, offset - 1))
    assert [record.offset for record in read(wire, offset=start)] == list(range(start, offset))


@given(data=st.binary(max_size=200), offset=st.integers(0, 2**40))
def test_arbitrary_bytes_never_raise(data: bytes, offset: int) -> None:
    records = DenseRecords(PLACE, Batches(data), (), offset, None, None, True, READ_UNCOMMITTED)
    offsets = [message.offset for message in islice(records, 100)]
    assert offsets == sorted({*offsets})
    assert all(found >= offset for found in offsets)


@pytest.mark.parametrize(
    ("codec", "payload", "message"),
    [
        (GZIP, gzip.compress(bytes(DECOMPRESSED_BYTES_MAX + 1), 1), "larger than 32 MiB"),
        (SNAPPY, b"\x81\x80\x80\x10" + bytes(20), "larger than 32 MiB"),  # declares this uncompressed size
        (LZ4, bytes(cramjam.lz4.compress(bytes(DECOMPRESSED_BYTES_MAX + 1))), "cannot be decompressed"),
        (ZSTD, bytes(cramjam.zstd.compress(bytes(DECOMPRESSED_BYTES_MAX + 1))), "cannot be decompressed"),
        (5, b"unknown codec", "the unknown codec 5"),
        (GZIP, gzip.compress(b"cut short")[:-9], "the data ends too early"),
        (ZSTD, b"no zstd", "cannot be decompressed"),
    ],
    ids=["gzip-bomb", "snappy-bomb", "lz4-bomb", "zstd-bomb", "unknown-codec", "cut-gzip", "garbage"],
)
def test_a_batch_that_cannot_be_decompressed_is_delivered_as_absent(codec: int, payload: bytes, message: str) -> None:
    """The reason distinguishes an oversized batch that was not decompressed from invalid content."""
    three = RawBatch([RawRecord(b"x")] * 3, codec=codec, offset=5)
    records = read(three.encoded(payload=payload) + RawBatch([RawRecord(b"next")], offset=8).encoded(), offset=5)
    assert [record.offset for record in records] == [5, 6, 7, 8]
    assert [record.value for record in records] == [b"", b"", b"", b"next"]
    assert all(record.fault and message in record.fault for record in records[:3])


@pytest.mark.parametrize("encode", [gzip.compress, snappy_encode, lz4_encode, zstd_encode])
def test_batches_compressed_by_other_clients_are_read(encode: Any) -> None:
    codec = {gzip.compress: GZIP, snappy_encode: SNAPPY, lz4_encode: LZ4, zstd_encode: ZSTD}[encode]
    plain = RawBatch([RawRecord(b"word " * 20_000), RawRecord(b"two")])
    records = read(RawBatch(plain.records, codec=codec).encoded(payload=encode(plain.payload)))
    assert [record.value for record in records] == [b"word " * 20_000, b"two"]


def test_a_wrong_checksum_marks_every_record_of_the_batch_faulty() -> None:
    wire = RawBatch([RawRecord(b"one"), RawRecord(b"two")]).encoded()
    records = read(flipped(wire, len(wire) - 1))
    assert [record.fault for record in records] == ["the checksum of its batch is wrong"] * 2


def test_records_before_a_broken_one_are_kept() -> None:
    good = RawRecord(b"good", headers=[(b"\xff", b"1")])  # aiokafka's own parser rejects this header
    plain = RawBatch([good, good])
    payload = plain.payload[: len(plain.payload) // 2] + b"\x7e broken"
    first, second = read(plain.encoded(payload=payload))
    assert (first.value, first.headers, first.fault) == (b"good", {"\\xff": "1"}, None)
    assert second.fault is not None
    assert "damaged" in second.fault


def test_offsets_without_a_record_are_gaps_not_faults() -> None:
    wire = RawBatch([RawRecord(b"a")]).encoded()
    wire += RawBatch([RawRecord(b"\0" * 6, b"\0" * 4)], offset=1, attributes=CONTROL | TRANSACTIONAL).encoded()
    wire += RawBatch([RawRecord(b"b")], offset=4).encoded()  # 2 and 3 were compacted
    messages = delivered(wire)
    assert [message.offset for message in messages] == [0, 1, 2, 3, 4]
    assert [getattr(message, "is_gap", None) for message in messages] == [None, True, True, True, None]


def test_an_aborted_transaction_is_a_gap_for_read_committed_consumers() -> None:
    aborted = RawBatch([RawRecord(b"a")], attributes=TRANSACTIONAL, producer_id=PRODUCER).encoded()
    marker = RawRecord(b"\0" * 6, b"\0\0\0\0")
    wire = aborted + RawBatch([marker], offset=1, attributes=CONTROL | TRANSACTIONAL, producer_id=PRODUCER).encoded()
    wire += RawBatch([RawRecord(b"b")], offset=2, attributes=TRANSACTIONAL, producer_id=PRODUCER).encoded()
    committed = delivered(wire, isolation=READ_COMMITTED, aborted=[(PRODUCER, 0)])
    assert [getattr(message, "reason", message.value) for message in committed] == [
        "its transaction was aborted",
        "it is a transaction marker",
        b"b",
    ]
    assert [message.value for message in delivered(wire)] == [b"a", None, b"b"]


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
@examples(0.25)
@given(batch=raw_batches)
def test_any_record_decodes_or_is_rejected_by_name(topic: Any, batch: RawBatch) -> None:
    for record in read(batch.encoded()):
        try:
            event_of(topic, record)
        except DecodeError as error:
            assert str(error)


@given(batch=raw_batches)
def test_every_record_fits_a_dead_letter(batch: RawBatch) -> None:
    for record in read(batch.encoded()):
        letter = dead_letter(record, 2, "because")
        assert (letter.value, letter.key) == (record.value, record.key)
        headers = letter.headers or {}
        assert (headers["reason"], headers["source-topic"], headers["source-partition"]) == ("because", "requests", "3")
        assert headers.items() >= {
            name: text for name, text in (record.headers or {}).items() if name not in ("reason", "omitted")
        }.items() - {item for item in (record.headers or {}).items() if item[0].startswith("source-")}


def test_content_too_large_for_a_dead_letter_is_omitted_and_reported() -> None:
    record = Record("requests", 0, 9, 0, bytes(CONTENT_BYTES_MAX + 1), b"key", {"x": "\ufffd" * HEADERS_BYTES_MAX})
    letter = dead_letter(record, 0, "x" * 10_000)
    assert size_of(letter) < RECORD_BYTES_MAX
    assert letter.headers is not None
    assert "3145729 bytes of headers" in letter.headers["omitted"]
    assert str(CONTENT_BYTES_MAX + 1) in letter.headers["omitted"]
    assert letter.headers["source-offset"] == "9"


i16, i32, i64 = st.integers(-(2**15), 2**15 - 1), st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
topics = st.text(max_size=8)
partitions = st.integers(0, 2**31 - 1)
places = st.builds(TopicPartition, topics, partitions)
PRODUCE_VERSIONS = {7: (ProduceRequest_v7, ProduceResponse_v7), 8: (ProduceRequest_v8, ProduceResponse_v8)}
nullable_texts = st.none() | st.text(max_size=5)
record_errors = st.lists(st.tuples(i32, nullable_texts), max_size=2)


def responses_of(*fields: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[str, list[Any]]]]:
    """Return the topics of a response, whose partitions have these fields."""
    return st.lists(st.tuples(topics, st.lists(st.tuples(*fields), max_size=3)), max_size=3)


appended = {
    7: responses_of(partitions, i16, i64, i64, i64),
    8: responses_of(partitions, i16, i64, i64, i64, record_errors, nullable_texts),
}
aborted = st.none() | st.lists(st.tuples(i64, i64), max_size=2)
fetched_topics = responses_of(partitions, i16, i64, i64, i64, aborted, i32, st.none() | st.binary(max_size=30))


def test_the_versions_are_those_of_the_schemas() -> None:
    assert {PRODUCE: set(VERSIONS[PRODUCE]), FETCH: set(VERSIONS[FETCH])} == {0: {7, 8}, 1: {11}}


@given(client=st.text(max_size=9), correlation_id=st.integers(0, 2**31 - 1), body=st.binary(max_size=20))
def test_a_header_has_the_bytes_of_aiokafka(client: str, correlation_id: int, body: bytes) -> None:
    request = FetchRequest(0, 0, 0, 0, []).build(FetchRequest_v11)
    expected = request.build_request_header(correlation_id, client).encode()
    size = (len(expected) + len(body)).to_bytes(4, "big")
    assert header(FETCH, 11, correlation_id, client.encode(), len(body)) == size + expected


@given(version=st.sampled_from((7, 8)), batches=st.dictionaries(places, st.binary(max_size=30)), timeout_ms=i32)
def test_a_produce_request_has_the_bytes_of_aiokafka(
    version: int, batches: dict[TopicPartition, bytes], timeout_ms: int
) -> None:
    by_topic: dict[str, list[tuple[int, bytes]]] = {}
    for (topic, partition), batch in batches.items():
        by_topic.setdefault(topic, []).append((partition, batch))
    request = ProduceRequest(None, -1, timeout_ms, list(by_topic.items())).build(PRODUCE_VERSIONS[version][0])
    assert produce_body(batches, timeout_ms) == request.encode()


@given(offsets=st.dictionaries(places, i64), wait_ms=i32, bytes_max=i32, partition_bytes_max=i32)
def test_a_fetch_request_has_the_bytes_of_aiokafka_and_keeps_the_order(
    offsets: dict[TopicPartition, int], wait_ms: int, bytes_max: int, partition_bytes_max: int
) -> None:
    by_topic: list[tuple[str, list[tuple[int, int, int]]]] = []
    for (topic, partition), offset in offsets.items():
        if not by_topic or by_topic[-1][0] != topic:
            by_topic.append((topic, []))
        by_topic[-1][1].append((partition, offset, partition_bytes_max))
    request = FetchRequest(wait_ms, 1, bytes_max, 0, by_topic).build(FetchRequest_v11)
    assert fetch_body(offsets, wait_ms, bytes_max, partition_bytes_max) == request.encode()


@given(data=st.data(), version=st.sampled_from((7, 8)), throttle_ms=i32)
def test_a_produce_response_is_decoded_as_by_aiokafka(data: st.DataObject, version: int, throttle_ms: int) -> None:
    found = data.draw(appended[version])
    payload = PRODUCE_VERSIONS[version][1](found, throttle_ms).encode()
    assert produced(version, payload) == [
        (TopicPartition(topic, partition), code, offset)
        for topic, results in found
        for partition, code, offset, *_ in results
    ]
    with pytest.raises(ResponseInvalid):
        produced(version, payload[: data.draw(st.integers(0, len(payload) - 1))])


@given(data=st.data(), throttle_ms=i32, code=i16, session=i32, found=fetched_topics)
def test_a_fetch_response_is_decoded_as_by_aiokafka(
    data: st.DataObject, throttle_ms: int, code: int, session: int, found: list[tuple[str, list[Any]]]
) -> None:
    payload = FetchResponse_v11(throttle_ms, code, session, found).encode()
    assert fetched(payload) == (
        code,
        [
            (TopicPartition(topic, partition), error_code, end, batches or b"")
            for topic, results in found
            for partition, error_code, end, *_, batches in results
        ],
    )
    with pytest.raises(ResponseInvalid):
        fetched(payload[: data.draw(st.integers(0, len(payload) - 1))])


def test_every_truncation_of_a_response_is_noticed() -> None:
    payload = FetchResponse_v11(0, 0, 0, [("n.requests", [(0, 0, 7, 7, 0, [(1, 2)], -1, b"batch")])]).encode()
    assert fetched(payload) == (0, [(TopicPartition("n.requests", 0), 0, 7, b"batch")])
    for size in range(len(payload)):
        with pytest.raises(ResponseInvalid):
            fetched(payload[:size])


@given(payload=st.binary(max_size=80), version=st.sampled_from((7, 8)))
def test_garbage_raises_no_other_error(payload: bytes, version: int) -> None:
    with contextlib.suppress(ResponseInvalid):
        produced(version, payload)
    with contextlib.suppress(ResponseInvalid):
        fetched(payload)
