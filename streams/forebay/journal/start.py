"""Find the oldest state from which a log can be replayed, and the position that its owner has reached."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from forebay.core.step import CLOCK
from forebay.core.world import CORE_VERSION
from forebay.events.decisions import OwnerClaimed, SnapshotRecord
from forebay.events.topics import DECISIONS, INPUTS, SNAPSHOTS
from forebay.journal.records import Validity, journal, record_at
from forebay.journal.snapshots import BEGINNING, newest_snapshot, snapshots_taken, state_of
from forebay.transport.base import Log, LogError


class StoredState(NamedTuple):
    """State of a group from which the later decisions in the log can be derived.

    `view` is the offset up to which the owner had applied each input topic, 0 for topics without an entry. `now_us` is
    the clock of that owner, 0 before the first event.
    """

    offset: int
    view: Mapping[str, int]
    owner_epoch: int
    core_version: int
    now_us: int = 0
    owner_nonce: str = ""
    seq: int = 0


EMPTY_STATE = StoredState(0, {}, -1, CORE_VERSION)


async def begins_of(log: Log, partition: int) -> dict[str, int]:
    """Return the oldest stored offset in `partition` of each topic that a replay reads. Raises LogError."""
    return {topic.name: await log.begin(topic.name, partition) for topic in (*INPUTS, DECISIONS, SNAPSHOTS)}


async def usable_state(
    log: Log, partition: int, taken: SnapshotRecord, begins: Mapping[str, int]
) -> StoredState | None:
    """Return the state of a snapshot, or None if retention removed chunks or records after it. Raises LogError."""
    if taken.journal_offset < begins[DECISIONS.name] or taken.first_offset < begins[SNAPSHOTS.name]:
        return None
    state = await state_of(log, partition, taken)
    view = {run.topic: run.count for run in state.view}
    if any(view.get(topic.name, 0) < begins[topic.name] for topic in INPUTS):
        return None
    owner = state.owner_epoch, taken.core_version, state.now_us, state.owner_nonce
    return StoredState(taken.journal_offset, view, *owner, state.seq)


async def oldest_state(log: Log, partition: int) -> StoredState:
    """Return the empty state if retention removed nothing, and otherwise the oldest usable snapshot.

    Raises LogError if there is no usable snapshot.
    """
    begins = await begins_of(log, partition)
    if not any(begins.values()):
        return EMPTY_STATE
    end = await log.end(DECISIONS.name, partition)
    async for _, taken in snapshots_taken(log, partition, begins[DECISIONS.name], end):
        state = await usable_state(log, partition, taken, begins)
        if state is not None:
            return state
    raise LogError(
        f"control partition {partition} cannot be replayed: retention removed its beginning, and it holds no snapshot"
        " with all records after it"
    )


async def continued_view(log: Log, partition: int, claim: OwnerClaimed) -> dict[str, int]:
    """Return the input offsets at the snapshot from which an operator let the owner continue. Raises LogError."""
    if claim.snapshot == BEGINNING:
        return {}
    taken = await record_at(log, partition, claim.snapshot)
    if isinstance(taken, SnapshotRecord):
        return {run.topic: run.count for run in (await state_of(log, partition, taken)).view}
    raise LogError(f"the journal has no snapshot at offset {claim.snapshot}, which the owner {claim.owner_id} names")


async def recorded_view(log: Log, partition: int) -> dict[str, int]:
    """Return the offset up to which the owner applied each input topic according to the journal. Raises LogError."""
    end = await log.end(DECISIONS.name, partition)
    taken = await newest_snapshot(log, partition, end)
    start, validity = 0, Validity()
    view: Counter[str] = Counter()
    if taken is not None:
        state = await state_of(log, partition, taken)
        view.update({run.topic: run.count for run in state.view})
        start, validity = taken.journal_offset, Validity.after(state, taken.core_version)
    async for _, record in journal(log, partition, start, end, validity):
        if isinstance(record, OwnerClaimed) and record.snapshot >= 0:
            view = Counter(await continued_view(log, partition, record))
        for run in record.consumed:
            view[run.topic] += run.count
    del view[CLOCK]
    return dict(view)
