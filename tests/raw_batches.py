"""Record batches in Kafka's wire format, including invalid ones that client libraries do not write.

The format is version 2 of https://kafka.apache.org/documentation/#recordbatch. Header names, header values, keys and
values are bytes or null. Any field of the batch can be set, so a test can write like a faulty or hostile client.
"""

import gzip
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import cramjam
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import for_code
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.util import calc_crc32c

HEAD = struct.Struct(">qiib")  # base offset, length, leader epoch, magic
BODY = struct.Struct(">hiqqqhii")  # attributes to record count; the checksum covers these fields and the records
CONTROL, TRANSACTIONAL, LOG_APPEND_TIME = 0x20, 0x10, 0x08
NONE, GZIP, SNAPPY, LZ4, ZSTD = CODECS = range(5)
ACKED_BY_ALL = -1
TIMEOUT_MS = 10_000
COMPRESS: dict[int, Callable[[bytes], bytes]] = {
    NONE: bytes,
    GZIP: gzip.compress,
    SNAPPY: lambda data: bytes(cramjam.snappy.compress_raw(data)),
    LZ4: lambda data: bytes(cramjam.lz4.compress(data)),
    ZSTD: lambda data: bytes(cramjam.zstd.compress(data)),
}


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record. `delay_ms` is added to the timestamp of its batch."""

    value: bytes | None = None
    key: bytes | None = None
    headers: Sequence[tuple[bytes, bytes | None]] = ()
    delay_ms: int = 0


@dataclass(frozen=True, slots=True)
class RawBatch:
    """A batch of records and the fields of its frame.

    Attributes:
        offset: base offset; a broker replaces it.
        timestamp_ms: of the first record; -1 for none.
        codec: compression codec; an unknown number leaves the records uncompressed.
        attributes: further attribute bits.
    """

    records: Sequence[RawRecord] = field(default_factory=tuple)
    offset: int = 0
    timestamp_ms: int = -1
    codec: int = NONE
    attributes: int = 0
    producer_id: int = -1

    @property
    def payload(self) -> bytes:
        return b"".join(_record(index, record) for index, record in enumerate(self.records))

    def encoded(self, *, payload: bytes | None = None) -> bytes:
        """Return the encoded batch, with `payload` in place of its compressed records if given."""
        if payload is None:
            payload = COMPRESS.get(self.codec, bytes)(self.payload)
        body = BODY.pack(
            self.codec | self.attributes,
            len(self.records) - 1,
            self.timestamp_ms,
            self.timestamp_ms + max((record.delay_ms for record in self.records), default=0),
            self.producer_id,
            -1,
            -1,
            len(self.records),
        )
        body += payload
        checked = struct.pack(">I", calc_crc32c(body)) + body
        length = HEAD.size - struct.calcsize(">qi") + len(checked)
        return HEAD.pack(self.offset, length, -1, 2) + checked


def varint(number: int) -> bytes:
    """Return a zigzag varint of 64 bits."""
    bits = (number << 1) ^ (number >> 63)
    out = bytearray()
    while bits > 0x7F:
        out.append(0x80 | bits & 0x7F)
        bits >>= 7
    out.append(bits)
    return bytes(out)


class RawProducer:
    """Sends raw batches. Use it as an async context manager."""

    def __init__(self, bootstrap: str) -> None:
        self._client = AIOKafkaClient(bootstrap_servers=bootstrap)

    async def __aenter__(self) -> Self:
        await self._client.bootstrap()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def send(self, topic: str, partition: int, batch: bytes) -> int:
        """Append a batch to a partition and return the offset of its first record. Raises the broker's error."""
        await self._client.add_topic(topic)
        leader = self._client.cluster.leader_for_partition(TopicPartition(topic, partition))
        request = ProduceRequest(
            transactional_id=None,
            required_acks=ACKED_BY_ALL,
            timeout=TIMEOUT_MS,
            topics=[(topic, [(partition, batch)])],
        )
        ((_, ((_, code, offset, *_),)),) = (await self._client.send(leader, request)).topics
        if code:
            raise for_code(code)
        return int(offset)


def _record(index: int, record: RawRecord) -> bytes:
    parts = [b"\x00", varint(record.delay_ms), varint(index), _bytes(record.key), _bytes(record.value)]
    parts.append(varint(len(record.headers)))
    for name, value in record.headers:
        parts += [_bytes(name), _bytes(value)]
    whole = b"".join(parts)
    return varint(len(whole)) + whole


def _bytes(value: bytes | None) -> bytes:
    return varint(-1) if value is None else varint(len(value)) + value
