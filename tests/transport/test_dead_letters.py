"""Dead letters are listed with their origin, and retried once, if the record decodes and a late record is of use."""

import msgspec
import pytest

from forebay.core.block_hashes import sequence_hashes
from forebay.events.base import Event, pack_u32
from forebay.events.codec import decode, encode
from forebay.events.control import PolicySet
from forebay.events.requests import RequestCancelled, RequestSubmitted, Sampling
from forebay.events.topics import CONTROL, DEAD_LETTERS, REQUESTS, Topic
from forebay.transport import dead_letters
from forebay.transport.base import Draft, Record
from forebay.transport.dead_letters import (
    CONTENT_BYTES_MAX,
    Letter,
    NoSuchLetter,
    NotRetriable,
    append_retry,
    dead_letter,
    letters,
    read_letter,
    retry_of,
)
from forebay.transport.sqlite.log import SqliteLog

PARTITION = 2
POLICY = PolicySet(model="m", pool="default", mode="random")
TIMEOUT_US = 5_000_000


def request(model: str = "m") -> RequestSubmitted:
    tokens = pack_u32([1, 2, 3, 4])
    return RequestSubmitted(
        request_id="r",
        model=model,
        token_ids=tokens,
        sequence_hashes=sequence_hashes(tokens, 4),
        reply_slot=0,
        timeout_us=TIMEOUT_US,
        tie_seed=1,
        sampling=Sampling(max_tokens=1),
    )


async def bury(log: SqliteLog, topic: str, value: bytes, reason: str = "because") -> int:
    """Append a letter as an owner or a worker does, and return its offset."""
    record = Record(topic, PARTITION, 17, 5, value, b"key", {"trace": "t"})
    (offset,) = await log.append([dead_letter(record, PARTITION, reason)])
    return offset


async def bury_event(log: SqliteLog, topic: Topic, event: Event) -> int:
    return await bury(log, topic.name, encode(topic, event))


async def retry(log: SqliteLog, offset: int, group: str | None = "m", late_us: int = 0) -> str:
    letter, record = await read_letter(log, PARTITION, offset)
    return await append_retry(log, letter, retry_of(letter, record, group, letter.at_us + late_us))


async def listed(log: SqliteLog) -> list[Letter]:
    return [one async for one in letters(log, PARTITION, lambda _: True)]


async def test_letters_are_listed_newest_first_with_their_origin(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "PAGE_RECORDS", 3)
    for number in range(10):
        await bury(log, f"topic-{number}", b"x" * number, f"reason {number}")
    found = await listed(log)
    assert [one.offset for one in found] == list(range(9, -1, -1))
    assert msgspec.structs.replace(found[6], at_us=0) == Letter(
        partition=PARTITION,
        offset=3,
        at_us=0,
        topic="topic-3",
        source_partition=PARTITION,
        source_offset=17,
        reason="reason 3",
        value_bytes=3,
    )
    kept = [one.offset async for one in letters(log, PARTITION, lambda letter: letter.value_bytes % 2 == 1)]
    assert kept == [9, 7, 5, 3, 1]


async def test_a_retry_appends_the_original_record_and_marks_the_letter(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "PAGE_RECORDS", 1)
    offset = await bury_event(log, CONTROL, POLICY)
    others = [await bury(log, "control", b"{}") for _ in range(3)]
    await log.append([Draft(CONTROL.name, PARTITION, b"earlier")])
    assert await retry(log, offset) == f"control/{PARTITION}/1"
    (record,) = log.records(CONTROL.name, PARTITION, 1, 10)
    assert decode(CONTROL, record.value) == POLICY
    assert (record.key, record.headers) == (b"key", {"trace": "t", "retry-of": f"{PARTITION}/{offset}"})
    places = {one.offset: one.retried_as for one in await listed(log)}
    assert places == {offset: f"control/{PARTITION}/1", **dict.fromkeys(others, "")}, "the mark is not a letter"
    with pytest.raises(NotRetriable, match=f"it was retried before, as control/{PARTITION}/1"):
        await retry(log, offset)
    assert log.next_offset(CONTROL.name, PARTITION) == 2
    mark = {"retried-letter": str(offset), "retried-as": "newer"}
    await log.append([Draft(DEAD_LETTERS.name, PARTITION, b"", None, mark)])
    assert (await listed(log))[-1].retried_as == "newer"


REFUSED = {
    "a gap": ("kv-events", b"{}", "stale: the owner noticed the gap"),
    "a report": ("metrics", b"{}", "stale: a newer load report"),
    "a lease": ("fleet", b"{}", "stale: the owner has judged the leases"),
    "work": ("work.default", b"{}", "stale: it names an epoch of a worker"),
    "unknown topic": ("no-topic", b"{}", "this version has no topic no-topic"),
    "newer event": (
        "control",
        b'{"type": "control.of_a_newer_version"}',
        "does not decode in this version either: .*control.of_a_newer_version",
    ),
    "large": ("control", bytes(CONTENT_BYTES_MAX + 1), "does not contain the whole record: a value of 8388609 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_records_that_are_stale_unknown_or_incomplete_are_refused(log: SqliteLog, case: str) -> None:
    topic, value, reason = REFUSED[case]
    ends = log.topics()
    offset = await bury(log, topic, value)
    with pytest.raises(NotRetriable, match=reason):
        await retry(log, offset)
    assert log.topics() == [*ends, (DEAD_LETTERS.name, PARTITION, 1)], "nothing was appended"


@pytest.mark.parametrize(
    ("model", "group", "late_us", "reason"),
    [
        ("m", "m", TIMEOUT_US, ""),
        ("m", "m", TIMEOUT_US + 2_000_000, r"the timeout of the request, 5 s, passed 2 s ago: nobody waits"),
        ("m", "other", 0, f"names the model m, but partition {PARTITION} belongs to other: send it to an ingress of m"),
        ("m", None, 0, f"but partition {PARTITION} belongs to no group"),
    ],
)
async def test_a_request_is_retried_only_while_a_client_may_wait(
    log: SqliteLog, model: str, group: str | None, late_us: int, reason: str
) -> None:
    offset = await bury_event(log, REQUESTS, request(model))
    if not reason:
        assert await retry(log, offset, group, late_us) == f"requests/{PARTITION}/0"
        return
    with pytest.raises(NotRetriable, match=reason):
        await retry(log, offset, group, late_us)
    assert log.next_offset(REQUESTS.name, PARTITION) == 0


async def test_a_cancellation_has_no_timeout(log: SqliteLog) -> None:
    offset = await bury_event(log, REQUESTS, RequestCancelled(request_id="r"))
    assert await retry(log, offset, None, 10 * TIMEOUT_US) == f"requests/{PARTITION}/0"


async def test_places_without_a_letter_are_named(log: SqliteLog) -> None:
    with pytest.raises(NoSuchLetter, match="has no offset 0; the partition has no letters"):
        await read_letter(log, PARTITION, 0)
    await bury_event(log, CONTROL, POLICY)
    await retry(log, 0)
    await log.append([Draft(DEAD_LETTERS.name, PARTITION, b"of another program", None, {"source-topic": "x"})])
    for offset in (1, 2):  # a retry mark, and a record that is no letter
        with pytest.raises(NoSuchLetter, match=f"the record at offset {offset} .* is no letter"):
            await read_letter(log, PARTITION, offset)
    with pytest.raises(NoSuchLetter, match="has no offset 3; letters are at offsets 0 to 2"):
        await read_letter(log, PARTITION, 3)
    assert [one.offset for one in await listed(log)] == [0]
