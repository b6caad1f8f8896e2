"""Parse record batches of Kafka's wire format without raising on malformed records.

Theory of operation. aiokafka's C and Python parsers raise on malformed records, for example on a header name that is
not UTF-8, an unknown codec or a wrong checksum. An exception does not advance the consumer's position, so the consumer
would fetch the same batch for ever. This module decompresses a batch up to a maximum size and passes it to aiokafka's
parser. If that fails, the parser below reads the batch record by record, and reports why the remaining records cannot
be read.

Format: https://kafka.apache.org/documentation/#recordbatch, version 2. Brokers convert the older formats on arrival.
"""

import mmap
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cramjam
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.util import calc_crc32c, decode_varint

Buffer = bytes | memoryview

# Brokers limit the compressed size of a batch, and zstd can expand 32 kB to a gigabyte. Producers limit the size before
# compression to a megabyte or one larger record. This limit is twice the largest record that forebay accepts.
DECOMPRESSED_BYTES_MAX = 32 << 20
GZIP_WINDOW = 31  # zlib's name for the gzip format
LENGTH_AT, MAGIC_AT, CHECKSUM_AT, CHECKED_AT = 8, 16, 17, 21
FRAME_BYTES = 12  # offset and length fields, which the length does not include
MAGIC = 2  # the version of the format
HEAD = struct.Struct(">qiibIhiqqqhii")
NO_CODEC, GZIP, SNAPPY, LZ4, ZSTD = range(5)
CODEC_MASK, LOG_APPEND_TIME, TRANSACTIONAL, CONTROL = 0x07, 0x08, 0x10, 0x20
XERIAL = b"\x82SNAPPY\x00"  # magic bytes of the block format of snappy that Java clients write
XERIAL_HEADER_BYTES = 16
UNREADABLE_CHECKSUM = "the checksum of its batch is wrong"


class BatchUnreadable(ValueError):
    """No record of a batch can be read. The text is the reason, for a dead letter."""


class BatchHead(NamedTuple):
    """Header of a record batch. `next_offset` is after the last offset that the batch occupies.

    The `attributes` are bits for compression, timestamp type, transaction and control batch. `producer_id` is None in
    other formats.
    """

    base_offset: int
    next_offset: int
    magic: int
    attributes: int
    first_timestamp: int
    max_timestamp: int
    producer_id: int | None
    records: int

    @property
    def is_control(self) -> bool:
        """Whether the batch is a transaction marker, which holds no records of a producer."""
        return bool(self.attributes & CONTROL)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)


@dataclass(frozen=True, slots=True)
class LooseRecord:
    """Record of a batch that aiokafka cannot parse, with the field names of aiokafka's own records."""

    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    checksum: None = None


def frames_of(buffer: Buffer) -> Iterator[memoryview]:
    """Yield each complete batch of a fetched partition. A broker may truncate the last batch, which is skipped."""
    view, position = memoryview(buffer), 0
    while position + FRAME_BYTES <= len(view):
        (length,) = struct.unpack_from(">i", view, position + LENGTH_AT)
        end = position + FRAME_BYTES + max(length, 0)
        if end > len(view):
            return
        yield view[position:end]
        position = end


def head_of(frame: memoryview) -> BatchHead:
    """Return the header of a batch. A batch without a complete header occupies only its first offset."""
    (base_offset,) = struct.unpack_from(">q", frame)
    magic = frame[MAGIC_AT] if len(frame) > MAGIC_AT else -1
    if magic != MAGIC or len(frame) < HEAD.size:
        return BatchHead(base_offset, base_offset + 1, magic, 0, -1, -1, None, 0)
    base_offset, _, _, _, _, attributes, last_delta, first, newest, producer_id, _, _, count = HEAD.unpack_from(frame)
    # Whatever the header contains, reading the batch must advance the position.
    next_offset = base_offset + max(last_delta, 0) + 1
    return BatchHead(base_offset, next_offset, magic, attributes, first, newest, producer_id, count)


def records_of(frame: memoryview, head: BatchHead, *, check_crcs: bool = True) -> tuple[list[Any], str]:
    """Return the readable records of a batch, and the reason why the others cannot be read, empty without others.

    Raises BatchUnreadable if none of the records can be read.
    """
    if head.magic != MAGIC or len(frame) < HEAD.size:
        raise BatchUnreadable(f"its batch has the unknown format version {head.magic}")
    if check_crcs:
        (checksum,) = struct.unpack_from(">I", frame, CHECKSUM_AT)
        if calc_crc32c(bytes(frame[CHECKED_AT:])) != checksum:
            raise BatchUnreadable(UNREADABLE_CHECKSUM)
    data = _decompressed(head.attributes & CODEC_MASK, frame[HEAD.size :])
    try:
        return list(DefaultRecordBatch(_uncompressed(frame, head, data))), ""
    except Exception:  # noqa: BLE001 - the C parser raises whatever comes up
        return _loose_records(data, head)


def _uncompressed(frame: memoryview, head: BatchHead, data: Buffer) -> bytes:
    """Return the same batch without compression, because aiokafka decompresses without a size limit."""
    if not head.attributes & CODEC_MASK:
        return bytes(frame)
    fields = list(HEAD.unpack_from(frame))
    fields[5] = head.attributes & ~CODEC_MASK
    return HEAD.pack(*fields) + data


def _decompressed(codec: int, data: memoryview) -> Buffer:
    if codec == NO_CODEC:
        return data
    decompress = _DECOMPRESS.get(codec)
    if decompress is None:
        raise BatchUnreadable(f"its batch is compressed by the unknown codec {codec}")
    try:
        return decompress(bytes(data))
    except BatchUnreadable:
        raise
    except Exception as error:
        raise BatchUnreadable(f"its batch cannot be decompressed: {error}") from error


def _gunzip(data: bytes) -> bytes:
    stream = zlib.decompressobj(GZIP_WINDOW)
    out = stream.decompress(data, DECOMPRESSED_BYTES_MAX)
    if stream.unconsumed_tail:
        raise _too_large()
    if not stream.eof:
        raise BatchUnreadable("its batch cannot be decompressed: the data ends too early")
    return out


def _unsnap(data: bytes) -> bytes:
    if not data.startswith(XERIAL):
        return _unsnap_block(data, DECOMPRESSED_BYTES_MAX)
    blocks, left, position = [], DECOMPRESSED_BYTES_MAX, XERIAL_HEADER_BYTES
    while position < len(data):
        (length,) = struct.unpack_from(">I", data, position)
        begin, position = position + 4, position + 4 + length
        blocks.append(_unsnap_block(data[begin:position], left))
        left -= len(blocks[-1])
    return b"".join(blocks)


def _unsnap_block(block: bytes, left: int) -> bytes:
    if cramjam.snappy.decompress_raw_len(block) > left:
        raise _too_large()
    return bytes(cramjam.snappy.decompress_raw(block))


def _bounded(decompress_into: Callable[[bytes, Any], int]) -> Callable[[bytes], bytes]:
    """Return a decompressor into a buffer of fixed size, of which the system allocates only the pages written."""

    def decompress(data: bytes) -> bytes:
        with mmap.mmap(-1, DECOMPRESSED_BYTES_MAX) as memory:
            return memory[: decompress_into(data, memory)]

    return decompress


def _too_large() -> BatchUnreadable:
    return BatchUnreadable(f"its batch is larger than {DECOMPRESSED_BYTES_MAX >> 20} MiB once decompressed")


_DECOMPRESS: dict[int, Callable[[bytes], bytes]] = {
    GZIP: _gunzip,
    SNAPPY: _unsnap,
    LZ4: _bounded(cramjam.lz4.decompress_into),
    ZSTD: _bounded(cramjam.zstd.decompress_into),
}


def _loose_records(data: Buffer, head: BatchHead) -> tuple[list[Any], str]:
    """Return the records before the first malformed one, and the reason why parsing stopped."""
    found: list[Any] = []
    buffer, position = bytearray(data), 0
    try:
        for _ in range(head.records):
            record, position = _loose_record(buffer, position, head)
            found.append(record)
    except (ValueError, IndexError) as error:
        return found, f"its batch is damaged at byte {position}: {error}"
    return found, ""


def _loose_record(buffer: bytearray, position: int, head: BatchHead) -> tuple[LooseRecord, int]:
    """Return the record at `position` and the next position. Raises ValueError or IndexError if it is malformed."""
    length, position = decode_varint(buffer, position)
    end = position + length
    if length < 0 or end > len(buffer):
        raise ValueError(f"the length of a record, {length} bytes, is negative or beyond the end of the batch")
    position += 1  # the attributes byte is unused
    delay_ms, position = decode_varint(buffer, position)
    delta, position = decode_varint(buffer, position)
    key, position = _nullable(buffer, position, end)
    value, position = _nullable(buffer, position, end)
    count, position = decode_varint(buffer, position)
    headers = []
    for _ in range(count):
        name, position = _nullable(buffer, position, end)
        content, position = _nullable(buffer, position, end)
        headers.append(((name or b"").decode(errors="backslashreplace"), content))
    if position != end:
        raise ValueError(f"a record whose length is {end - position} bytes larger than its fields")
    timestamp_type = int(bool(head.attributes & LOG_APPEND_TIME))
    timestamp = head.max_timestamp if timestamp_type else head.first_timestamp + delay_ms
    return LooseRecord(head.base_offset + delta, timestamp, timestamp_type, key, value, headers), end


def _nullable(buffer: bytearray, position: int, end: int) -> tuple[bytes | None, int]:
    length, position = decode_varint(buffer, position)
    if length < 0:
        return None, position
    if position + length > end:
        raise ValueError(f"a field of {length} bytes in a record with {end - position} bytes left")
    return bytes(buffer[position : position + length]), position + length
