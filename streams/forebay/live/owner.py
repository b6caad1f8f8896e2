"""The owner of a group: one writer, one event at a time, journal before effect.

Theory of operation. The owner claims its partition, recovers the world from snapshot and journal, then
follows its input topics. A turn applies what is ready, requests first, in runs of at most `RUN_US_MAX` at
one reading of the clock. What the turn decided is appended to the journal; only when that is acknowledged
at the expected offsets are the effects sent. A failed append ends the ownership: nothing is compensated, the
next owner rebuilds from the log.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from forebay.core.lifecycle import Request
from forebay.core.step import CONSUMED_RUNS_MAX, Decided, InputEvent, advance, open_run, step
from forebay.core.world import CORE_VERSION, World
from forebay.events.base import Event
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.control import PoolConfigured
from forebay.events.decisions import JournalRecord, OwnerClaimed, RequestRouted, SnapshotTaken
from forebay.events.fleet import OwnershipAnnounced
from forebay.events.requests import RequestSubmitted
from forebay.events.snapshots import Chunk, SnapshotChunk
from forebay.events.topics import (
    CONTROL,
    DEAD_LETTERS,
    DECISIONS,
    FLEET,
    KV_EVENTS,
    METRICS,
    PROGRESS,
    REQUESTS,
    SNAPSHOTS,
    Topic,
)
from forebay.live.admission import Admission
from forebay.live.effects import answers, work_again, work_item
from forebay.live.recovery import Recovered, recover
from forebay.transport.base import Draft, LeaseError, Leases, Log, LogError, Record, Tail

logger = logging.getLogger(__name__)

INPUTS: tuple[Topic, ...] = (REQUESTS, FLEET, CONTROL, PROGRESS, METRICS, KV_EVENTS)
RUN_US_MAX = 5_000  # nothing that arrives waits longer for the topic before it
RUN_SLICE = 16  # records between two looks at the clock
CHUNK_BYTES = 900_000  # below the 1 MiB of a snapshot record, envelope included


class OwnershipLost(LogError):
    """Another owner claimed the group."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What an owner is told.

    Attributes:
        group: names the leases; all pools of one model are decided together in one group.
        partition: of every control topic.
        owner_id: for people.
        pool: appended to `control` when it differs from what the log says.
        snapshot_every: decisions between two snapshots.
        poll_s: between two looks at the leases.
    """

    group: str
    partition: int
    owner_id: str
    pool: PoolConfigured
    snapshot_every: int = 5_000
    poll_s: float = 0.5


class Owner:
    """Owns one group on one log, from `start` to `stop` or until the log fails."""

    def __init__(
        self, log: Log, leases: Leases, settings: GroupSettings, clock_us: Callable[[], int] | None = None
    ) -> None:
        self._log = log
        self._leases = leases
        self._settings = settings
        self._clock_us = clock_us or _wall_clock_us
        self._wake = asyncio.Event()
        self._tails: dict[str, Tail] = {}
        self._journal_end = 0
        self._since_snapshot = 0
        self._stopping = False
        self.world = World()
        self.admission: Admission | None = None
        self.records_written = 0

    async def start(self) -> None:
        """Claim the group and recover its world.

        Raises:
            LogError: the log cannot be followed, see `forebay.live.recovery`.
        """
        settings = self._settings
        claimed = OwnerClaimed(owner_id=settings.owner_id, core_version=CORE_VERSION, at_us=_wall_clock_us())
        (epoch,) = await self._append(DECISIONS, [claimed])
        self._journal_end = epoch + 1
        await self._append(FLEET, [OwnershipAnnounced(owner_epoch=epoch, at_us=_wall_clock_us())])
        recovered = await recover(self._log, settings.partition, epoch + 1)
        self.world = recovered.followed.world
        for topic in INPUTS:
            offset = self.world.view.get(topic.name, 0)
            self._tails[topic.name] = self._log.tail(topic.name, settings.partition, offset, self._wake)
        await self._finish_interrupted(recovered)
        while any(len(tail) for tail in self._tails.values()):
            await self.turn()
        if self.world.pools.get(settings.pool.pool) != settings.pool:
            await self._append(CONTROL, [settings.pool])
            await self.turn()
        self.admission = Admission(self._log, settings.partition, epoch, self.world.fleet)

    async def run(self) -> None:
        """Decide until stopped. Raises LogError when the log fails or another owner took over."""
        polling = asyncio.create_task(self._poll_leases(), name="lease polling")
        try:
            while not self._stopping:
                await self.turn()
                if polling.done():
                    await polling
                if not any(len(tail) for tail in self._tails.values()):
                    await self._sleep()
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

    async def stop(self) -> None:
        """End `run` after the current turn."""
        self._stopping = True
        self._wake.set()

    async def close(self) -> None:
        """Seal the state in a snapshot, so that the next owner starts at once."""
        await self.turn()
        await self.take_snapshot()
        for tail in self._tails.values():
            tail.close()

    async def turn(self) -> None:
        """Apply what is ready, journal what was decided, then let it happen."""
        self._wake.clear()
        submitted: dict[str, RequestSubmitted] = {}
        decided: list[Decided] = []
        records: list[JournalRecord] = []
        letters: list[Draft] = []
        for topic in INPUTS:
            self._apply_ready(topic, submitted, decided, records, letters)
        self._apply_time(decided, records)
        if records:
            await self._journal(records)
            await self._act(decided, submitted)
        if letters:
            self._log.append_soon(letters)
        if self._since_snapshot >= self._settings.snapshot_every:
            await self.take_snapshot()

    async def take_snapshot(self) -> None:
        """Write the state to `snapshots` and journal where it is."""
        sealed = advance(self.world)
        chunks = _chunked(self.world.owner_epoch, list(self.world.snapshot()))
        self._since_snapshot = 0
        await self._journal([sealed])
        journal_offset = self._journal_end
        offsets = await self._append(SNAPSHOTS, chunks)
        taken = SnapshotTaken(
            owner_epoch=self.world.owner_epoch,
            seq=self.world.take_seq(),
            consumed=self.world.take_consumed(),
            first_offset=offsets[0],
            chunks=len(offsets),
            digest=sealed.digest,
            journal_offset=journal_offset,
        )
        await self._journal([taken])

    def _apply_ready(
        self,
        topic: Topic,
        submitted: dict[str, RequestSubmitted],
        decided: list[Decided],
        records: list[JournalRecord],
        letters: list[Draft],
    ) -> None:
        world, tail = self.world, self._tails[topic.name]
        ends_ns = time.monotonic_ns() + RUN_US_MAX * 1000
        while len(tail):
            now_us = self._now_us()
            made = open_run(world, now_us)
            for record in tail.take(RUN_SLICE):
                event = self._decode(topic, record, letters)
                if isinstance(event, RequestSubmitted):
                    submitted[event.request_id] = event
                made += step(world, topic.name, event, now_us)
            decided += made
            records += made
            if len(world.consumed) >= CONSUMED_RUNS_MAX:
                records.append(advance(world))
            if time.monotonic_ns() > ends_ns:
                return

    def _apply_time(self, decided: list[Decided], records: list[JournalRecord]) -> None:
        made = open_run(self.world, self._now_us())
        decided += made
        records += made

    def _decode(self, topic: Topic, record: Record, letters: list[Draft]) -> InputEvent | None:
        try:
            event: InputEvent = decode(topic, record.value)
        except DecodeError as error:
            source = {"topic": topic.name, "partition": str(record.partition), "offset": str(record.offset)}
            headers = {**(record.headers or {}), "reason": str(error), **source}
            letters.append(Draft(DEAD_LETTERS.name, self._settings.partition, record.value, record.key, headers))
            logger.warning("a record does not decode and goes to %s: %s", DEAD_LETTERS.name, error)
            return None
        return event

    async def _journal(self, records: list[JournalRecord]) -> None:
        offsets = await self._append(DECISIONS, records)
        if offsets[0] != self._journal_end:
            text = f"the journal went on to offset {offsets[0]} without this owner, which was at {self._journal_end}"
            raise OwnershipLost(text)
        self._journal_end += len(records)
        self._since_snapshot += len(records)
        self.records_written += len(records)

    async def _act(self, decided: Sequence[Decided], submitted: dict[str, RequestSubmitted]) -> None:
        drafts: list[Draft] = []
        for decision in decided:
            if isinstance(decision, RequestRouted):
                asked = submitted.get(decision.request_id) or await self._submitted(decision)
                drafts.append(work_item(decision, asked))
            else:
                drafts += answers(decision)
        self._log.append_soon(drafts)

    async def _submitted(self, decision: RequestRouted) -> RequestSubmitted:
        request = self.world.requests.get(decision.request_id)
        assert request is not None, "a routed request is under way"
        return await self._read_submitted(request)

    async def _read_submitted(self, request: Request) -> RequestSubmitted:
        (record,) = await self._log.read(REQUESTS.name, self._settings.partition, request.offset, 1)
        event: RequestSubmitted = decode(REQUESTS, record.value)
        return event

    async def _finish_interrupted(self, recovered: Recovered) -> None:
        """Journal what the last owner decided and could not write, and send again what may be unanswered.

        Repeating is harmless: workers know the attempts they have, and clients the answers they got.
        """
        pending: list[JournalRecord] = list(recovered.followed.pending)
        if pending:
            await self._journal(pending)
        ended = [*recovered.unsure]
        ended += [decided for decided in recovered.followed.pending if not isinstance(decided, RequestRouted)]
        drafts = []
        for decided in ended:
            if self.world.requests.get(decided.request_id) is None:
                drafts += answers(decided)
        for request in self.world.requests.under_way():
            worker = self.world.fleet.get(request.worker_id)
            if request.on_worker and worker is not None:
                owner_epoch = self.world.owner_epoch
                drafts.append(work_again(request, worker.slot, owner_epoch, await self._read_submitted(request)))
        self._log.append_soon(drafts)

    async def _poll_leases(self) -> None:
        group = self._settings.group
        assert self.admission is not None
        while True:
            try:
                leases = await asyncio.to_thread(self._leases.poll, group)
                for lease in await self.admission.update(leases, self.world.pools):
                    await asyncio.to_thread(self._leases.forget, group, lease.worker_id, lease.token)
            except LeaseError as error:
                # Who cannot be asked about is not lost: the fleet stays as it is.
                logger.warning("the leases cannot be read, trying again: %s", error)
            await asyncio.sleep(self._settings.poll_s)

    async def _sleep(self) -> None:
        due_us = self.world.requests.next_due_us()
        wait_s = self._settings.poll_s
        if due_us is not None:
            wait_s = min(wait_s, max(0.0, (due_us - self._now_us()) / 1e6))
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _append(self, topic: Topic, events: Sequence[Event]) -> list[int]:
        partition = self._settings.partition
        return await self._log.append([Draft(topic.name, partition, encode(topic, event)) for event in events])

    def _now_us(self) -> int:
        return max(self._clock_us(), self.world.now_us)


def _chunked(owner_epoch: int, parts: list[Chunk]) -> list[SnapshotChunk]:
    groups: list[list[Chunk]] = [[]]
    size = 0
    for part in parts:
        part_size = len(msgspec.msgpack.encode(part))
        if groups[-1] and size + part_size > CHUNK_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part_size
    return [
        SnapshotChunk(owner_epoch=owner_epoch, number=number, parts=tuple(group)) for number, group in enumerate(groups)
    ]


def _wall_clock_us() -> int:
    return time.time_ns() // 1000
