"""Encode Produce and Fetch requests of the Kafka protocol, and decode their responses.

aiokafka describes requests by schema objects, which call a Python function per field. That took more CPU time than
sending the request. A process sends these two requests for every hop, so this module writes and reads their fields
with one `struct` call per partition. aiokafka's schemas remain for all rare requests, and the tests compare both.

Format: https://kafka.apache.org/protocol. Every version below is older than Kafka's flexible versions.
"""

from collections.abc import Mapping
from functools import lru_cache
from struct import Struct, error
from typing import NamedTuple

from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError

PRODUCE, FETCH = 0, 1  # keys of the requests
VERSIONS: Mapping[int, tuple[int, ...]] = {PRODUCE: (8, 7), FETCH: (11,)}  # supported here, the preferred one first
RECORD_ERRORS_SINCE = 8  # version of Produce whose response explains rejected records

ALL_REPLICAS = -1
UNKNOWN = -1  # replica id, leader epoch and first offset of a client; length of a null string
NO_SESSION, NO_SESSION_EPOCH = 0, -1
BYTES_MIN = 1  # a broker responds to a fetch as soon as it has any record
READ_UNCOMMITTED = 0
NAMES_CACHED = 4_096

_I16, _I32 = Struct(">h"), Struct(">i")
_HEADER = Struct(">ihhih")  # size, key, version, correlation id, length of the client id
_PRODUCE_HEAD = Struct(">hhii")  # transactional id, acknowledgements, timeout, number of topics
_FETCH_HEAD = Struct(">iiiibiii")  # replica, wait, min and max bytes, isolation, session, its epoch, number of topics
_FETCH_TAIL = bytes(6)  # no partitions removed from the session, and no rack
_TWO_I32 = Struct(">ii")
_WANTED = Struct(">iiqqi")  # partition, leader epoch, offset, first offset of a follower, max bytes
_APPENDED = Struct(">ihqqq")  # partition, error, offset, timestamp, first offset
_FETCH_STATUS = Struct(">ihii")  # throttle time, error, session, number of topics
_FETCHED = Struct(">ihqqqi")  # partition, error, high watermark, last stable and first offset, number of aborts
_ABORTED_BYTES = 16
_REPLICA_AND_SIZE = Struct(">ii")  # preferred replica, length of the batches


class ResponseInvalid(KafkaConnectionError):  # type: ignore[misc]  # aiokafka ships no types
    """A response that does not have the format of its request, so that nothing is known about the request."""


class AppendedBatch(NamedTuple):
    """What a broker returned for the batch of one partition: an error code, 0 for none, and the first offset."""

    place: TopicPartition
    error_code: int
    offset: int


class FetchedPartition(NamedTuple):
    """What a broker returned for one fetched partition. The last record batch may be truncated."""

    place: TopicPartition
    error_code: int
    end: int
    data: bytes


def header(key: int, version: int, correlation_id: int, client_id: bytes, body_bytes: int) -> bytes:
    size = _HEADER.size - _I32.size + len(client_id) + body_bytes
    return _HEADER.pack(size, key, version, correlation_id, len(client_id)) + client_id


def produce_body(batches: Mapping[TopicPartition, bytes], timeout_ms: int) -> bytes:
    """Return a Produce request for one batch per partition, which waits for all replicas. Equal in all `VERSIONS`."""
    by_topic: dict[str, list[bytes]] = {}
    for (topic, partition), batch in batches.items():
        parts = by_topic.get(topic)
        if parts is None:
            parts = by_topic[topic] = []
        parts += (_TWO_I32.pack(partition, len(batch)), batch)
    out = [_PRODUCE_HEAD.pack(UNKNOWN, ALL_REPLICAS, timeout_ms, len(by_topic))]
    for topic, parts in by_topic.items():
        out += (_name(topic), _I32.pack(len(parts) // 2), *parts)
    return b"".join(out)


def produced(version: int, payload: bytes) -> list[AppendedBatch]:
    """Decode the response to a Produce request. Raises ResponseInvalid."""
    found: list[AppendedBatch] = []
    try:
        topics, at = _count(payload, 0)
        for _ in range(topics):
            topic, at = _text(payload, at)
            partitions, at = _count(payload, at)
            for _ in range(partitions):
                partition, code, offset, _, _ = _APPENDED.unpack_from(payload, at)
                at += _APPENDED.size
                if version >= RECORD_ERRORS_SINCE:
                    at = _after_record_errors(payload, at)
                found.append(AppendedBatch(TopicPartition(topic, partition), code, offset))
        _I32.unpack_from(payload, at)  # throttle time
    except (error, ValueError) as invalid:
        raise ResponseInvalid(f"a Produce response of {len(payload)} bytes is invalid: {invalid}") from invalid
    return found


def fetch_body(offsets: Mapping[TopicPartition, int], wait_ms: int, bytes_max: int, partition_bytes_max: int) -> bytes:
    """Return a Fetch request for these partitions, in this order. It opens no fetch session."""
    # A topic begins again where another one interrupts it, because the order of the partitions matters.
    out: list[bytes] = [b""]
    counts: list[int] = []
    last = ""
    for (topic, partition), offset in offsets.items():
        if topic != last or not counts:
            last = topic
            counts.append(0)
            out += (_name(topic), b"")
            count_at = len(out) - 1
        counts[-1] += 1
        out[count_at] = _I32.pack(counts[-1])
        out.append(_WANTED.pack(partition, UNKNOWN, offset, UNKNOWN, partition_bytes_max))
    out[0] = _FETCH_HEAD.pack(
        UNKNOWN, wait_ms, BYTES_MIN, bytes_max, READ_UNCOMMITTED, NO_SESSION, NO_SESSION_EPOCH, len(counts)
    )
    out.append(_FETCH_TAIL)
    return b"".join(out)


def fetched(payload: bytes) -> tuple[int, list[FetchedPartition]]:
    """Decode the response to a Fetch request: its error code and its partitions. Raises ResponseInvalid."""
    found: list[FetchedPartition] = []
    try:
        _, code, _, topics = _FETCH_STATUS.unpack_from(payload, 0)
        at = _FETCH_STATUS.size
        for _ in range(topics):
            topic, at = _text(payload, at)
            partitions, at = _count(payload, at)
            for _ in range(partitions):
                partition, error_code, end, _, _, aborted = _FETCHED.unpack_from(payload, at)
                at += _FETCHED.size + max(aborted, 0) * _ABORTED_BYTES
                _, size = _REPLICA_AND_SIZE.unpack_from(payload, at)
                at += _REPLICA_AND_SIZE.size
                data = _bytes(payload, at, size) if size > 0 else b""
                at += len(data)
                found.append(FetchedPartition(TopicPartition(topic, partition), error_code, end, data))
    except (error, ValueError) as invalid:
        raise ResponseInvalid(f"a Fetch response of {len(payload)} bytes is invalid: {invalid}") from invalid
    return code, found


@lru_cache(NAMES_CACHED)
def _name(topic: str) -> bytes:
    encoded = topic.encode()
    return _I16.pack(len(encoded)) + encoded


def _count(payload: bytes, at: int) -> tuple[int, int]:
    """Return the length of the array at `at`, 0 for a null array, and the position of its first item."""
    (count,) = _I32.unpack_from(payload, at)
    return count, at + _I32.size


def _text(payload: bytes, at: int) -> tuple[str, int]:
    """Return the string at `at`, empty for a null string, and the position after it."""
    (size,) = _I16.unpack_from(payload, at)
    at += _I16.size
    text = _bytes(payload, at, max(size, 0))
    return text.decode(), at + len(text)


def _bytes(payload: bytes, at: int, size: int) -> bytes:
    data = payload[at : at + size]
    if len(data) < size:
        raise ResponseInvalid(f"{size} bytes are announced at byte {at}, and {len(data)} follow")
    return data


def _after_record_errors(payload: bytes, at: int) -> int:
    """Return the position after the explanations of a rejected batch. Only the error code is used."""
    errors, at = _count(payload, at)
    for _ in range(errors):
        _, at = _text(payload, at + _I32.size)  # index of a record and what is wrong with it
    _, at = _text(payload, at)
    return at
