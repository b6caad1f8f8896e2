"""Build records for the topic `dead-letters`: unusable records with the reason and their origin.

A dead letter never exceeds the maximum record size. Parts of a record that are too large are omitted.
"""

from forebay.events.topics import DEAD_LETTERS
from forebay.transport.base import Draft, Record

REASON_CHARS_MAX = 500  # a header stays short
# Topics accept records up to 16 MiB, and headers stored as JSON take up to six times their size.
CONTENT_BYTES_MAX = 8 << 20
HEADERS_BYTES_MAX = 1 << 20


def dead_letter(record: Record, partition: int, reason: str) -> Draft:
    """Return the dead letter for `record`, to be appended to `partition` of the topic `dead-letters`.

    Added headers: `reason`, `source-topic`, `source-partition`, `source-offset`, and `omitted` if parts were too large.
    """
    headers = dict(record.headers or {})
    size = sum(len(name.encode()) + len(value.encode()) for name, value in headers.items())
    value, key, omitted = record.value, record.key, []
    if size > HEADERS_BYTES_MAX:
        omitted.append(f"{size} bytes of headers")
        headers = {}
    if len(value) + len(key or b"") > CONTENT_BYTES_MAX:
        omitted.append(f"a value of {len(value)} bytes and a key of {len(key or b'')}")
        value, key = b"", None
    headers |= {
        "reason": reason[:REASON_CHARS_MAX],
        "source-topic": record.topic,
        "source-partition": str(record.partition),
        "source-offset": str(record.offset),
    }
    if omitted:
        headers["omitted"] = ", ".join(omitted)
    return Draft(DEAD_LETTERS.name, partition, value, key, headers)
