"""Read the topic `dead-letters`: letters with their origin and reason, and whether they were retried.

`forebay dead-letters retry` marks a letter by a *retry mark*, a later record in the same partition without a value,
which names the offset of the letter and the place of its new record.
"""

from collections.abc import AsyncIterator, Callable

import msgspec

from forebay.events.topics import DEAD_LETTERS
from forebay.transport.base import Draft, Log, LogError, Record
from forebay.transport.history.reader import records_of

PAGE_RECORDS = 256  # letters have up to 8 MiB, so the log returns fewer of them if they are large

ADDED_HEADERS = frozenset({"reason", "source-topic", "source-partition", "source-offset", "omitted"})
RETRIED_LETTER = "retried-letter"  # header of a retry mark: offset of the letter
RETRIED_AS = "retried-as"  # header of a retry mark: TOPIC/PARTITION/OFFSET of the new record
RETRY_OF = "retry-of"  # header of the new record: PARTITION/OFFSET of the letter


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letter without its value.

    `omitted` names the parts of the record that were too large. `retried_as` is the place of the record with which the
    letter was last retried, as TOPIC/PARTITION/OFFSET. Both are empty for none.
    """

    partition: int
    offset: int
    at_us: int
    topic: str
    source_partition: int
    source_offset: int
    reason: str
    omitted: str = ""
    value_bytes: int = 0
    retried_as: str = ""


class NoSuchLetter(LogError):
    """The topic `dead-letters` has no letter at this place."""


def letter_of(record: Record, retried_as: str = "") -> Letter | None:
    """Return the letter in a record of `dead-letters`; None for a retry mark and for a record of another program."""
    headers = record.headers or {}
    try:
        return Letter(
            partition=record.partition,
            offset=record.offset,
            at_us=record.at_us,
            topic=headers["source-topic"],
            source_partition=int(headers["source-partition"]),
            source_offset=int(headers["source-offset"]),
            reason=headers.get("reason", ""),
            omitted=headers.get("omitted", ""),
            value_bytes=len(record.value),
            retried_as=retried_as,
        )
    except (KeyError, ValueError):
        return None


def retry_mark(letter: Letter, retried_as: str) -> Draft:
    headers = {RETRIED_LETTER: str(letter.offset), RETRIED_AS: retried_as}
    return Draft(DEAD_LETTERS.name, letter.partition, b"", None, headers)


async def letters(log: Log, partition: int, keep: Callable[[Letter], bool]) -> AsyncIterator[Letter]:
    """Yield the letters of a partition for which `keep` returns true, newest first. Raises LogError.

    A mark follows its letter, so a reader that goes backwards knows whether a letter was retried. The values are
    dropped page by page.
    """
    begin, end = await log.begin(DEAD_LETTERS.name, partition), await log.end(DEAD_LETTERS.name, partition)
    marks: dict[int, str] = {}
    while end > begin:
        start = max(begin, end - PAGE_RECORDS)
        page: list[Letter] = []
        async for record in records_of(log, DEAD_LETTERS, partition, start, end):
            headers = record.headers or {}
            if (offset := headers.get(RETRIED_LETTER, "")).isdecimal():
                marks[int(offset)] = headers.get(RETRIED_AS, "")
            elif (letter := letter_of(record)) is not None:
                page.append(letter)
        for letter in reversed(page):
            found = msgspec.structs.replace(letter, retried_as=marks.get(letter.offset, ""))
            if keep(found):
                yield found
        end = start


async def read_letter(log: Log, partition: int, offset: int) -> tuple[Letter, Record]:
    """Return the letter at an offset, and its record with the value. Raises NoSuchLetter or LogError."""
    begin, end = await log.begin(DEAD_LETTERS.name, partition), await log.end(DEAD_LETTERS.name, partition)
    if not begin <= offset < end:
        span = f"letters are at offsets {begin} to {end - 1}" if begin < end else "the partition has no letters"
        raise NoSuchLetter(f"{DEAD_LETTERS.name}/{partition} has no offset {offset}; {span}")
    (record,) = await log.read(DEAD_LETTERS.name, partition, offset, 1)
    if letter_of(record) is None:
        raise NoSuchLetter(
            f"the record at offset {offset} of {DEAD_LETTERS.name}/{partition} is no letter; `forebay dead-letters"
            " list` shows the letters"
        )
    retried_as = ""
    async for later in records_of(log, DEAD_LETTERS, partition, offset + 1, end):
        headers = later.headers or {}
        if headers.get(RETRIED_LETTER) == str(offset):
            retried_as = headers.get(RETRIED_AS, "")
    letter = letter_of(record, retried_as)
    assert letter is not None, "checked above"
    return letter, record
