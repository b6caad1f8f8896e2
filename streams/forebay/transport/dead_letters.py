"""Records of the topic `dead-letters`: what no reader could use, as it came, with the reason and the place.

A letter can always be written: parts of a record that would make it larger than a topic takes are left out.
"""

from forebay.events.topics import DEAD_LETTERS
from forebay.transport.base import Draft, Record

REASON_CHARS_MAX = 500  # a header stays short
# A topic takes 16 MiB, and headers need up to six times their size where they are stored as JSON.
CONTENT_BYTES_MAX = 8 << 20
HEADERS_BYTES_MAX = 1 << 20


def dead_letter(record: Record, partition: int, reason: str) -> Draft:
    """Return the letter about `record` for `partition`. Its own headers replace those of the same name."""
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
