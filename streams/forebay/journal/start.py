"""Find the states from which a journal can be derived, and the position that its owner has reached."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.step import CLOCK
from forebay.core.world import CORE_VERSION, World
from forebay.events.decisions import JournalRecord, OwnerClaimed, SnapshotRecord
from forebay.events.topics import DECISIONS, INPUTS, SNAPSHOTS
from forebay.journal.claims import ValidClaim, valid_claims, validity_at
from forebay.journal.records import OtherRules, Validity, journal, record_at
from forebay.journal.snapshots import (
    BEGINNING,
    load_continued,
    load_snapshot,
    newest_snapshot,
    owner_state,
    release_at,
    snapshots_taken,
    state_of,
)
from forebay.transport.base import Log, LogError


@dataclass(frozen=True, slots=True)
class Start:
    """A state at which a reader can begin: the world right before the journal record at `offset`.

    Attributes:
        unverified: number of records and events skipped before this state, as in `JournalReader.unverified`.
        rules: version of the decision rules of the owner before this state.
        begins_span: whether the record at `offset` is the claim of an owner that continued from this state.
    """

    world: World
    offset: int
    unverified: Mapping[str, int] = field(default_factory=dict)
    rules: int = field(default_factory=lambda: CORE_VERSION)  # when created: the fault simulator changes it
    begins_span: bool = False

    async def validity(self, log: Log, partition: int) -> Validity:
        """Return the filter of the journal records from this state on. Raises LogError."""
        if self.begins_span:
            return Validity(-1, self.rules, nonce=None, seq=self.world.seq)
        return await validity_at(log, partition, self.offset, self.world, self.rules)


class StoredState(NamedTuple):
    """State of a group from which the later decisions in the log can be derived.

    Attributes:
        now_us: clock of the owner, 0 before the first event.
        view: offset up to which the owner had applied each input topic; 0 for topics without an entry.
        owner_nonce: None to read it from the log.
        seq: sequence number of the first record after the state; None if it is unknown.
    """

    offset: int
    now_us: int
    owner_epoch: int
    core_version: int = CORE_VERSION
    view: Mapping[str, int] = {}
    owner_nonce: str | None = None
    seq: int | None = None


EMPTY_STATE = StoredState(0, 0, -1, owner_nonce="", seq=0)


async def begins_of(log: Log, partition: int) -> dict[str, int]:
    """Return the oldest stored offset in `partition` of each topic that a replay reads. Raises LogError."""
    return {topic.name: await log.begin(topic.name, partition) for topic in (*INPUTS, DECISIONS, SNAPSHOTS)}


async def stored_state(log: Log, partition: int, taken: SnapshotRecord) -> StoredState:
    """Return the state of a snapshot. Raises LogError."""
    state = await state_of(log, partition, taken)
    view = {run.topic: run.count for run in state.view}
    owner = state.owner_epoch, taken.core_version
    return StoredState(taken.journal_offset, state.now_us, *owner, view, state.owner_nonce, state.seq)


async def usable_state(
    log: Log, partition: int, taken: SnapshotRecord, begins: Mapping[str, int]
) -> StoredState | None:
    """Return the state of a snapshot, or None if retention removed chunks or records after it. Raises LogError."""
    if taken.journal_offset < begins[DECISIONS.name] or taken.first_offset < begins[SNAPSHOTS.name]:
        return None
    state = await stored_state(log, partition, taken)
    return state if all(state.view.get(topic.name, 0) >= begins[topic.name] for topic in INPUTS) else None


async def oldest_usable(log: Log, partition: int, begins: Mapping[str, int], end: int) -> StoredState | None:
    """Return the state of the oldest usable snapshot before journal offset `end`. Raises LogError."""
    async for _, taken in snapshots_taken(log, partition, begins[DECISIONS.name], end):
        if (state := await usable_state(log, partition, taken, begins)) is not None:
            return state
    return None


async def oldest_state(log: Log, partition: int) -> StoredState:
    """Return the empty state if retention removed nothing, and otherwise the oldest usable snapshot.

    Raises LogError if there is no usable snapshot.
    """
    begins = await begins_of(log, partition)
    if not any(begins.values()):
        return EMPTY_STATE
    state = await oldest_usable(log, partition, begins, await log.end(DECISIONS.name, partition))
    if state is None:
        raise LogError(
            f"control partition {partition} cannot be replayed: retention removed its beginning, and it holds no"
            " snapshot with all records after it"
        )
    return state


async def oldest(log: Log, partition: int, custom: CustomPolicies = ONLY_BUILT_IN, *, any_rules: bool = False) -> Start:
    """Return the oldest usable state: one after which the log still holds all records that a derivation reads.

    With `any_rules`, its owner may have had other decision rules, otherwise this raises OtherRules.
    """
    begins, end = await begins_of(log, partition), await log.end(DECISIONS.name, partition)
    if not any(begins.values()):
        return Start(World(custom), 0)
    async for _, taken in snapshots_taken(log, partition, begins[DECISIONS.name], end):
        start = await _start_of(log, partition, taken, begins, custom, any_rules=any_rules)
        if start is not None:
            return start
    text = f"control partition {partition} cannot be replayed: the log has neither the beginning of the partition nor a"
    text += " snapshot with all events after it"
    raise LogError(text)


async def before(log: Log, partition: int, offset: int, custom: CustomPolicies = ONLY_BUILT_IN) -> Start:
    """Return the newest usable state (see `oldest`) from which the journal record at `offset` can be derived.

    If the owner of that record continued from a snapshot, for example from the seal of an owner with other decision
    rules, the state is that of the snapshot, and `Start.offset` is the offset of the claim.

    Raises OtherRules if the owner of that record had other decision rules, except for a claim after a `Sealed`, because
    a claim alone contains no decision. Raises LogError if the log holds no usable state before that record.
    """
    begins, end = await begins_of(log, partition), await log.end(DECISIONS.name, partition)
    taken = await newest_snapshot(log, partition, min(offset + 1, end))
    continued = await _continued(log, partition, taken, min(offset + 1, end))
    if continued is not None:
        world = await load_continued(log, partition, continued.claim, custom)
        return Start(world, continued.offset, begins_span=True)
    if taken is not None:
        start = await _start_of(log, partition, taken, begins, custom)
        if start is not None:
            return start
    start = await oldest(log, partition, custom)
    if start.offset > offset:
        text = f"journal offset {offset} is before the oldest state that can be restored; give {start.offset} or higher"
        raise LogError(text)
    return start


async def _continued(log: Log, partition: int, taken: SnapshotRecord | None, end: int) -> ValidClaim | None:
    """Return the claim with which the last span before `end` began, or None if `taken` is in the same span.

    Raises OtherRules if the owner of the record right before `end` had other decision rules.
    """
    begin, state, rules = await log.begin(DECISIONS.name, partition), None, -1
    if taken is not None:
        begin, state = taken.journal_offset, await owner_state(log, partition, taken)
        rules = taken.core_version
    found = release = None
    async for valid in valid_claims(log, partition, begin, end, state, rules):
        claim = valid.claim
        is_own = claim.core_version == CORE_VERSION
        if valid.offset == end - 1 and not is_own and valid.rules_before in (-1, CORE_VERSION) and claim.snapshot < 0:
            break
        rules, release = claim.core_version, claim.release
        if valid.begins_span:
            found = valid if is_own else None
    if rules not in (-1, CORE_VERSION):
        if release is None and taken is not None:
            release = await release_at(log, partition, taken.owner_epoch)
        raise OtherRules(end - 1, rules, release or "")
    return found


async def _start_of(
    log: Log,
    partition: int,
    taken: SnapshotRecord,
    begins: dict[str, int],
    custom: CustomPolicies,
    *,
    any_rules: bool = False,
) -> Start | None:
    """Return the state of a snapshot, or None if retention removed events after it."""
    if taken.journal_offset < begins[DECISIONS.name] or taken.first_offset < begins[SNAPSHOTS.name]:
        return None
    world = await load_snapshot(log, partition, taken, custom, any_rules=any_rules)
    if all(world.view.get(topic.name, 0) >= begins[topic.name] for topic in INPUTS):
        return Start(world, taken.journal_offset, rules=taken.core_version)
    return None


async def continued_view(log: Log, partition: int, claim: OwnerClaimed) -> Mapping[str, int]:
    """Return the input offsets at the snapshot from which an operator let the owner continue. Raises LogError."""
    if claim.snapshot == BEGINNING:
        return {}
    taken = await record_at(log, partition, claim.snapshot)
    if isinstance(taken, SnapshotRecord):
        return (await stored_state(log, partition, taken)).view
    raise LogError(f"the journal has no snapshot at offset {claim.snapshot}, which the owner {claim.owner_id} names")


async def recorded_views(
    log: Log, partition: int, start: StoredState, end: int
) -> AsyncIterator[tuple[int, JournalRecord, Counter[str]]]:
    """Yield the valid journal records from `start` to `end`, whatever the rules of their owners, without deriving them.

    The last value has the offset up to which the owner had applied each input topic. Each time that an owner continued
    from a snapshot, it is a new counter. Raises LogError.
    """
    view = Counter(start.view)
    async for offset, record in journal(log, partition, start.offset, end, Validity.after(start, start.core_version)):
        if isinstance(record, OwnerClaimed) and record.snapshot >= 0:
            view = Counter(await continued_view(log, partition, record))
        for run in record.consumed:
            view[run.topic] += run.count
        yield offset, record, view


async def recorded_view(log: Log, partition: int) -> dict[str, int]:
    """Return the offset up to which the owner applied each input topic according to the journal. Raises LogError."""
    end = await log.end(DECISIONS.name, partition)
    taken = await newest_snapshot(log, partition, end)
    start = EMPTY_STATE if taken is None else await stored_state(log, partition, taken)
    view = start.view
    async for _, _, applied in recorded_views(log, partition, start, end):
        view = applied
    return {topic: offset for topic, offset in view.items() if topic != CLOCK}
