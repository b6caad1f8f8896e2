"""Keep a warm replica of a group's state, by deriving each decision of the journal again.

A cold start uses the same code: it is a standby that begins at the newest snapshot and catches up once. If a record
cannot be read or derived, the standby fails with the reason, and a new owner starts cold.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from forebay.core.rederive import Divergence, Rederivation
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies, PolicyMissing
from forebay.core.state.requests import ACTIVE_REQUESTS_MAX
from forebay.core.step import AnyDecision
from forebay.core.step import claim as claim_group
from forebay.core.world import CORE_VERSION, World
from forebay.events.decisions import (
    CommandEnded,
    CommandSent,
    JournalRecord,
    KvReleased,
    OwnerClaimed,
    RequestAborted,
    RequestRejected,
    RouteAnswered,
    Sealed,
    SnapshotTaken,
)
from forebay.events.topics import DECISIONS, SNAPSHOTS
from forebay.journal.records import (
    JournalBroken,
    OtherRules,
    RecordedOrder,
    Validity,
    decode_journal,
    journal_records,
    require_readable,
)
from forebay.journal.snapshots import (
    BEGINNING,
    claim_at,
    load_continued,
    load_sealed,
    load_snapshot,
    newest_snapshot,
    newest_snapshot_at,
    owner_state,
)
from forebay.journal.start import begins_of
from forebay.transport.base import PAGE_RECORDS, Log, LogError, PolicyNotAllowed, Record

logger = logging.getLogger(__name__)


class AbandonedTail(NamedTuple):
    """Part of a journal that a new owner gives up. The new owner decides the counted requests again.

    Attributes:
        snapshot: Journal offset of the record of the snapshot from which the new owner continues. `BEGINNING` if it
            continues from the empty state.
        decisions: Number of decisions among the records, of the types that this version knows.
    """

    partition: int
    snapshot: int
    records: int
    decisions: int
    requests: int

    def text(self) -> str:
        place = f"the snapshot at journal offset {self.snapshot}" if self.snapshot != BEGINNING else "its beginning"
        return (
            f"control partition {self.partition} continues from {place}: the {self.records} journal records after it"
            f" are given up, with {self.decisions} decisions about {self.requests} requests, which are decided again"
        )


async def abandoned_tail(log: Log, partition: int, end: int, custom: CustomPolicies = ONLY_BUILT_IN) -> AbandonedTail:
    """Return what is lost if a journal that ends at `end` is continued from its newest usable snapshot.

    Without one, the journal is continued from its beginning. Raises LogError if the log lacks records of the beginning.
    """
    snapshot, begin = await _newest_usable(log, partition, end, custom)
    records = decisions = 0
    requests: set[str] = set()
    async for record in journal_records(log, partition, begin, end):
        decision = decode_journal(record)
        records += record.offset != snapshot
        if isinstance(decision, AnyDecision):
            decisions += 1
            requests.add(getattr(decision, "request_id", ""))
    return AbandonedTail(partition, snapshot, records, decisions, len(requests - {""}))


async def _newest_usable(log: Log, partition: int, end: int, custom: CustomPolicies) -> tuple[int, int]:
    """Return the offset of the newest snapshot that can be loaded, and the offset after its state."""
    while (found := await newest_snapshot_at(log, partition, end)) is not None:
        end, taken = found
        try:
            await load_sealed(log, partition, taken, custom)
        except JournalBroken as error:
            logger.warning("cannot continue from the snapshot at journal offset %d: %s", end, error)
        else:
            return end, taken.journal_offset
    begins = await begins_of(log, partition)
    if missing := [name for name, begin in begins.items() if begin and name != SNAPSHOTS.name]:
        raise LogError(
            f"control partition {partition} has no snapshot to continue from, and no first records of"
            f" {', '.join(missing)}: use the program that wrote the journal, or start a new namespace"
        )
    return BEGINNING, 0


# Effects follow their journal records within a turn, so only the newest effects can be missing. A turn makes fewer
# decisions of most kinds than this. But one lost worker may abort every request in flight, or release its KV.
UNCONFIRMED_MAX = 1_024
Bulk = RequestAborted | KvReleased
Unconfirmed = Bulk | RequestRejected | RouteAnswered | CommandSent | CommandEnded
REMEMBERED_RECORDS = 8_192  # journal records before a snapshot; reading them takes about a tenth of a second
GATHER_S = 0.25  # pause between passes, because each pass reads every input topic once
BATCH_RECORDS = 64  # records followed before other tasks of the event loop run
PROGRESS_EVERY = 20_000  # journal records between two log lines about the progress
STOPS = (JournalBroken, OtherRules, PolicyNotAllowed)  # a later try fails, too


class RecoveryDiverged(JournalBroken):
    """The recorded events do not lead to the recorded decisions under the decision rules of this version."""

    def __init__(self, divergence: Divergence) -> None:
        super().__init__(
            f"journal record {divergence.offset} cannot be derived again ({divergence.reason}): the log was changed, "
            "or a version with other rules wrote it; run `forebay verify` on it"
        )
        self.divergence = divergence


class JournalObserver(Protocol):
    """Callbacks that a standby makes while it follows the journal. They may read the world, but must not change it."""

    def on_start(self, world: World) -> None:
        """Receive the world in which the standby derives all later records."""

    def on_record(self, offset: int, record: JournalRecord) -> None:
        """Receive the valid journal record at `offset`, after it was derived again with the same result."""


class Standby:
    """Replica of the world of one group, as of journal offset `position`.

    With `waits_for_seal`, the replica does not fail at an owner with other decision rules, and `run` does not fail at a
    record that it cannot derive. The replica then reads the journal without deriving records, until the owner has
    stopped as planned. Then it loads the sealed snapshot.

    With `on_loss`, an owner may continue from the newest snapshot although the records after it cannot be derived.

    `run` and `catch_up` may be cancelled and called again without loss, but only one of them may run at a time.

    Attributes:
        seal: Offset of the `Sealed` record if it is the last valid record that was followed, otherwise -1.
        snapshot: Offset of the record of the snapshot from which an owner must continue, because it gives up later
            records. -1 if it continues from this replica.
        blocked: Why no owner can continue with this replica, because it does not derive the records of the current
            owner. None if one can.
        stopped: Why this replica derives no more records, although the owner has this program's decision rules.
        failed: Why the replica can no longer follow the journal.
        caught_up: Set once `run` has followed the journal up to its end at the start of `run`.
    """

    def __init__(
        self,
        log: Log,
        partition: int,
        observer: JournalObserver | None = None,
        custom: CustomPolicies = ONLY_BUILT_IN,
        *,
        waits_for_seal: bool = False,
        on_loss: Callable[[AbandonedTail], None] | None = None,
    ) -> None:
        self._on_loss = on_loss
        self._waits_for_seal = waits_for_seal
        self._custom = custom
        self._log = log
        self._partition = partition
        self._observer = observer
        self._wake = asyncio.Event()
        self._order: RecordedOrder | None = None
        self.validity = Validity()
        self.position = 0
        self.seal = -1
        self.snapshot = -1
        self._is_foreign = False  # whether the records of the owner are not derived
        self.blocked: str | None = None
        self.stopped: str | None = None
        self._stopped_at = -1
        self._sealed: tuple[int, Sealed] | None = None  # newest `Sealed` that was not derived
        self.failed: str | None = None
        self.caught_up = asyncio.Event()
        self.followed = Rederivation(World(custom))
        self._unconfirmed: deque[Unconfirmed] = deque(maxlen=UNCONFIRMED_MAX)
        self._bulk: deque[Bulk] = deque(maxlen=ACTIVE_REQUESTS_MAX)

    @property
    def released(self) -> bool:
        """Whether the last owner stopped as planned, and no router has claimed the group since."""
        return self.seal >= 0

    async def prepare_claim(self) -> None:
        """Check that an owner can continue with this replica, and call `on_loss` if it must give up records.

        Raises OtherRules, JournalBroken or LogError.
        """
        if not self._is_foreign or self.released:
            return
        if self._on_loss is None:
            if self.stopped is not None:
                raise JournalBroken(self.stopped)
            raise OtherRules(self.position - 1, self.validity.rules, self.validity.release)
        tail = await abandoned_tail(self._log, self._partition, self.position, self._custom)
        self._on_loss(tail)
        self.seal, self.snapshot = -1, tail.snapshot

    @property
    def unconfirmed(self) -> list[Unconfirmed]:
        """Newest decisions whose effects the owner may not have sent. Decisions for one request are in order."""
        return [*self._unconfirmed, *self._bulk]

    @property
    def world(self) -> World:
        return self.followed.world

    async def catch_up(self, end: int) -> None:
        """Follow the journal up to offset `end`. The first call begins at the newest snapshot before `end`.

        Raises RecoveryDiverged, PolicyNotAllowed, OtherRules or LogError.
        """
        if self.failed is not None:
            raise LogError(self.failed)
        try:
            if self._order is None:
                await self._begin(end)
            while self.position < end:
                limit = min(PAGE_RECORDS, end - self.position)
                records = await self._log.read(DECISIONS.name, self._partition, self.position, limit)
                if not records:
                    raise LogError(f"the journal ends at offset {self.position}, expected records up to {end}")
                await self._follow(records, end)
            await self._load_seal()
        except LogError as error:
            self.failed = str(error)
            raise

    def continue_on(self, log: Log) -> None:
        """Continue on another connection to the same log, for example when a reader becomes the writer."""
        assert self._order is not None, "call catch_up first"
        self._log = log
        self._order = RecordedOrder(log, self._partition, self.world.view)

    async def run(self) -> None:
        """Follow the journal until cancelled.

        If a record cannot be derived, set `stopped` and continue as `waits_for_seal` describes. Set `failed` and return
        if that is impossible, or if a new standby can derive the records from a newer snapshot. Raises LogError if the
        log fails. A new standby may then follow the log later.
        """
        while self.failed is None:
            try:
                await self._run()
            except STOPS as error:
                self.failed = str(error)
                logger.error("the standby of partition %d stopped: %s", self._partition, error)  # noqa: TRY400
                if self.stopped is None and self._waits_for_seal:
                    await self._stop(self.failed)
                    self.failed = None
            except LogError as error:
                self.failed = str(error)
                raise

    async def _run(self) -> None:
        end = await self._log.end(DECISIONS.name, self._partition)
        await self.catch_up(end)
        self.caught_up.set()
        tail = self._log.tail(DECISIONS.name, self._partition, self.position, self._wake)
        try:
            while True:
                self._wake.clear()
                while records := tail.take(BATCH_RECORDS):
                    await self._follow(records, end)
                await self._load_seal()
                await self._wake.wait()
                await asyncio.sleep(GATHER_S)
        finally:
            tail.close()

    async def _stop(self, reason: str) -> None:
        """Derive no more records, and only follow which router owns the group."""
        if self._order is None and self.validity.epoch < 0:
            self.position = await self._log.begin(DECISIONS.name, self._partition)
            self.validity = Validity(nonce=None, seq=None) if self.position else Validity()
        self._order = RecordedOrder(self._log, self._partition, {})
        self.stopped, self._stopped_at = reason, self.position
        self._follow_owner(self.world.owner_policies)
        if self._on_loss is None:
            self.blocked = reason

    async def _begin(self, end: int) -> None:
        taken = await newest_snapshot(self._log, self._partition, end)
        if taken is not None:
            rules = taken.core_version
            validity = Validity.after(await owner_state(self._log, self._partition, taken), rules)
            # No await between the changes of `position` and of the world, because other tasks read both.
            if rules == CORE_VERSION or not self._waits_for_seal:
                try:
                    world = await load_snapshot(self._log, self._partition, taken, self._custom)
                except JournalBroken:
                    self.position, self.validity = taken.journal_offset, validity
                    raise
                self.position, self.validity = taken.journal_offset, validity
                self.followed = Rederivation(world)
                await self._remember_unconfirmed()
            else:
                claim = await claim_at(self._log, self._partition, taken.owner_epoch)
                self.position, self.validity = taken.journal_offset, validity
                self._block(claim, rules)
        self.validity.warns = True
        if end - self.position > PROGRESS_EVERY:
            logger.info("following the journal from offset %d to %d", self.position, end)
        if self._observer is not None:
            self._observer.on_start(self.world)
        self._order = RecordedOrder(self._log, self._partition, self.world.view)

    async def _remember_unconfirmed(self) -> None:
        """Read the newest decisions before the snapshot again, because their effects may be missing, too.

        On Kafka the journal has a producer of its own, so a snapshot can be complete before earlier effects are. The
        records are not derived again. One whose owner is uncertain is left out.
        """
        begin = max(await self._log.begin(DECISIONS.name, self._partition), self.position - REMEMBERED_RECORDS)
        # If the claim of this owner is not among these records, it is before them.
        validity = Validity(self.world.owner_epoch, nonce=None, seq=None)
        try:
            async for record in journal_records(self._log, self._partition, begin, self.position):
                if (decision := validity.read(record)) is not None:
                    self._remember(decision)
        except LogError as error:  # the state does not depend on these records
            logger.warning("effects of decisions before the newest snapshot are not sent again: %s", error)

    def _remember(self, decision: JournalRecord) -> None:
        if isinstance(decision, Bulk):
            self._bulk.append(decision)
        elif isinstance(decision, Unconfirmed):
            self._unconfirmed.append(decision)

    async def _follow(self, records: Sequence[Record], end: int) -> None:
        for record in records:
            decision = self.validity.read(record)
            if self.validity.last == record.offset:
                await self._admit(record, decision)
            self.position = record.offset + 1
            if self.position % BATCH_RECORDS == 0:
                await asyncio.sleep(0)
            if self.position % PROGRESS_EVERY == 0 and self.position < end:
                logger.info("followed the journal up to offset %d of %d", self.position, end)

    async def _admit(self, record: Record, decision: JournalRecord | None) -> None:
        """Derive a valid record, or note it if records of this owner are not derived. None if it does not decode."""
        offset = record.offset
        if self._waits_for_seal and self.validity.rules != CORE_VERSION:
            if isinstance(decision, OwnerClaimed):
                self._block(decision, decision.core_version)
            self.seal, self._sealed = -1, (offset, decision) if isinstance(decision, Sealed) else None
            return
        if isinstance(decision, OwnerClaimed) and self._can_continue_from(decision):
            await self._continue_from(decision)
            self.validity.seq = self.world.seq
        elif self.stopped is not None:
            self._note_stopped(offset, decision)
            return
        if not isinstance(decision, OwnerClaimed):
            self.validity.require_own_rules(offset)
        if decision is None:
            require_readable(record)
            return
        assert self._order is not None
        events = await self._order.events_of(decision.consumed)
        # No await between this change and the update of `position`, so that cancelling loses nothing.
        try:
            divergence = self.followed.apply(offset, decision, events)
        except PolicyMissing as missing:
            raise PolicyNotAllowed(str(missing)) from missing
        if divergence is not None:
            raise RecoveryDiverged(divergence)
        self.seal = offset if isinstance(decision, Sealed) else -1
        self._remember(decision)
        if self._observer is not None:
            self._observer.on_record(offset, decision)

    def _can_continue_from(self, claim: OwnerClaimed) -> bool:
        """Return whether the owner of a claim continued from a snapshot, and not from the records before the claim."""
        if claim.snapshot >= 0:
            return True
        return self._is_foreign and (self.stopped is None or claim.seal >= 0)

    def _note_stopped(self, offset: int, decision: JournalRecord | None) -> None:
        """Note a valid record that is not derived. Raises JournalBroken if a new standby can derive the next ones."""
        self.seal, self._sealed = -1, (offset, decision) if isinstance(decision, Sealed) else None
        if isinstance(decision, OwnerClaimed):
            self._follow_owner(decision.policies)
        elif isinstance(decision, SnapshotTaken) and decision.journal_offset > self._stopped_at:
            raise JournalBroken(f"{self.stopped}; a snapshot after these records is at journal offset {offset}")

    def _follow_owner(self, policies: tuple[str, ...]) -> None:
        """Replace the world by one that only has the owner, because its records are not derived."""
        self._is_foreign = True
        world = World(self._custom)
        claim_group(world, self.validity.epoch, policies)
        self.followed = Rederivation(world)  # frees the state

    def _block(self, claim: OwnerClaimed | None, rules: int) -> None:
        """Derive no more records, because the owner of the group has other decision rules."""
        self.stopped = None
        self._follow_owner(() if claim is None else claim.policies)
        if self._on_loss is not None:
            return
        self.blocked = (
            f"the owner {claim.owner_id if claim is not None else 'of this group'} runs version {rules} of the rules,"
            f" this program has version {CORE_VERSION}: it takes over at the next planned stop of the owner"
        )

    async def _load_seal(self) -> None:
        """Load the snapshot of an owner whose records were not derived, if the journal ends with its `Sealed`."""
        if self._sealed is None:
            return
        offset, sealed = self._sealed
        self._replace_world(await load_sealed(self._log, self._partition, sealed, self._custom))
        self._sealed, self.seal, self.snapshot, self.blocked, self.stopped = None, offset, -1, None, None

    async def _continue_from(self, claim: OwnerClaimed) -> None:
        """Load the snapshot from which the owner of a claim continued, unless this replica has loaded it."""
        if claim.snapshot >= 0 or claim.seal < 0 or claim.seal != self.seal:
            self._replace_world(await load_continued(self._log, self._partition, claim, self._custom))
        self._is_foreign, self.blocked, self.stopped, self._sealed, self.snapshot = False, None, None, None, -1

    def _replace_world(self, world: World) -> None:
        self.followed = Rederivation(world)
        self._order = RecordedOrder(self._log, self._partition, world.view)
        self._unconfirmed.clear()  # an owner seals after its effects are durable
        self._bulk.clear()
