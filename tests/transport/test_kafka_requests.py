"""Produce and Fetch requests have the bytes of aiokafka's schemas, and responses the values that its schemas decode."""

import contextlib
from typing import Any

import pytest
from aiokafka import TopicPartition
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

from forebay.transport.kafka.requests import (
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
