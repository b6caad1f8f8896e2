"""Follow a log, and fill its catalog.

Theory of operation. A follower derives the world from the log, reports every event and record to the observers, and
commits their rows together with its position. After a restart it restores the newest checkpoint before the committed
position, and derives the records up to this position again without the observers.

If a record cannot be derived, the follower stops before this record. Observers may have seen events of the record by
then, so the follower opens the committed catalog again and follows it up to the last good record. If the log cannot be
read, for example because a broker is away, the follower keeps its state and tries again later.

Records of owners with other decision rules cannot be derived. The follower continues at the next claim with this
program's rules, from the snapshot that the claim names.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Sequence

from forebay import runtime
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.state.fleet import FleetWorker
from forebay.core.step import AnyDecision, InputEvent
from forebay.events.fleet import WorkerLost
from forebay.events.topics import DECISIONS, FLEET
from forebay.journal.reader import JournalReader, Past, Step
from forebay.journal.records import OtherRules, UnreadableDecision
from forebay.journal.start import Start, begins_of, oldest
from forebay.replay.at import JournalDiverged, read_losses
from forebay.replay.catalog import checkpoints
from forebay.replay.catalog.facts import CatalogState
from forebay.replay.catalog.observer import CatalogObserver
from forebay.replay.catalog.seek import CatalogStates
from forebay.replay.catalog.store import SIZE_MAX, CommittedPosition, Store, checksum_at, is_damage, unwritable
from forebay.replay.moment import LossFacts, loss_of
from forebay.transport.base import Log, LogError, PolicyNotAllowed

logger = logging.getLogger(__name__)

BREATHE_S = 0.01  # between two yields to the event loop
PAUSE_S = 0.25  # between two statuses
COMMIT_S = 1.0
COMMIT_RECORDS = 4_096  # bounds the rows in memory
TRIM_SHARE = 4  # the oldest quarter of the rows is removed at once
BEGINS_EVERY_S = 10.0  # retention deletes at most this often

OnProgress = Callable[[int, int], None]
NewObservers = Callable[[], Sequence[CatalogObserver]]


class Follower:
    """Follows the log of one group, and fills its catalog. Call `start` once, and then `catch_up` again and again.

    Attributes:
        error: why the follower cannot follow the log; empty while it can.
        failed: whether `error` is final, so that another try is useless.
        on_pause: called between two records every `PAUSE_S` while following; None for no call.
        is_blocked: whether the owner has other decision rules, so that `error` names its version.
    """

    def __init__(
        self,
        log: Log,
        partition: int,
        store: Store,
        new_observers: NewObservers,
        *,
        custom: CustomPolicies = ONLY_BUILT_IN,
        progress: OnProgress | None = None,
        size_max: int = SIZE_MAX,
    ) -> None:
        self.store = store
        self.reader: JournalReader | None = None
        self.observers: Sequence[CatalogObserver] = ()
        self.error = ""
        self.failed = False
        self.on_pause: Callable[[], Awaitable[object]] | None = None
        self.is_blocked = False
        self._log = log
        self._partition = partition
        self._new_observers = new_observers
        self._custom = custom
        self._progress = progress
        self._size_max = size_max
        self._begin_offset = 0
        self._begin_us = 0
        self._log_end = 0
        self._behind_s = 0.0
        self._is_complete = False
        self._losses: list[tuple[int, LossFacts]] = []
        self._spans: list[tuple[int, int]] = []  # arguments of `checkpoints.begin_span`
        self._derived_s = 0.0  # since the newest checkpoint
        self._observers_s = 0.0
        self._restore_s = 0.0
        self._spacing = 1
        self._step_began_s = self._breathed_s = self._paused_s = self._committed_s = self._begins_read_s = (
            runtime.monotonic_s()
        )
        self._uncommitted = 0

    @property
    def position(self) -> int:
        """Journal offset of the first record that is not part of the derived state; 0 before the start."""
        return 0 if self.reader is None else self.reader.derived

    @property
    def is_at_end(self) -> bool:
        """Whether the follower has derived the whole journal, as far as known."""
        return self.reader is not None and not self.error and self.position == self._log_end

    @property
    def state(self) -> CatalogState:
        reader = self.reader
        return CatalogState(
            begin_us=self._begin_us,
            end_us=0 if reader is None else reader.world.now_us,
            begin_offset=self._begin_offset,
            end_offset=self._begin_offset if reader is None else self.position,
            log_end_offset=self._log_end,
            behind_s=self._behind_s,
            is_complete=self._is_complete,
            error=self.error,
        )

    async def catch_up(self) -> None:
        """Follow the log up to its present end. An error of the log sets `error`.

        Raises CatalogError if the catalog was deleted or cannot be written.
        """
        self.store.require_file()
        if self.failed:
            return
        try:
            await self._catch_up_or_stop()
        except sqlite3.Error as error:
            self.handle_store_error(error)

    def handle_store_error(self, error: sqlite3.Error) -> None:
        """Build a damaged catalog anew at the next `catch_up`. Raises CatalogError if the file is only unwritable."""
        if not is_damage(error):
            raise unwritable(self.store.path, error) from error
        logger.warning("%s: the catalog is damaged (%s); it is deleted and built anew", self.store.path, error)
        self.store.rebuild(self._partition)
        self.reader, self.observers, self._is_complete = None, (), False
        self.error, self.is_blocked = "", False

    async def _catch_up_or_stop(self) -> None:
        try:
            await self._catch_up()
        except (JournalDiverged, PolicyNotAllowed) as error:
            self.note_error(error)
            self.failed = True
            await self._recover()
        except LogError as error:
            self.note_error(error)
            self.failed = isinstance(error, UnreadableDecision)
            await self._commit_derived()

    async def commit(self, checkpoint: checkpoints.Checkpoint | None = None) -> None:
        """Commit the rows of all observers, with the position and a checkpoint at this position."""
        assert self.reader is not None, "call catch_up first"
        committed = CommittedPosition(
            position=self.position,
            checksum=await checksum_at(self._log, self._partition, self.position - 1),
            begin_offset=self._begin_offset,
            begin_us=self._begin_us,
        )
        with self.store.transaction() as connection:
            for observer in self.observers:
                observer.write(connection)
            for offset, loss in self._losses:
                checkpoints.add_loss(connection, offset, loss)
            if checkpoint is not None:
                checkpoints.write(connection, checkpoint)
            for blocked, first in self._spans:
                checkpoints.begin_span(connection, blocked, first)
            self.store.commit_position(committed)
        self._losses.clear()
        self._spans.clear()
        self._uncommitted = 0
        self._committed_s = runtime.monotonic_s()

    async def _catch_up(self) -> None:
        reader = self.reader or await self._start()
        await self._follow_begin()
        reader.end = self._log_end = await self._log.end(DECISIONS.name, self._partition)
        self._report()
        await self._derive(reader)
        if reader.left is None:
            self.error, self.is_blocked = "", False
        else:
            self.note_error(reader.left)
        self._is_complete = True
        self._behind_s = 0.0
        if self._uncommitted:
            await self.commit()
        self._report()

    async def _on_restored(self, blocked: int) -> None:
        """Continue with an owner that continued from a snapshot. The records from `blocked` on were not derived."""
        assert self.reader is not None, "observers are called after the start"
        for observer in self.observers:
            observer.resume(self.reader.world)
        self._spans.append((blocked, self.reader.start))
        self._attach(self.reader)
        await self._take_checkpoint(self.reader)
        self._step_began_s = runtime.monotonic_s()

    def _attach(self, reader: JournalReader) -> None:
        reader.followed.on_applied = self._on_applied
        reader.world.on_loss = self._on_loss
        reader.on_restored, reader.on_skipped = self._on_restored, self._breathe
        self.reader = reader

    async def _derive(self, reader: JournalReader) -> None:
        self._step_began_s = runtime.monotonic_s()
        async for step in reader:
            if step.divergence is not None:
                raise JournalDiverged(step.divergence)
            # A moment is derived without observers, so their time does not count.
            self._derived_s += runtime.monotonic_s() - self._step_began_s - self._observers_s
            self._observers_s = 0.0
            self._observe(step, reader)
            now_s = runtime.monotonic_s()
            if self._is_checkpoint_due(reader):
                await self._take_checkpoint(reader)
            elif self._uncommitted >= COMMIT_RECORDS or now_s - self._committed_s >= COMMIT_S:
                await self.commit()
            await self._breathe()
            self._step_began_s = runtime.monotonic_s()

    def _observe(self, step: Step, reader: JournalReader) -> None:
        for observer in self.observers:
            observer.on_record(step.offset, step.record, reader.world)
        self._uncommitted += 1
        if not self._begin_us:
            self._begin_us = reader.world.now_us

    async def _breathe(self) -> None:
        now_s = runtime.monotonic_s()
        if now_s - self._breathed_s >= BREATHE_S:
            self._report()
            if self.on_pause is not None and now_s - self._paused_s >= PAUSE_S:
                await self.on_pause()
                self._paused_s = runtime.monotonic_s()
            await asyncio.sleep(0)
            self._breathed_s = runtime.monotonic_s()

    def _report(self) -> None:
        if self._progress is not None and self.reader is not None:
            self._progress(self.reader.position - self._begin_offset, self._log_end - self._begin_offset)

    def _is_checkpoint_due(self, reader: JournalReader) -> bool:
        due_s = self._spacing * max(checkpoints.DERIVE_S, self._restore_s)
        return reader.pending == 0 and self._derived_s >= due_s

    async def _take_checkpoint(self, reader: JournalReader) -> None:
        await self._measure_lag(reader)
        started_s = runtime.monotonic_s()
        taken = await checkpoints.take(reader.world, reader.derived, reader.unverified)
        restore_s = checkpoints.RESTORE_PER_TAKE * (runtime.monotonic_s() - started_s)
        self._restore_s = min(restore_s, 1.5 * self._restore_s or restore_s)  # a busy machine may delay one reading
        await self.commit(taken)
        self._derived_s = 0.0
        await self._limit_size(reader)

    async def _measure_lag(self, reader: JournalReader) -> None:
        """Note how far the catalog lags behind the append times of journal records."""
        self._log_end = await self._log.end(DECISIONS.name, self._partition)
        if not reader.at_us:  # it has derived no record yet
            return
        for newest in await self._log.read(DECISIONS.name, self._partition, self._log_end - 1, 1):
            self._behind_s = max(0, newest.at_us - reader.at_us) / 1e6

    async def _start(self) -> JournalReader:
        """Return the derivation at the committed position, or at the oldest usable state."""
        committed = self.store.committed
        start = None
        if committed is not None:
            try:
                start = await self._committed_start(committed.position)
            except LogError as error:
                logger.warning("%s: is built anew, because it cannot be continued: %s", self.store.path, error)
                self.store.rebuild(self._partition)
                committed = None
        end = await self._log.end(DECISIONS.name, self._partition)
        if start is None:
            start = await oldest(self._log, self._partition, self._custom, any_rules=True)
            fleet_end = start.world.view.get(FLEET.name, 0)
            lost = await read_losses(self._log, self._partition, fleet_end) if fleet_end else []
            self._losses = [(start.offset - 1, loss) for loss in lost]
        self._begin_offset = start.offset if committed is None else committed.begin_offset
        self._begin_us = start.world.now_us if committed is None else committed.begin_us
        self._log_end = end
        self._spacing = int(self.store.meta("spacing") or 1)
        return await self._resume(start, start.offset if committed is None else committed.position)

    async def _committed_start(self, position: int) -> Start:
        """Return a state from which the records up to `position` follow."""
        states = CatalogStates(self.store, self._log, self._partition, self._custom)
        try:
            return await states.before(position)
        except OtherRules:  # the last committed record is the claim of an owner with other rules
            return await states.before(position - 1)

    async def _resume(self, start: Start, position: int) -> JournalReader:
        """Derive the records up to `position` without observers, and open the observers there."""
        reader = JournalReader(self._log, self._partition, start, position, Past.OTHER_RULES)
        async for step in reader:
            if step.divergence is not None:
                raise JournalDiverged(step.divergence)
            await self._breathe()
        observers = self._new_observers()
        for observer in observers:
            observer.open(self.store.connection, reader.world)
        self._attach(reader)
        self.observers = observers
        self._derived_s = 0.0
        return reader

    def _on_applied(self, topic: str, event: InputEvent | None, now_us: int, decisions: Sequence[AnyDecision]) -> None:
        assert self.reader is not None, "observers are called after the start"
        started_s = runtime.monotonic_s()
        for observer in self.observers:
            observer.on_applied(topic, event, now_us, decisions, self.reader.world)
        self._observers_s += runtime.monotonic_s() - started_s

    def _on_loss(self, event: WorkerLost, worker: FleetWorker) -> None:
        assert self.reader is not None, "observers are called after the start"
        self._losses.append((self.reader.position, loss_of(self.reader.world, event, worker)))

    async def _follow_begin(self) -> None:
        """Note from which record on moments can be shown, after retention has deleted records."""
        now_s = runtime.monotonic_s()
        if now_s - self._begins_read_s < BEGINS_EVERY_S:
            return
        self._begins_read_s = now_s
        begins = await begins_of(self._log, self._partition)
        if begins[DECISIONS.name] > self._begin_offset:
            found = checkpoints.oldest_usable(self.store.connection, begins)
            if found is not None:
                self._begin_offset, self._begin_us = found.offset, found.now_us

    async def _commit_derived(self) -> None:
        """Commit the records before one that cannot be read."""
        try:
            if self._uncommitted:
                await self.commit()
        except LogError as error:
            logger.debug("the newest rows are not committed: %s", error)

    async def _recover(self) -> None:
        """Follow the log again from the committed position, up to the record that cannot be derived."""
        if self.reader is None:
            return
        end = self.reader.position
        self._losses.clear()
        try:
            reader = self.reader = await self._start()
            reader.end = end
            await self._derive(reader)
            await self.commit()
        except LogError as error:
            logger.debug("the records after the committed position cannot be derived: %s", error)

    async def _limit_size(self, reader: JournalReader) -> None:
        """Remove checkpoints, or else the oldest rows, if the catalog is above its maximum size."""
        if self.store.size <= self._size_max:
            return
        connection = self.store.connection
        if checkpoints.total_bytes(connection) * 4 > self._size_max:
            self._spacing *= 2
            for offset in checkpoints.every_second(connection):
                with self.store.transaction():
                    checkpoints.remove(connection, offset)
                await asyncio.sleep(0)
            self.store.set_meta("spacing", str(self._spacing))
            return
        kept = int(self.store.meta("rows_begin") or self._begin_offset)
        cut = checkpoints.first_from(connection, kept + (reader.derived - kept) // TRIM_SHARE)
        if cut is not None:
            with self.store.transaction():
                for observer in self.observers:
                    observer.remove_before(connection, cut.offset, cut.now_us)
                self.store.set_meta("rows_begin", str(cut.offset))

    def note_error(self, error: LogError) -> None:
        """Show an error of the log in `state`, until the next success."""
        if str(error) != self.error:
            logger.error("the catalog of partition %d stopped: %s", self._partition, error)
        self.error, self.is_blocked = str(error), isinstance(error, OtherRules)
