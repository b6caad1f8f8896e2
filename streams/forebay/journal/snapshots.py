"""Find, read and check the snapshots of a group.

A snapshot is complete if the journal has a `SnapshotRecord` that names it. Its chunks must restore the state that the
owner sealed in the journal right before `journal_offset`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from xxhash import xxh3_128

from forebay import runtime
from forebay.core.restore import digest_of_snapshot, restore
from forebay.core.routing.policies import CustomPolicies
from forebay.core.world import CORE_VERSION, World
from forebay.events.base import hex_digest
from forebay.events.codec import DecodeError, decode
from forebay.events.decisions import Advanced, OwnerClaimed, Sealed, SnapshotRecord
from forebay.events.snapshots import Chunk, SnapshotChunk, WorldState
from forebay.events.topics import DECISIONS, SNAPSHOTS
from forebay.journal.records import (
    JournalBroken,
    OtherRules,
    can_continue,
    decode_journal,
    follows,
    journal_records,
    record_at,
)
from forebay.transport.base import Log, LogError, Record, reversed_records

BEGINNING = 0  # as `OwnerClaimed.snapshot`: the empty state, before the first record
CHUNKS_READ = 8  # snapshot chunks per read, each at most 1 MiB


class MissingChunk(JournalBroken):
    """The journal has the record of a snapshot, but a chunk of this snapshot is missing."""


class OtherState(JournalBroken):
    """The state in the chunks of a snapshot differs from the state that its owner sealed in the journal."""


async def newest_snapshot(log: Log, partition: int, end: int) -> SnapshotRecord | None:
    """Return the last valid `SnapshotTaken` or `Sealed` before offset `end` of the journal."""
    found = await newest_snapshot_at(log, partition, end)
    return None if found is None else found[1]


async def newest_snapshot_at(log: Log, partition: int, end: int) -> tuple[int, SnapshotRecord] | None:
    """Return the record of `newest_snapshot` with its journal offset."""
    async for record in reversed_records(log, DECISIONS, partition, end):
        taken = decode_journal(record)
        if isinstance(taken, SnapshotRecord) and await _is_current(log, partition, taken, record.offset):
            return record.offset, taken
    return None


async def snapshots_taken(log: Log, partition: int, start: int, end: int) -> AsyncIterator[tuple[int, SnapshotRecord]]:
    """Yield the records of snapshots in [start, end) of the journal that no claim after their seal makes stale."""
    async for record in journal_records(log, partition, start, end):
        decision = decode_journal(record)
        if isinstance(decision, SnapshotRecord) and await _is_current(log, partition, decision, record.offset):
            yield record.offset, decision


async def _is_current(log: Log, partition: int, taken: SnapshotRecord, offset: int) -> bool:
    """Return whether the record of a snapshot at `offset` is valid, and the log has its seal and all records after it.

    The journal must contain the seal, so the record of another journal is not valid. Only claims after the seal matter,
    because when the seal was acknowledged, the owner saw no claim before it.
    """
    begin = await log.begin(DECISIONS.name, partition)
    if not begin <= taken.journal_offset <= offset:
        return False
    if not 0 < taken.journal_offset == begin and not await _has_seal(log, partition, taken):
        return False
    async for record in journal_records(log, partition, taken.journal_offset, offset):
        claim = decode_journal(record)
        if (
            isinstance(claim, OwnerClaimed)
            and follows(claim, taken.owner_nonce)
            and can_continue(claim, taken.core_version)
        ):
            return False
    return True


async def _has_seal(log: Log, partition: int, taken: SnapshotRecord) -> bool:
    """Return whether the owner of a snapshot sealed its state right before `journal_offset`."""
    sealed = await record_at(log, partition, taken.journal_offset - 1)
    named = taken.owner_epoch, taken.owner_nonce, taken.digest
    return isinstance(sealed, Advanced) and (sealed.owner_epoch, sealed.owner_nonce, sealed.digest) == named


async def parts_of(log: Log, partition: int, taken: SnapshotRecord) -> AsyncIterator[Chunk]:
    """Yield the parts of a snapshot without checking its digest. Raises LogError if a chunk is missing or damaged."""
    async for _, chunk in _chunks(log, partition, taken):
        for part in chunk.parts:
            yield part


async def state_of(log: Log, partition: int, taken: SnapshotRecord) -> WorldState:
    """Return only the `WorldState` part of a snapshot (clock, view, pools). Raises LogError if the part is missing."""
    async for part in parts_of(log, partition, taken):
        if isinstance(part, WorldState):
            return part
    raise LogError(f"the snapshot at offset {taken.first_offset} is incomplete: it has no WorldState")


async def chunks_end(log: Log, partition: int, taken: SnapshotRecord) -> int:
    """Return the offset after the last chunk of a snapshot. Raises LogError if a chunk is missing."""
    end = taken.first_offset
    async for record, _ in _chunks(log, partition, taken):
        end = record.offset + 1
    return end


async def load_snapshot(
    log: Log, partition: int, taken: SnapshotRecord, custom: CustomPolicies | None = None, *, any_rules: bool = False
) -> World:
    """Return the world that a snapshot holds. A thread builds it, because that takes seconds for a large index.

    With `any_rules`, the owner may have had other decision rules. Then only the checksum of the chunks is checked,
    because the digest of the state depends on the rules. Raises OtherRules, MissingChunk, OtherState, or LogError if
    the snapshot cannot be read.
    """
    is_own = taken.core_version == CORE_VERSION
    parts = await _checked_parts(log, partition, taken) if any_rules else await _parts(log, partition, taken)
    await _require_of_seal(log, partition, taken, parts)

    def restored() -> World:
        with _of_state(taken):
            world = restore(parts, custom or {})
        if is_own:
            _require_sealed(taken, world.digest())
        return world

    return await runtime.offload(restored)


async def load_continued(log: Log, partition: int, claim: OwnerClaimed, custom: CustomPolicies | None = None) -> World:
    """Return the world of the snapshot from which the owner of a claim continued. Raises OtherState or LogError."""
    if claim.snapshot == BEGINNING:
        return World(custom or {})
    offset = max(claim.seal, claim.snapshot)
    taken = await record_at(log, partition, offset)
    if not isinstance(taken, SnapshotRecord):
        raise LogError(f"no snapshot at journal offset {offset}, from which router {claim.owner_id} continued")
    return await load_sealed(log, partition, taken, custom)


async def load_sealed(log: Log, partition: int, taken: SnapshotRecord, custom: CustomPolicies | None = None) -> World:
    """Return the world after a `Sealed` record, or of another snapshot, of an owner with any rules.

    Raises OtherState if the snapshot is damaged, and LogError if it cannot be read.
    """
    world = await load_snapshot(log, partition, taken, custom, any_rules=True)
    if isinstance(taken, Sealed):
        world.stamp()  # counts the record
    return world


async def check_snapshot(log: Log, partition: int, taken: SnapshotRecord) -> None:
    """Check a snapshot, and raise the errors of `load_snapshot`. This is much faster, because no world is built."""
    parts = await _parts(log, partition, taken)
    await _require_of_seal(log, partition, taken, parts)
    with _of_state(taken):
        digest = digest_of_snapshot(parts)
    _require_sealed(taken, digest)


async def check_snapshot_beside(log: Log, partition: int, taken: SnapshotRecord) -> WorldState:
    """Check a snapshot like `check_snapshot`, without blocking the event loop, and return its `WorldState`.

    Chunks are read one at a time, and a thread computes the digest, which takes tenths of a second for a large index.
    """
    parts = await _checked_parts(log, partition, taken, at_once=1)
    await _require_of_seal(log, partition, taken, parts)

    def digest() -> int:
        with _of_state(taken):
            return digest_of_snapshot(parts)

    _require_sealed(taken, await runtime.offload(digest))
    return next(part for part in parts if isinstance(part, WorldState))


async def _parts(log: Log, partition: int, taken: SnapshotRecord) -> list[Chunk]:
    version = taken.core_version
    if version != CORE_VERSION:
        raise OtherRules(taken.journal_offset, version, await release_at(log, partition, taken.owner_epoch))
    return await _checked_parts(log, partition, taken)


async def _checked_parts(log: Log, partition: int, taken: SnapshotRecord, at_once: int = CHUNKS_READ) -> list[Chunk]:
    """Return the parts of a snapshot, whose bytes must have the recorded checksum, if there is one."""
    parts: list[Chunk] = []
    hasher = xxh3_128()
    async for record, chunk in _chunks(log, partition, taken, at_once):
        hasher.update(record.value)
        parts += chunk.parts
        await asyncio.sleep(0)
    if taken.checksum is not None and hasher.hexdigest() != taken.checksum:
        raise OtherState(
            f"the snapshot at offset {taken.first_offset} has checksum {hasher.hexdigest()}, expected {taken.checksum}"
        )
    return parts


async def checksum_of(log: Log, partition: int, taken: SnapshotRecord) -> str:
    """Return the checksum of a snapshot's chunks, as in `Sealed`. Raises LogError if a chunk is missing or damaged."""
    hasher = xxh3_128()
    async for record, _ in _chunks(log, partition, taken):
        hasher.update(record.value)
    return hasher.hexdigest()


@contextmanager
def _of_state(taken: SnapshotRecord) -> Iterator[None]:
    """Translate any error into OtherState, because changed chunks may violate any invariant of the state."""
    try:
        yield
    except Exception as error:
        text = f"the snapshot at offset {taken.first_offset} cannot be restored: {type(error).__name__}: {error}"
        raise OtherState(text) from error


async def _require_of_seal(log: Log, partition: int, taken: SnapshotRecord, parts: list[Chunk]) -> None:
    """Raise OtherState if the snapshot is not the state that its owner sealed right before `journal_offset`.

    The check is skipped if the seal is no longer on the log.
    """
    snapshot = f"the snapshot at offset {taken.first_offset}"
    states = [part for part in parts if isinstance(part, WorldState)]
    owner = taken.owner_epoch, taken.owner_nonce
    if [(state.owner_epoch, state.owner_nonce) for state in states] != [owner]:
        raise OtherState(
            f"{snapshot} is unusable: it has {len(states)} states, expected one of owner epoch {taken.owner_epoch}"
        )
    if taken.journal_offset == await log.begin(DECISIONS.name, partition) > 0:
        return  # a recording that begins at this offset does not hold the seal
    sealed = await record_at(log, partition, taken.journal_offset - 1)
    if not isinstance(sealed, Advanced) or (
        sealed.owner_epoch,
        sealed.owner_nonce,
        sealed.digest,
        sealed.seq + 1,
    ) != (*owner, taken.digest, states[0].seq):
        raise OtherState(
            f"{snapshot} does not match the state sealed right before journal offset {taken.journal_offset}"
        )


def _require_sealed(taken: SnapshotRecord, digest: int) -> None:
    if hex_digest(digest) != taken.digest:
        raise OtherState(
            f"the snapshot at offset {taken.first_offset} has digest {hex_digest(digest)}, expected {taken.digest}"
        )


class OwnerState(NamedTuple):
    """Owner of a group at a journal offset, and sequence number of its first record from there on."""

    owner_epoch: int
    owner_nonce: str
    seq: int


async def owner_state(log: Log, partition: int, taken: SnapshotRecord) -> OwnerState:
    """Return the owner and the sequence number after the seal of a snapshot, from its seal or else from its chunks."""
    sealed = await record_at(log, partition, taken.journal_offset - 1)
    if isinstance(sealed, Advanced):
        return OwnerState(taken.owner_epoch, taken.owner_nonce, sealed.seq + 1)
    return OwnerState(taken.owner_epoch, taken.owner_nonce, (await state_of(log, partition, taken)).seq)


async def claim_at(log: Log, partition: int, owner_epoch: int) -> OwnerClaimed | None:
    """Return the claim with which an owner epoch began, None if the log does not have it. Raises LogError."""
    claimed = await record_at(log, partition, owner_epoch)
    return claimed if isinstance(claimed, OwnerClaimed) else None


async def release_at(log: Log, partition: int, owner_epoch: int) -> str:
    """Return the release of forebay that began an owner epoch, "" if the log does not have it. Raises LogError."""
    claim = await claim_at(log, partition, owner_epoch)
    return "" if claim is None else claim.release


async def _chunks(
    log: Log, partition: int, taken: SnapshotRecord, at_once: int = CHUNKS_READ
) -> AsyncIterator[tuple[Record, SnapshotChunk]]:
    """Yield the chunks of a snapshot with their records, skipping repeated and foreign chunks between them."""
    number, offset = 0, taken.first_offset
    damaged: DecodeError | None = None
    while number < taken.chunks:
        records = await log.read(SNAPSHOTS.name, partition, offset, min(at_once, taken.chunks - number))
        if not records:
            name = f"chunk {number} of the snapshot at offset {taken.first_offset}"
            if damaged is not None:
                raise JournalBroken(f"{name} is damaged or missing: {damaged}") from damaged
            raise MissingChunk(f"{name} is missing")
        for record in records:
            try:
                chunk: SnapshotChunk = decode(SNAPSHOTS, record.value)
            except DecodeError as error:
                damaged = error  # unless it is a foreign record: then the chunk follows
                continue
            if (chunk.owner_epoch, chunk.number, chunk.snapshot_id) == (taken.owner_epoch, number, taken.snapshot_id):
                yield record, chunk
                number, damaged = number + 1, None
        offset = records[-1].offset + 1
