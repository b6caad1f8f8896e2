"""Find the events that may have caused a divergence: events of the type that determines the differing cost terms.

Only events after the last matching digest are examined, and at most the newest `SCANNED_MAX` per topic.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import msgspec

from forebay.core.step import InputEvent
from forebay.events.base import U64_BYTES, array_u64
from forebay.events.decisions import Advanced, CostTerms, JournalRecord
from forebay.events.kv import BlocksRemoved, BlocksStored, KvEvent, StoreKvEvent
from forebay.events.progress import ProgressEvent
from forebay.events.topics import CONTROL, FLEET, KV_EVENTS, PROGRESS, Topic
from forebay.replay.verify.cost_tables import CostTableRow, CostTables
from forebay.transport.base import Log
from forebay.transport.history.reader import decode_or_none, records_of
from forebay.transport.readable import HEX_FIELDS

LIKELY_SHOWN, SHOWN = 15, 20  # events about the prompt's blocks, and all events
SCANNED_MAX = 100_000  # records per topic; a digest is journaled at least every thousand decisions
OVERLAP_TERMS = frozenset({"device_overlap", "host_overlap", "disk_overlap", "store_overlap"})
LOAD_TERMS = frozenset({"prefill_blocks", "decode_blocks", "active_requests"})
OMITTED = frozenset({"at_us", "token_ids", "nonce", "reply_slot", "reply_from"})  # fields that change no decision


class EventSummary(msgspec.Struct, kw_only=True):
    """One input event in a report. `type` is its wire tag, or `undecodable`; `offset` is None for a clock tick."""

    topic: str
    offset: int | None
    type: str
    text: str
    now_us: int | None = None


class Suspicion(msgspec.Struct, kw_only=True):
    """Events that may be the cause of a divergence.

    `others` are the newest suspected events that are not about blocks of the prompt, or whose block hashes were
    changed.
    """

    why: str
    likely: list[EventSummary]
    others: list[EventSummary]
    more: int


class _Wanted(NamedTuple):
    why: str
    topics: tuple[Topic, ...]
    admits: Callable[[InputEvent | None], bool]


async def suspicion_of(
    log: Log,
    partition: int,
    records: tuple[JournalRecord, JournalRecord | None],
    table: CostTables | None,
    blocks: frozenset[int],
    since: Mapping[str, tuple[int, int]],
) -> Suspicion | None:
    """Return the events that may be the cause of a divergence; None if any event may be the cause.

    `table` is None if no routing decision was derived. `since` has the offset range to examine, by topic.
    """
    wanted = _wanted(records, table, blocks)
    if wanted is None:
        return None
    likely: deque[EventSummary] = deque(maxlen=LIKELY_SHOWN)
    others: deque[EventSummary] = deque(maxlen=SHOWN)
    count = 0
    for topic in wanted.topics:
        first, end = since.get(topic.name, (0, 0))
        async for record in records_of(log, topic, partition, max(first, end - SCANNED_MAX), end):
            event = decode_or_none(topic, record.value)
            if wanted.admits(event):
                count += 1
                of_prompt = _of_prompt(event, blocks)
                summary = summarize(topic.name, record.offset, event)
                summary.text += f"; {of_prompt} of this prompt" if of_prompt else ""
                (likely if of_prompt else others).append(summary)
    shown = list(others)[-(SHOWN - len(likely)) :]
    return Suspicion(why=wanted.why, likely=list(likely), others=shown, more=count - len(likely) - len(shown))


def summarize(topic: str, offset: int, event: InputEvent | None, now_us: int | None = None) -> EventSummary:
    if event is None:
        tag, text = "undecodable", "a record that did not decode and had no effect"
    else:
        tag, text = str(type(event).__struct_config__.tag), ", ".join(_changed_fields(event))
    if isinstance(event, ProgressEvent):
        text = f"{event.request_id}, attempt {event.attempt}: {event.SUMMARY.format(event)} at {event.worker_id}"
    return EventSummary(topic=topic, offset=offset, type=tag, text=text, now_us=now_us)


def _changed_fields(struct: msgspec.Struct) -> Iterator[str]:
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value != default and field.name not in OMITTED:
            is_hash = field.name in HEX_FIELDS and isinstance(value, int)
            yield f"{field.name} {f'{value:016x}' if is_hash else _value(value)}"


def _value(value: object) -> str:
    match value:
        case bytes():
            count, rest = divmod(len(value), U64_BYTES)
            return f"{len(value)} bytes" if rest else f"of {count} block{'' if count == 1 else 's'}"
        case msgspec.Struct():
            return f"({', '.join(_changed_fields(value))})"
        case tuple():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            return str(value)


def _wanted(
    records: tuple[JournalRecord, JournalRecord | None], table: CostTables | None, blocks: frozenset[int]
) -> _Wanted | None:
    recorded, derived = records
    if isinstance(recorded, Advanced) or isinstance(derived, Advanced):
        return None
    if table is None or not table.comparable:
        return _Wanted("different decision type or request", (CONTROL, FLEET), _any)
    differing = [row for row in table.rows if row.differs]
    overlaps = [row for row in differing if OVERLAP_TERMS.intersection(row.differs)]
    loads = [row for row in differing if LOAD_TERMS.intersection(row.differs)]
    if overlaps:
        names = ", ".join(_overlap_text(row) for row in overlaps)
        ranks = {(row.worker_id, row.rank) for row in overlaps}
        is_suspect = partial(_may_change_overlap, ranks)
        return _Wanted(f"overlap: {names}", (KV_EVENTS,), is_suspect)
    if loads:
        workers = {row.worker_id for row in loads}
        why = f"load of {', '.join(sorted(workers))}"
        return _Wanted(why, (PROGRESS, FLEET), lambda event: getattr(event, "worker_id", None) in workers)
    if differing:
        return _Wanted("weights", (CONTROL,), _any)
    if table.recorded_candidates != sum(row.derived is not None for row in table.rows):
        return _Wanted("eligible worker ranks", (FLEET, CONTROL), _any)
    if table.digest != table.recorded_digest:
        why = "terms of a candidate that the journal holds only as a digest"
        return _Wanted(why, (KV_EVENTS,), lambda event: bool(_of_prompt(event, blocks)))
    return None


def _any(_: InputEvent | None) -> bool:
    return True


def _overlap_text(row: CostTableRow) -> str:
    assert row.derived is not None, "only rows with both terms differ"
    assert row.recorded is not None, "only rows with both terms differ"
    derived, recorded = map(_tiers_text, (row.derived, row.recorded))
    tiers = "device+host+disk" + ("+store" if row.derived.store_overlap or row.recorded.store_overlap else "")
    return f"{row.worker_id}/{row.rank} has {derived} blocks ({tiers}) as derived, {recorded} as recorded"


def _tiers_text(terms: CostTerms) -> str:
    store = f"+{terms.store_overlap}" if terms.store_overlap else ""
    return f"{terms.device_overlap}+{terms.host_overlap}+{terms.disk_overlap}{store}"


def _may_change_overlap(ranks: set[tuple[str, int]], event: InputEvent | None) -> bool:
    """Return whether an event changes the cache of one of the ranks, or a shared store."""
    return isinstance(event, StoreKvEvent) or (isinstance(event, KvEvent) and (event.worker_id, event.rank) in ranks)


def _of_prompt(event: InputEvent | None, blocks: frozenset[int]) -> int:
    if not isinstance(event, BlocksStored | BlocksRemoved | StoreKvEvent):
        return 0
    return len(blocks.intersection(array_u64(event.sequence_hashes)))
