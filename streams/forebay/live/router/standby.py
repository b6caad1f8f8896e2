"""A warm replica of a group's world: follows the journal by deriving its decisions again, and holds the state.

A cold start is a standby that begins at the newest snapshot and catches up once, so there is one way to read
a journal. What cannot be read or derived ends the standby: it says so, and a new owner starts cold.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from forebay.core.rederive import Divergence, Rederivation
from forebay.core.state.requests import ACTIVE_REQUESTS_MAX
from forebay.core.world import World
from forebay.events.decisions import (
    CommandEnded,
    CommandSent,
    JournalRecord,
    KvReleased,
    RequestAborted,
    RequestRejected,
    RouteAnswered,
)
from forebay.events.topics import DECISIONS
from forebay.transport.base import Log, LogError, Record
from forebay.transport.history.reader import (
    PAGE_RECORDS,
    OtherRules,
    RecordedOrder,
    Validity,
    decode_journal,
    load_snapshot,
    newest_snapshot,
)

logger = logging.getLogger(__name__)

# Effects follow their journal records within a turn, so only the newest can be missing. Of most kinds a turn makes
# fewer than so many; but one event, a worker lost, may end, or have given back the KV of, every request under way.
UNSURE_MAX = 1_024
AtOnce = RequestAborted | KvReleased
Unsure = AtOnce | RequestRejected | RouteAnswered | CommandSent | CommandEnded
GATHER_S = 0.25  # each pass reads every input topic once: pages, not single records
BATCH_RECORDS = 64  # followed before others on the event loop get their turn
PROGRESS_EVERY = 20_000  # journal records between two lines about a long gap


class RecoveryDiverged(LogError):
    """The recorded events do not lead to the recorded decisions under this version's rules."""

    def __init__(self, divergence: Divergence) -> None:
        super().__init__(
            f"journal record {divergence.offset} cannot be derived again ({divergence.reason}): the log was changed, "
            "or written by a version with other rules; run `forebay replay verify` on it"
        )
        self.divergence = divergence


class Onlooker(Protocol):
    """Hears how a standby follows, between its steps. It may look at the world, and must change nothing."""

    def begins(self, world: World) -> None:
        """The world that everything is derived in from here on."""

    def followed(self, offset: int, record: JournalRecord) -> None:
        """The valid journal record at `offset` was derived again, and is as it was recorded."""


class Standby:
    """The world of the group at `partition`, as of journal offset `position`. `onlooker` hears of each step.

    Cancelling `run` or `catch_up` loses nothing: either may be called again. Only one of them at a time.

    Attributes:
        position: the journal offset up to which the world has followed.
        failed: why it cannot follow any more; None while it can.
        followed: the world, and what was decided there but not journalled.
        unsure: the newest refusals, endings, told routes and commands, and KV to be given back: their owner may not
            have said so to whom they concern.
    """

    def __init__(self, log: Log, partition: int, onlooker: Onlooker | None = None) -> None:
        self._log = log
        self._partition = partition
        self._onlooker = onlooker
        self._wake = asyncio.Event()
        self._order: RecordedOrder | None = None
        self._validity = Validity(-1)
        self.position = 0
        self.failed: str | None = None
        self.followed = Rederivation(World())
        self._unsure: deque[Unsure] = deque(maxlen=UNSURE_MAX)
        self._at_once: deque[AtOnce] = deque(maxlen=ACTIVE_REQUESTS_MAX)

    @property
    def unsure(self) -> list[Unsure]:
        """Decisions whose effects may be missing: those of their requests in order."""
        return [*self._unsure, *self._at_once]

    @property
    def world(self) -> World:
        """The state as far as it has followed."""
        return self.followed.world

    async def catch_up(self, end: int) -> None:
        """Follow the journal up to offset `end`, from the newest snapshot before it on if nothing was followed yet.

        Raises:
            RecoveryDiverged: this version's rules lead to other decisions.
            OtherRules: the journal says that it was decided by others.
            LogError: a part that is needed is missing or damaged.
        """
        if self.failed is not None:
            raise LogError(self.failed)
        try:
            order = self._order or await self._begin(end)
            while self.position < end:
                limit = min(PAGE_RECORDS, end - self.position)
                records = await self._log.read(DECISIONS.name, self._partition, self.position, limit)
                if not records:
                    raise LogError(f"the journal ends at offset {self.position}, before {end}")
                await self._follow(records, order, end)
        except LogError as error:
            self.failed = str(error)
            raise

    def continue_on(self, log: Log) -> None:
        """Follow the same records on another connection to the log, as when a reader becomes the writer."""
        assert self._order is not None, "it has followed nothing yet"
        self._log = log
        self._order = RecordedOrder(log, self._partition, self.world.view)

    async def run(self) -> None:
        """Follow until cancelled, or until a record cannot be derived: then `failed` says which.

        Raises LogError when the log fails; another standby may follow it later.
        """
        try:
            end = await self._log.end(DECISIONS.name, self._partition)
            await self.catch_up(end)
            assert self._order is not None
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
        except (RecoveryDiverged, OtherRules) as error:
            self.failed = str(error)
            logger.error("the standby of partition %d cannot follow any more: %s", self._partition, error)  # noqa: TRY400
        except LogError as error:
            self.failed = str(error)
            raise

    async def _begin(self, end: int) -> RecordedOrder:
        taken = await newest_snapshot(self._log, self._partition, end)
        if taken is not None:
            world = await load_snapshot(self._log, self._partition, taken)
            self.followed = Rederivation(world)
            self.position = taken.journal_offset
            self._validity = Validity(world.owner_epoch)
        if end - self.position > PROGRESS_EVERY:
            logger.info("following the journal from offset %d to %d", self.position, end)
        if self._onlooker is not None:
            self._onlooker.begins(self.world)
        self._order = RecordedOrder(self._log, self._partition, self.world.view)
        return self._order

    async def _follow(self, records: Sequence[Record], order: RecordedOrder, end: int) -> None:
        for record in records:
            decision = decode_journal(record)
            if self._validity.admits(decision, record.offset):
                self._validity.require_own_rules(decision, record.offset)
                events = await order.events_of(decision.consumed)
                # Nothing is awaited between this change and the position that includes it: see `Standby`.
                divergence = self.followed.apply(record.offset, decision, events)
                if divergence is not None:
                    raise RecoveryDiverged(divergence)
                if isinstance(decision, AtOnce):
                    self._at_once.append(decision)
                elif isinstance(decision, Unsure):
                    self._unsure.append(decision)
                if self._onlooker is not None:
                    self._onlooker.followed(record.offset, decision)
            self.position = record.offset + 1
            if self.position % BATCH_RECORDS == 0:
                await asyncio.sleep(0)
            if self.position % PROGRESS_EVERY == 0 and self.position < end:
                logger.info("the journal is followed up to offset %d of %d", self.position, end)
