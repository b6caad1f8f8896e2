"""Keep a warm replica of a group's state, by deriving each decision of the journal again.

A cold start uses the same code: it is a standby that begins at the newest snapshot and catches up once. If a record
cannot be read or derived, the standby fails with the reason, and a new owner starts cold.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from forebay.core.rederive import Divergence, Rederivation
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.state.requests import ACTIVE_REQUESTS_MAX
from forebay.core.step import AnyDecision
from forebay.core.step import claim as claim_group
from forebay.core.world import CORE_VERSION, World
from forebay.events.decisions import (
    CommandEnded,
    CommandSent,
    JournalRecord,
    KvReleased,
    RequestAborted,
    RequestRejected,
    RequestRepeated,
    RouteAnswered,
)
from forebay.events.topics import DECISIONS, SNAPSHOTS
from forebay.journal.reader import JournalReader, Kind, Past, Reading
from forebay.journal.records import JournalBroken, OtherRules, RecordedOrder, Validity, decode_journal, journal_records
from forebay.journal.snapshots import (
    BEGINNING,
    claim_at,
    load_sealed,
    load_snapshot,
    newest_snapshot,
    newest_snapshot_at,
    owner_state,
)
from forebay.journal.start import Start, begins_of
from forebay.transport.base import Log, LogError, PolicyNotAllowed, Record

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
Unconfirmed = Bulk | RequestRejected | RequestRepeated | RouteAnswered | CommandSent | CommandEnded
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
        """Receive the world in which the standby derives the next records."""

    def on_record(self, offset: int, record: JournalRecord) -> None:
        """Receive the valid journal record at `offset`, after it was derived again with the same result."""


class Standby(JournalReader):
    """Replica of the world of one group, as of journal offset `position`.

    With `waits_for_seal`, the replica does not fail at an owner with other decision rules, and `run` does not fail at a
    record that it cannot derive. The replica then reads the journal without deriving records, until the owner has
    stopped as planned. Then it loads the sealed snapshot. While it derives nothing, its world has only the owner.

    With `on_loss`, an owner may continue from the newest snapshot although the records after it cannot be derived.

    `run` and `catch_up` may be cancelled and called again without loss, but only one of them may run at a time.

    Attributes:
        snapshot: Offset of the record of the snapshot from which an owner must continue, because it gives up later
            records. -1 if it continues from this replica. Set by `prepare_claim`.
        failed: Why the replica can no longer follow the journal.
        owner_seen_us: Newest wall time at which the owner ran, as far as others than its journal show it.
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
        past = Past.OTHER_RULES if waits_for_seal else Past.ABANDONED_HISTORY
        super().__init__(log, partition, Start(World(custom), 0), past=past)
        self.on_restored = self._note_restored
        self._on_loss = on_loss
        self._waits_for_seal = waits_for_seal
        self._custom = custom
        self._observer = observer
        self._wake = asyncio.Event()
        self._has_begun = False
        self.snapshot = -1
        self.failed: str | None = None
        self.owner_seen_us = 0
        self.caught_up = asyncio.Event()
        self._unconfirmed: deque[Unconfirmed] = deque(maxlen=UNCONFIRMED_MAX)
        self._bulk: deque[Bulk] = deque(maxlen=ACTIVE_REQUESTS_MAX)

    @property
    def seal(self) -> int:
        """Offset of the `Sealed` record if it is the last valid record that is part of the state, otherwise -1."""
        is_derived = self.state is Reading.DERIVING and self.validity.seal < self.position
        return self.validity.seal if is_derived else -1

    @property
    def released(self) -> bool:
        """Whether the last owner stopped as planned, and no router has claimed the group since."""
        return self.seal >= 0

    @property
    def blocked(self) -> str | None:
        """Why no owner can continue with this replica, because it skips the records of the owner. None if one can."""
        if self.state is Reading.DERIVING or self._on_loss is not None:
            return None
        if self.stopped is not None:
            return self.stopped
        return (
            f"the owner {self.claim.owner_id if self.claim is not None else 'of this group'} runs version"
            f" {self.validity.rules} of the rules, this program has version {CORE_VERSION}: it takes over at the next"
            " planned stop of the owner"
        )

    async def prepare_claim(self) -> None:
        """Check that an owner can continue with this replica, and call `on_loss` if it must give up records.

        Raises OtherRules, JournalBroken or LogError.
        """
        self.snapshot = -1
        if self.state is Reading.DERIVING:
            return
        if self._on_loss is None:
            if self.stopped is not None:
                raise JournalBroken(self.stopped)
            raise OtherRules(self.position - 1, self.validity.rules, self.validity.release)
        tail = await abandoned_tail(self._log, self._partition, self.position, self._custom)
        self._on_loss(tail)
        self.snapshot = tail.snapshot

    @property
    def unconfirmed(self) -> list[Unconfirmed]:
        """Newest decisions whose effects the owner may not have sent. Decisions for one request are in order."""
        return [*self._unconfirmed, *self._bulk]

    async def catch_up(self, end: int) -> None:
        """Follow the journal up to offset `end`. The first call begins at the newest snapshot before `end`.

        Raises RecoveryDiverged, PolicyNotAllowed, OtherRules or LogError.
        """
        if self.failed is not None:
            raise LogError(self.failed)
        try:
            if not self._has_begun:
                await self._begin(end)
            async for record in journal_records(self._log, self._partition, self.position, end):
                await self._follow(record, end)
            if self.position < end:
                raise LogError(f"the journal ends at offset {self.position}, expected records up to {end}")
            await self.load_seal()
        except LogError as error:
            self.failed = str(error)
            raise

    def continue_on(self, log: Log) -> None:
        """Continue on another connection to the same log, for example when a reader becomes the writer."""
        assert self._has_begun, "call catch_up first"
        self._log = log
        self.order = RecordedOrder(log, self._partition, self.world.view)

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
                    for record in records:
                        await self._follow(record, end)
                await self.load_seal()
                await self._wake.wait()
                await asyncio.sleep(GATHER_S)
        finally:
            tail.close()

    async def _stop(self, reason: str) -> None:
        """Derive no more records, and only follow which router owns the group."""
        if not self._has_begun and self.validity.epoch < 0:
            self.position = await self._log.begin(DECISIONS.name, self._partition)
            self.validity = Validity(nonce=None, seq=None) if self.position else Validity()
        self._has_begun = True
        self.stop(reason)
        self._forget_world()

    async def _begin(self, end: int) -> None:
        taken = await newest_snapshot(self._log, self._partition, end)
        if taken is not None:
            validity = Validity.after(await owner_state(self._log, self._partition, taken), taken.core_version)
            # No await between the changes of `position` and of the world, because other tasks read both.
            if taken.core_version == CORE_VERSION or not self._waits_for_seal:
                try:
                    world = await load_snapshot(self._log, self._partition, taken, self._custom)
                except JournalBroken:
                    self.position, self.validity = taken.journal_offset, validity
                    raise
                self.begin_at(Start(world, taken.journal_offset), validity)
                await self._remember_unconfirmed()
            else:
                self.claim = await claim_at(self._log, self._partition, taken.owner_epoch)
                self.begin_at(Start(World(self._custom), taken.journal_offset), validity)
                self.state = Reading.FOREIGN
                self._forget_world()
        self.validity.warns = True
        if end - self.position > PROGRESS_EVERY:
            logger.info("following the journal from offset %d to %d", self.position, end)
        if self._observer is not None:
            self._observer.on_start(self.world)
        self._has_begun = True

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

    async def _follow(self, record: Record, end: int) -> None:
        step = await self.read(record)
        if self._waits_for_seal and self.state is not Reading.DERIVING:
            if step is not None or self.world.owner_epoch != self.validity.epoch:
                self._forget_world()
        elif step is not None:
            if step.divergence is not None:
                raise RecoveryDiverged(step.divergence)
            self._remember(step.record)
            if self._observer is not None:
                self._observer.on_record(step.offset, step.record)
        if self.position % BATCH_RECORDS == 0:
            await asyncio.sleep(0)
        if self.position % PROGRESS_EVERY == 0 and self.position < end:
            logger.info("followed the journal up to offset %d of %d", self.position, end)

    def _kind(self, offset: int, record: JournalRecord | None) -> Kind:
        kind = super()._kind(offset, record)
        is_useless = self._waits_for_seal and kind is Kind.FOREIGN_CLAIM_AT_SNAPSHOT  # its snapshot may be lost
        return Kind.FOREIGN_RECORD if is_useless else kind

    def _forget_world(self) -> None:
        """Replace the world by one that only has the owner, because its records are not derived."""
        policies = self.world.owner_policies if self.claim is None else self.claim.policies
        world = World(self._custom)
        claim_group(world, self.validity.epoch, policies)
        self.followed = Rederivation(world)  # frees the state

    async def _note_restored(self, _: int) -> None:
        self._unconfirmed.clear()  # an owner seals after its effects are durable
        self._bulk.clear()
        if self._observer is not None:
            self._observer.on_start(self.world)
