"""Keep a warm replica of a group's state, by deriving each decision of the journal again.

A cold start uses the same code: it is a standby that begins at the newest snapshot and catches up once. If a record
cannot be read or derived, the standby fails with the reason, and a new owner starts cold.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from forebay.core.rederive import Divergence, Rederivation
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies, PolicyMissing
from forebay.core.state.requests import ACTIVE_REQUESTS_MAX
from forebay.core.world import World
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
)
from forebay.events.topics import DECISIONS
from forebay.transport.base import Log, LogError, PolicyNotAllowed, Record
from forebay.transport.history.reader import (
    PAGE_RECORDS,
    OtherRules,
    RecordedOrder,
    Validity,
    decode_journal,
    journal_records,
)
from forebay.transport.history.snapshots import load_snapshot, newest_snapshot

logger = logging.getLogger(__name__)

# Effects follow their journal records within a turn, so only the newest effects can be missing. A turn makes fewer
# decisions of most kinds than this. But one lost worker may abort every request in flight, or release its KV.
UNCONFIRMED_MAX = 1_024
Bulk = RequestAborted | KvReleased
Unconfirmed = Bulk | RequestRejected | RouteAnswered | CommandSent | CommandEnded
REMEMBERED_RECORDS = 8_192  # journal records before a snapshot; reading them takes about a tenth of a second
GATHER_S = 0.25  # pause between passes, because each pass reads every input topic once
BATCH_RECORDS = 64  # records followed before other tasks of the event loop run
PROGRESS_EVERY = 20_000  # journal records between two log lines about the progress


class RecoveryDiverged(LogError):
    """The recorded events do not lead to the recorded decisions under the decision rules of this version."""

    def __init__(self, divergence: Divergence) -> None:
        super().__init__(
            f"journal record {divergence.offset} cannot be derived again ({divergence.reason}): the log was changed, "
            "or a version with other rules wrote it; run `forebay replay verify` on it"
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

    `run` and `catch_up` may be cancelled and called again without loss, but only one of them may run at a time.

    Attributes:
        position: Journal offset up to which the replica has followed.
        seal: Offset of the `Sealed` record if it is the last valid record that was followed, otherwise -1.
        failed: Reason why the replica can no longer follow the journal. None while it can.
        caught_up: Set once `run` has followed the journal up to its end at the start of `run`.
        followed: The world, and the decisions that were derived from events but have no journal record yet.
    """

    def __init__(
        self,
        log: Log,
        partition: int,
        observer: JournalObserver | None = None,
        custom: CustomPolicies = ONLY_BUILT_IN,
    ) -> None:
        self._custom = custom
        self._log = log
        self._partition = partition
        self._observer = observer
        self._wake = asyncio.Event()
        self._order: RecordedOrder | None = None
        self._validity = Validity(-1)
        self.position = 0
        self.seal = -1
        self.failed: str | None = None
        self.caught_up = asyncio.Event()
        self.followed = Rederivation(World(custom))
        self._unconfirmed: deque[Unconfirmed] = deque(maxlen=UNCONFIRMED_MAX)
        self._bulk: deque[Bulk] = deque(maxlen=ACTIVE_REQUESTS_MAX)

    @property
    def released(self) -> bool:
        """Whether the last owner stopped as planned, and no router has claimed the group since."""
        return self.seal >= 0

    @property
    def unconfirmed(self) -> list[Unconfirmed]:
        """Newest decisions whose effects the owner may not have sent. Decisions for one request are in order."""
        return [*self._unconfirmed, *self._bulk]

    @property
    def world(self) -> World:
        """State of the group at journal offset `position`."""
        return self.followed.world

    async def catch_up(self, end: int) -> None:
        """Follow the journal up to offset `end`. The first call begins at the newest snapshot before `end`.

        Raises:
            RecoveryDiverged: The recorded events lead to other decisions in this version.
            PolicyNotAllowed: A recorded decision was made by a custom policy that this process may not run.
            OtherRules: A program with other decision rules wrote the journal.
            LogError: A required part of the log is missing or damaged.
        """
        if self.failed is not None:
            raise LogError(self.failed)
        try:
            order = self._order or await self._begin(end)
            while self.position < end:
                limit = min(PAGE_RECORDS, end - self.position)
                records = await self._log.read(DECISIONS.name, self._partition, self.position, limit)
                if not records:
                    raise LogError(f"the journal ends at offset {self.position}, expected records up to {end}")
                await self._follow(records, order, end)
        except LogError as error:
            self.failed = str(error)
            raise

    def continue_on(self, log: Log) -> None:
        """Continue to follow on another connection to the same log, for example when a reader becomes the writer."""
        assert self._order is not None, "call catch_up first"
        self._log = log
        self._order = RecordedOrder(log, self._partition, self.world.view)

    async def run(self) -> None:
        """Follow the journal until cancelled. If a record cannot be derived again, set `failed` and return.

        Raises LogError if the log fails. A new standby may then follow the log later.
        """
        try:
            end = await self._log.end(DECISIONS.name, self._partition)
            await self.catch_up(end)
            assert self._order is not None
            self.caught_up.set()
            tail = self._log.tail(DECISIONS.name, self._partition, self.position, self._wake)
            try:
                while True:
                    self._wake.clear()
                    while records := tail.take(BATCH_RECORDS):
                        await self._follow(records, self._order, end)
                    await self._wake.wait()
                    await asyncio.sleep(GATHER_S)
            finally:
                tail.close()
        except (RecoveryDiverged, OtherRules, PolicyNotAllowed) as error:
            self.failed = str(error)
            logger.error("the standby of partition %d stopped: %s", self._partition, error)  # noqa: TRY400
        except LogError as error:
            self.failed = str(error)
            raise

    async def _begin(self, end: int) -> RecordedOrder:
        taken = await newest_snapshot(self._log, self._partition, end)
        if taken is not None:
            world = await load_snapshot(self._log, self._partition, taken, self._custom)
            self.followed = Rederivation(world)
            self.position = taken.journal_offset
            self._validity = Validity(world.owner_epoch)
            await self._remember_unconfirmed()
        if end - self.position > PROGRESS_EVERY:
            logger.info("following the journal from offset %d to %d", self.position, end)
        if self._observer is not None:
            self._observer.on_start(self.world)
        self._order = RecordedOrder(self._log, self._partition, self.world.view)
        return self._order

    async def _remember_unconfirmed(self) -> None:
        """Read the newest decisions before the snapshot again, because their effects may be missing, too.

        On Kafka the journal has a producer of its own, so a snapshot can be complete before earlier effects are. The
        records are not derived again. One whose owner is uncertain is left out.
        """
        begin = max(await self._log.begin(DECISIONS.name, self._partition), self.position - REMEMBERED_RECORDS)
        epoch = self.world.owner_epoch  # if the claim of this owner is not among these records, it is before them
        try:
            async for record in journal_records(self._log, self._partition, begin, self.position):
                decision = decode_journal(record)
                if isinstance(decision, OwnerClaimed):
                    epoch = record.offset
                elif decision is not None and decision.owner_epoch == epoch:
                    self._remember(decision)
        except LogError as error:  # the state does not depend on these records
            logger.warning("effects of decisions before the newest snapshot are not sent again: %s", error)

    def _remember(self, decision: JournalRecord) -> None:
        if isinstance(decision, Bulk):
            self._bulk.append(decision)
        elif isinstance(decision, Unconfirmed):
            self._unconfirmed.append(decision)

    async def _follow(self, records: Sequence[Record], order: RecordedOrder, end: int) -> None:
        for record in records:
            decision = decode_journal(record)
            if self._validity.admits(decision, record.offset):
                self._validity.require_own_rules(decision, record.offset)
                events = await order.events_of(decision.consumed)
                # No await between this change and the update of `position`, so that cancelling loses nothing.
                try:
                    divergence = self.followed.apply(record.offset, decision, events)
                except PolicyMissing as missing:
                    raise PolicyNotAllowed(str(missing)) from missing
                if divergence is not None:
                    raise RecoveryDiverged(divergence)
                self.seal = record.offset if isinstance(decision, Sealed) else -1
                self._remember(decision)
                if self._observer is not None:
                    self._observer.on_record(record.offset, decision)
            self.position = record.offset + 1
            if self.position % BATCH_RECORDS == 0:
                await asyncio.sleep(0)
            if self.position % PROGRESS_EVERY == 0 and self.position < end:
                logger.info("followed the journal up to offset %d of %d", self.position, end)
