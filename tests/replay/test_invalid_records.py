"""Changed records are detected, and invalid records anywhere on a journal change nothing that its readers find.

Invalid are repeated, foreign, stale and undecodable records. The journals are generated histories and the recordings of
`tests/logs`. A record is inserted as any process could have appended it, so it repeats only earlier records. The later
records then have higher offsets, and name each other by these, as if their owner had written them behind the inserted
record.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.codec import DecodeError, decode, encode
from forebay.events.decisions import JournalRecord, OwnerClaimed, RequestHeld, RequestRouted, SnapshotRecord
from forebay.events.snapshots import SnapshotChunk, WorldState
from forebay.events.topics import DECISIONS, INPUTS, SNAPSHOTS
from forebay.journal.checks import FOREIGN_PROGRESS, FOREIGN_RECORDS
from forebay.journal.records import Validity, journal
from forebay.journal.snapshots import load_snapshot, newest_snapshot
from forebay.journal.spans import spans_of
from forebay.journal.start import EMPTY_STATE, recorded_view
from forebay.live.standby import RecoveryDiverged, Standby
from forebay.replay.at import seek
from forebay.replay.explain.find import find
from forebay.replay.record.slice import Window, slice_of
from forebay.replay.states import States
from forebay.replay.verify.verify import verify
from forebay.transport.base import Log, LogError
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import actions
from tests.depth import examples, sampled
from tests.replay.owner_histories import Topics, journal_follows, read_log, written

HISTORIES = st.lists(actions(), min_size=20, max_size=90)
RECORDINGS = [
    path
    for path in sorted((Path(__file__).parents[1] / "logs").glob("*.rec"))
    if path.stem not in ("from-snapshot", "own-policy", "foreign-records")
]
INSERTED = 12

Values = list[bytes]
Insertion = Callable[[Values, int, Random, Values], list[bytes]]


def repeated(before: Values, _: int, chance: Random, __: Values) -> list[bytes]:
    """Repeat one record, which may be the newest, a claim or a snapshot."""
    return [chance.choice([before[-1], chance.choice(before)])]


def repeated_run(before: Values, _: int, chance: Random, __: Values) -> list[bytes]:
    """Repeat some consecutive records."""
    first = chance.randrange(len(before))
    return before[first : first + 1 + chance.randrange(6)]


def repeated_claim(before: Values, _: int, chance: Random, __: Values) -> list[bytes]:
    return [chance.choice([value for value in before if isinstance(decode(DECISIONS, value), OwnerClaimed)])]


def repeated_snapshot(before: Values, _: int, chance: Random, __: Values) -> list[bytes]:
    taken = [value for value in before if isinstance(decode(DECISIONS, value), SnapshotRecord)]
    return [chance.choice(taken)] if taken else []


def other_content(before: Values, _: int, chance: Random, __: Values) -> list[bytes]:
    """Give the number of an earlier record to another content."""
    record = decode(DECISIONS, chance.choice(before))
    if isinstance(record, OwnerClaimed):
        return []
    stamp = {name: getattr(record, name) for name in ("owner_epoch", "owner_nonce", "seq")}
    held = RequestHeld(request_id="x", pool="p", queue_class="c", uncached_tokens=1, ahead=0, **stamp)
    return [encode(DECISIONS, held)]


def foreign(_: Values, __: int, chance: Random, others: Values) -> list[bytes]:
    """Insert records of another journal, whose owners have equal epochs."""
    first = chance.randrange(len(others))
    return others[first : first + 1 + chance.randrange(4)]


def foreign_next(before: Values, _: int, chance: Random, others: Values) -> list[bytes]:
    """Insert a record of another journal that has the next number of the current owner, and its epoch."""
    stamps = [decode(DECISIONS, value) for value in before]
    epoch = max(at for at, record in enumerate(stamps) if isinstance(record, OwnerClaimed))
    seq = max((record.seq for record in stamps), default=-1) + 1
    record = decode(DECISIONS, chance.choice(others))
    return [encode(DECISIONS, msgspec.structs.replace(record, owner_epoch=epoch, seq=seq))]


def foreign_claim(before: Values, at: int, chance: Random, _: Values) -> list[bytes]:
    """Insert the claim of a router that did not know the current owner."""
    claim = decode(DECISIONS, before[0])
    place = chance.choice([{}, {"seal": at - 1}, {"snapshot": chance.randrange(at)}])
    return [encode(DECISIONS, msgspec.structs.replace(claim, owner_nonce="x", previous_nonce="unknown", **place))]


def higher_epoch(before: Values, at: int, chance: Random, _: Values) -> list[bytes]:
    """Insert a record that names an epoch which is the offset of no claim."""
    record = decode(DECISIONS, chance.choice(before))
    return [encode(DECISIONS, msgspec.structs.replace(record, owner_epoch=at + chance.choice([0, 1, 1 << 40])))]


def undecodable(before: Values, _: int, chance: Random, __: Values) -> list[bytes]:
    return [chance.choice([b"", b"{}", b"null", b"[" * 99, chance.randbytes(9), before[-1][:-1]])]


INSERTIONS: tuple[Insertion, ...] = (
    *(repeated, repeated_run, repeated_claim, repeated_snapshot, other_content),
    *(foreign, foreign_next, foreign_claim, higher_epoch, undecodable),
)


def with_inserted(topics: Topics, insertions: Mapping[int, Callable[[Values], list[bytes]]]) -> Topics:
    """Return a log with records inserted before some offsets of its journal."""
    moved: list[int] = []
    found: Values = []
    for offset, value in enumerate(topics[DECISIONS.name]):
        found += insertions[offset](found) if offset in insertions else []
        moved.append(len(found))
        found.append(encode(DECISIONS, replaced(decode(DECISIONS, value), moved)))
    chunks = [encode(SNAPSHOTS, replaced_chunk(decode(SNAPSHOTS, value), moved)) for value in topics[SNAPSHOTS.name]]
    end = len(topics[DECISIONS.name])
    found += insertions[end](found) if end in insertions else []
    return {**topics, DECISIONS.name: found, SNAPSHOTS.name: chunks}


def replaced(record: JournalRecord, moved: Sequence[int]) -> JournalRecord:
    """Return a record that names other records by their new offsets."""
    changes: dict[str, Any] = {}
    if record.owner_epoch >= 0:
        changes["owner_epoch"] = moved[record.owner_epoch]
    if isinstance(record, SnapshotRecord):  # names the offset right after the seal
        changes["journal_offset"] = moved[record.journal_offset - 1] + 1
    return msgspec.structs.replace(record, **changes)


def replaced_chunk(chunk: SnapshotChunk, moved: Sequence[int]) -> SnapshotChunk:
    """Return a snapshot chunk that names its owner by the new epoch."""
    epoch = moved[chunk.owner_epoch]
    parts = [
        msgspec.structs.replace(part, owner_epoch=epoch) if isinstance(part, WorldState) else part
        for part in chunk.parts
    ]
    return msgspec.structs.replace(chunk, owner_epoch=epoch, parts=tuple(parts))


async def outcome(log: Log) -> tuple[dict[str, Any], int]:
    """Return what the readers of a journal find, without offsets, and the number of records that `verify` skipped."""
    end = await log.end(DECISIONS.name, 0)
    report = await verify(log)
    assert report.divergence is None, report.divergence
    skipped = report.void + report.repeated + report.unverified.get(FOREIGN_RECORDS, 0)
    standby = Standby(log, 0)
    await standby.catch_up(end)
    taken = await newest_snapshot(log, 0, end)
    valid = [record async for _, record in journal(log, 0, 0, end, Validity())]
    position = await seek(States(log, 0))
    window = await slice_of(log, "g", 0, Window()) if report.decisions else None
    named = next((record.request_id for record in valid if isinstance(record, RequestRouted)), "")
    found = {
        "counts": (report.decisions, report.verified, report.records, report.events, report.claims, report.snapshots),
        "unverified": {name: count for name, count in report.unverified.items() if name != FOREIGN_RECORDS},
        "state": report.state,
        "standby": (standby.world.digest(), list(map(unplaced, standby.followed.pending)), standby.world.seq),
        "restored": None if taken is None else (await load_snapshot(log, 0, taken)).owner_nonce,
        "records": list(map(unplaced, valid)),
        "view": await recorded_view(log, 0),
        "last": None if position.step is None else unplaced(position.step.record),
        "extents": window
        and {one.topic: (one.first, one.end) for one in window.extents if one.topic != DECISIONS.name},
        "spans": len(await spans_of(log, 0, EMPTY_STATE, end)),
        "found": named and await numbers(log, named),
    }
    return found, skipped


async def numbers(log: Log, request_id: str) -> list[int]:
    """Return the numbers of the first and the last journal record about a request."""
    found = await find(log, 0, request_id, thorough=True)
    offsets = found.first, found.last
    return [decode(DECISIONS, (await log.read(DECISIONS.name, 0, offset, 1))[0].value).seq for offset in offsets]


def unplaced(record: JournalRecord) -> JournalRecord:
    """Return a journal record without the offsets of other records."""
    changes: dict[str, Any] = {"owner_epoch": -1}
    if isinstance(record, SnapshotRecord):
        changes["journal_offset"] = 0
    return msgspec.structs.replace(record, **changes)


def check(topics: Topics, others: Values, kinds: Sequence[Insertion], chance: Random, begin: int = 1) -> None:
    """Insert records of these kinds into the journal from offset `begin` on, and compare what its readers find."""
    end = len(topics[DECISIONS.name])

    def insertion(kind: Insertion) -> Callable[[Values], list[bytes]]:
        return lambda before: kind([value for value in before if decodes(value)], len(before), chance, others)

    places = [chance.randrange(begin, end + 1) for _ in range(INSERTED)]
    changed = with_inserted(topics, {place: insertion(chance.choice(kinds)) for place in places})
    plain, skipped = read_log(topics, outcome)
    found, skipped_now = read_log(changed, outcome)
    assert found == plain
    assert skipped_now - skipped == len(changed[DECISIONS.name]) - end


def decodes(value: bytes) -> bool:
    try:
        decode(DECISIONS, value)
    except DecodeError:
        return False
    return True


@pytest.mark.parametrize("kind", INSERTIONS, ids=lambda kind: kind.__name__)
@examples(0.25)
@given(history=HISTORIES, seed=st.integers(0, 1 << 32))
def test_invalid_records_change_no_generated_history(
    kind: Insertion, history: list[tuple[str, Any]], seed: int
) -> None:
    check(written(history), written(history, "other")[DECISIONS.name], [kind], Random(seed))


@pytest.mark.parametrize("recording", sampled(RECORDINGS, 5), ids=lambda path: path.stem)
def test_invalid_records_change_no_recording(recording: Path) -> None:
    """The owner's epoch is on other topics, too, so records are inserted after the last claim."""
    topics, others = content(recording), content(RECORDINGS[0] if recording != RECORDINGS[0] else RECORDINGS[1])
    journal_values = topics[DECISIONS.name]
    claims = [at for at, value in enumerate(journal_values) if isinstance(decode(DECISIONS, value), OwnerClaimed)]
    for seed in range(3):
        check(topics, others[DECISIONS.name], INSERTIONS, Random(seed), claims[-1] + 1)


def content(recording: Path) -> Topics:
    """Return the values of all records of a recording that begins at offset 0."""
    with closing(SqliteLog.open(recording, readonly=True)) as log:
        topics = (*INPUTS, DECISIONS, SNAPSHOTS)
        return {topic.name: [one.value for one in log.records(topic.name, 0, 0, 100_000)] for topic in topics}


@examples(0.5)
@given(history=HISTORIES, seed=st.integers(0, 1 << 32))
def test_a_missing_record_is_reported(history: list[tuple[str, Any]], seed: int) -> None:
    """Only the log can have lost it, so no owner continues."""
    topics = written(history)
    values = topics[DECISIONS.name]
    numbered = [at for at, value in enumerate(values[:-1]) if not isinstance(decode(DECISIONS, value), OwnerClaimed)]
    lost = Random(seed).choice(numbered)
    # A record of another type keeps the offsets of the later records.
    changed = {**topics, DECISIONS.name: [*values[:lost], b"lost", *values[lost + 1 :]]}

    async def require_found(log: Log) -> None:
        report = await verify(log)
        assert report.divergence is not None
        assert "the log lost 1 journal records before it" in report.divergence.reason
        with pytest.raises(RecoveryDiverged, match="the log lost 1 journal records before it"):
            await follow_from_start(log)

    read_log(changed, require_found)


async def follow_from_start(log: Log) -> None:
    """Follow a journal from offset 0 with a standby that finds no snapshot before the first record."""
    standby = Standby(log, 0)
    await standby.catch_up(1)
    await standby.catch_up(await log.end(DECISIONS.name, 0))


# Changed records


def remove(values: list[bytes], at: int, _: Random) -> None:
    del values[at]


def repeat(values: list[bytes], at: int, _: Random) -> None:
    values.insert(at, values[at])


def swap(values: list[bytes], at: int, chance: Random) -> None:
    other = chance.randrange(len(values))
    values[at], values[other] = values[other], values[at]


def flip(values: list[bytes], at: int, chance: Random) -> None:
    value = bytearray(values[at])
    value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
    values[at] = bytes(value)


def number(values: list[bytes], at: int, chance: Random) -> None:
    """Change a digit of a clock reading, count, term, hash or seq."""
    places = [place for place, byte in enumerate(values[at]) if chr(byte).isdigit()]
    if places:
        value = bytearray(values[at])
        value[chance.choice(places)] = ord(chance.choice("0123456789"))
        values[at] = bytes(value)


def garbage(values: list[bytes], at: int, chance: Random) -> None:
    values[at] = chance.randbytes(chance.randrange(40))


MUTATIONS: tuple[Callable[[list[bytes], int, Random], None], ...] = (remove, repeat, swap, flip, number, garbage)


@pytest.mark.parametrize("mutation", MUTATIONS)
@examples(0.25)
@given(history=HISTORIES, seed=st.integers(0, 1 << 32))
def test_every_change_of_a_derived_record_is_detected(
    mutation: Callable[[list[bytes], int, Random], None], history: list[tuple[str, Any]], seed: int
) -> None:
    topics, chance = written(history), Random(seed)
    whole = read_log(topics, verify)
    assert (whole.divergence, whole.verified) == (None, whole.decisions)
    # In a generated history, a worker may report on a queued request.
    assert whole.unverified.keys() <= {FOREIGN_PROGRESS}
    for _ in range(4):
        changed: Topics = {topic: list(values) for topic, values in topics.items()}
        topic = chance.choice([name for name in sorted(changed) if changed[name]])
        mutation(changed[topic], chance.randrange(len(changed[topic])), chance)
        try:
            report = read_log(changed, verify)
        except LogError:
            continue
        if report.divergence is None and report.unverified.keys() <= {FOREIGN_PROGRESS}:
            assert topic == SNAPSHOTS.name or journal_follows(changed)
