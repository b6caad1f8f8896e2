"""The owner of a group: one writer, one event at a time, journal before effect.

Theory of operation. The owner claims its partition, recovers the world from snapshot and journal, then
follows its input topics. A turn applies what is ready, requests first, in runs of at most `RUN_US_MAX` at
one reading of the clock. What the turn decided is appended to the journal; only when that holds (see
`forebay.live.owner.journal`) are the effects sent. A failed append, or a newer owner on the journal or on `fleet`,
ends the ownership: nothing is compensated, the next owner rebuilds from the log.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from forebay.core.phases import Phase
from forebay.core.step import CONSUMED_RUNS_MAX, AnyDecision, InputEvent, advance, open_run, step
from forebay.core.world import CORE_VERSION, World
from forebay.events.base import Event
from forebay.events.codec import DecodeError, encode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.decisions import (
    CommandSent,
    JournalRecord,
    KvReleased,
    OwnerClaimed,
    RequestAborted,
    RequestRejected,
    RequestRouted,
)
from forebay.events.fleet import OwnershipAnnounced
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import CONTROL, DEAD_LETTERS, FLEET, INPUTS, REQUESTS, Topic
from forebay.live.owner.admission import Admission, PoolsByLease
from forebay.live.owner.clock import RunClock, steady_clock
from forebay.live.owner.effects import Address, answers, reannounce, work_again, work_item, worker_commands
from forebay.live.owner.ingress_presence import IngressPresence
from forebay.live.owner.journal import Journal, OwnershipLost
from forebay.live.owner.lease_judgement import ObservedTime
from forebay.live.owner.recorded_requests import AskedReader
from forebay.live.owner.recovery import recover
from forebay.live.owner.snapshots import Snapshots
from forebay.live.owner.ttft_metrics import FirstTokens
from forebay.live.router.heartbeats import HeartbeatWriter
from forebay.live.router.standby import Standby, Unsure
from forebay.transport.base import Draft, Lease, LeaseError, Leases, Log, LogError, Record, Tail
from forebay.transport.dead_letters import dead_letter
from forebay.transport.decoding import event_of

__all__ = ["GroupSettings", "Owner", "OwnershipLost"]

logger = logging.getLogger(__name__)

RUN_US_MAX = 5_000  # nothing that arrives waits longer for the topic before it
RUN_SLICE = 16  # records between two looks at the clock
CAUGHT_UP_S = 60  # between two records that are known to be there: a reader that gets none is stuck
CLOCK_AHEAD_US = 1_000_000  # machines that keep time are nearer to each other


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What an owner is told.

    Attributes:
        group: the model, which also names the leases: all its pools are decided together.
        partition: of every control topic.
        owner_id: for people.
        pools: all pools that get workers, each appended to `control` when it differs from what the log says. Without
            them the first lease of a pool configures that.
        router: how pools route that come by leases; appended to `control` where the log says otherwise.
        slots_max: partitions of a work topic. All groups share them.
        groups: control partitions, so how many groups share the slots; a pool can have slots_max / groups workers.
        snapshot_every: journal records between two snapshots.
        snapshot_age_s: between two snapshots, if anything was journalled.
        poll_s: between two looks at the leases.
        heartbeats: whether the deciding loop writes to `heartbeats`, for ingresses in other processes.
    """

    group: str
    partition: int
    owner_id: str
    pools: tuple[PoolConfigured, ...] = ()
    router: RouterConfig = field(default_factory=RouterConfig)
    slots_max: int = 1_024
    groups: int = 1
    snapshot_every: int = 5_000
    snapshot_age_s: float = 300.0
    poll_s: float = 0.5
    heartbeats: bool = False


class Owner:
    """Owns one group on one log, from `start` to `stop` or until the log fails.

    It counts what it sent to workers: `stages` by stage, `prefills` by (remote or local, the reason) for prompts that
    either of two pools may compute; records that were refused (`letters`) and effects that no topic takes (`unsent`);
    and how long `first_tokens` took.
    """

    def __init__(
        self,
        log: Log,
        leases: Leases,
        settings: GroupSettings,
        clock_us: Callable[[], int] | None = None,
        ingress_leases: Leases | None = None,
    ) -> None:
        self._log = log
        self._leases = leases
        self._ingress_leases = ingress_leases
        self._settings = settings
        self._clock = RunClock(clock_us or steady_clock())
        self._asked = AskedReader(log, settings.partition)
        self._wake = asyncio.Event()
        self._tails: dict[str, Tail] = {}
        self._stopping = False
        self.world = World()
        self.journal = Journal(log, settings.partition)
        self.snapshots = Snapshots(
            log,
            settings.partition,
            every=settings.snapshot_every,
            age_s=settings.snapshot_age_s,
            wake=self._wake,
        )
        self.admission: Admission | None = None
        self._heartbeats: HeartbeatWriter | None = None
        if settings.heartbeats:
            self._heartbeats = HeartbeatWriter(log, settings.partition, settings.group, settings.owner_id)
        self.ingresses: IngressPresence | None = None
        self.letters = 0
        self.unsent = 0
        self.stages: Counter[str] = Counter()
        self.prefills: Counter[tuple[str, str]] = Counter()
        self.first_tokens = FirstTokens()

    @property
    def clock_ahead_us(self) -> int:
        """How far the log's clock was ahead of this machine's when the owner started."""
        return self._clock.ahead_us

    async def start(self, standby: Standby | None = None) -> None:
        """Claim the group and recover its world: `standby`'s, which must not be running any more, if it is of use.

        Everything that stood on the log before is applied when this returns.

        Raises:
            OwnershipLost: another owner claimed the group meanwhile.
            LogError: the log cannot be followed, see `forebay.live.owner.recovery`.
        """
        settings = self._settings
        await self.journal.claim(
            OwnerClaimed(owner_id=settings.owner_id, core_version=CORE_VERSION, at_us=_wall_clock_us())
        )
        epoch = self.journal.epoch
        await self._append(FLEET, [OwnershipAnnounced(owner_epoch=epoch, at_us=_wall_clock_us())])
        recovered = await recover(self._log, settings.partition, epoch + 1, standby)
        self.world = recovered.world
        self._start_clock()
        for topic in INPUTS:
            offset = self.world.view.get(topic.name, 0)
            self._tails[topic.name] = self._log.tail(topic.name, settings.partition, offset, self._wake)
        await self._finish_interrupted(recovered)
        # What is known comes before what is asked: requests that wait must not be decided on an old state.
        await self._catch_up([topic for topic in INPUTS if topic is not REQUESTS])
        await self._catch_up([REQUESTS])
        await self._configure_pools()
        self.snapshots.keep_collections_short(self.world)
        # The fleet is applied beyond this owner's announcement: no fact of an earlier owner can follow.
        by_lease = None if settings.pools else PoolsByLease(settings.group, settings.router)
        self.admission = Admission(
            self._log,
            settings.partition,
            epoch,
            self.world.fleet,
            slots_max=settings.slots_max,
            groups=settings.groups,
            by_lease=by_lease,
        )
        self.ingresses = IngressPresence(self._log, settings.partition, epoch, self.world.fleet)

    async def run(self) -> None:
        """Decide until stopped. Raises LogError when the log fails or another owner took over."""
        polling = asyncio.create_task(self._poll_leases(), name="lease polling")
        try:
            while not self._stopping:
                await self.turn()
                if self._heartbeats is not None:
                    self._heartbeats.beat_as_owner(self.world, self.journal.end)
                if polling.done():
                    await polling
                if self._any_ready():
                    continue
                if self.snapshots.eager:
                    await asyncio.sleep(0)
                else:
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
        self.drop()

    def drop(self) -> None:
        """Stop following the inputs, and write nothing: the end of an owner that failed or lost the group."""
        self.snapshots.drop()
        if self._heartbeats is not None:
            self._heartbeats.close()
        for tail in self._tails.values():
            tail.close()

    async def turn(self, topics: Sequence[Topic] = INPUTS) -> None:
        """Apply what is ready of `topics`, journal what was decided, then let it happen."""
        self._wake.clear()
        submitted: dict[int, RequestSubmitted] = {}
        decided: list[AnyDecision] = []
        records: list[JournalRecord] = []
        letters: list[Draft] = []
        for topic in topics:
            self._apply_ready(topic, submitted, decided, records, letters)
        self._apply_time(decided, records)
        newest = self.world.fleet.owner_epoch
        if newest > self.journal.epoch:
            self.journal.surrender(
                f"the fleet has a newer owner, of epoch {newest}; this one is of {self.journal.epoch}"
            )
        records += self.snapshots.records(self.world)
        if records:
            await self._journal(records)
            await self._act(decided, submitted)
        if letters:
            self._send(letters)
        self.snapshots.work(self.world)

    async def take_snapshot(self) -> None:
        """Write the state as it is now to `snapshots`, and journal where it is. Not while `run` does."""
        wanted = self.snapshots.taken + 1 + self.snapshots.sealed
        while self.snapshots.taken < wanted:
            self.snapshots.begin(self.world)
            await self.turn(())
            await self.snapshots.settle()

    def _apply_ready(
        self,
        topic: Topic,
        submitted: dict[int, RequestSubmitted],
        decided: list[AnyDecision],
        records: list[JournalRecord],
        letters: list[Draft],
    ) -> None:
        world, tail = self.world, self._tails[topic.name]
        ends_ns = time.monotonic_ns() + RUN_US_MAX * 1000
        while len(tail):
            now_us = self._clock.now_us()
            made = self._open_run(now_us)
            run_ends_ns = time.monotonic_ns() + RUN_US_MAX * 1000
            for record in tail.take(RUN_SLICE):
                if time.monotonic_ns() > run_ends_ns:
                    now_us = self._clock.now_us()
                    made += self._open_run(now_us)
                    run_ends_ns = time.monotonic_ns() + RUN_US_MAX * 1000
                event = self._decode(topic, record, letters)
                if isinstance(event, RequestSubmitted):
                    submitted[record.offset] = event
                led_to = step(world, topic.name, event, now_us)
                self.first_tokens.take(world, event, led_to, now_us)
                made += led_to
            decided += made
            records += made
            if len(world.consumed) >= CONSUMED_RUNS_MAX:
                records.append(advance(world))
            if time.monotonic_ns() > ends_ns:
                return

    def _apply_time(self, decided: list[AnyDecision], records: list[JournalRecord]) -> None:
        made = self._open_run(self._clock.now_us())
        decided += made
        records += made

    def _open_run(self, now_us: int) -> list[AnyDecision]:
        made = open_run(self.world, now_us)
        self.first_tokens.take(self.world, None, made, now_us)
        return made

    def _decode(self, topic: Topic, record: Record, letters: list[Draft]) -> InputEvent | None:
        try:
            event: InputEvent = event_of(topic, record)
        except DecodeError as error:
            logger.warning("a record does not decode and goes to %s: %s", DEAD_LETTERS.name, error)
            letters.append(self._letter(record, str(error)))
            return None
        if isinstance(event, RequestSubmitted) and event.model != self._settings.group:
            # Its client is answered by the core; who sent it here should know too.
            letters.append(self._letter(record, f"the group {event.model} does not live in this partition"))
        return event

    def _letter(self, record: Record, reason: str) -> Draft:
        self.letters += 1
        return dead_letter(record, self._settings.partition, reason)

    async def _journal(self, records: Sequence[JournalRecord]) -> None:
        await self.journal.append(records)
        self.snapshots.journalled(records, self.journal.end)

    async def _act(self, decided: Sequence[AnyDecision], submitted: dict[int, RequestSubmitted]) -> None:
        drafts: list[Draft] = []
        for decision in decided:
            if isinstance(decision, RequestRouted):
                self._count(decision)
                request = self.world.requests.get(decision.request_id)
                if request is None:
                    continue  # the same turn ended it again, and so cancelled its work
                if (request.stage, request.stage_attempt) != (decision.stage, decision.attempt):
                    continue  # its worker was lost in the same turn, and with it what this one was to get
                # By offset: another submission with the same id, which was refused, may stand in the same turn.
                asked = submitted.get(request.offset) or await self._asked.at(request.offset)
                report_output = self._reports_output(decision.pool)
                drafts.append(work_item(self._settings.group, decision, asked, request, report_output=report_output))
                continue
            drafts += answers(self._settings.group, decision)
            if isinstance(decision, CommandSent):
                drafts += self._commands(decision.command_id)
        self._asked.forget()
        self._send(drafts)

    def _count(self, decision: RequestRouted) -> None:
        self.stages[decision.stage] += 1
        if (place := decision.prefill) is not None:
            self.prefills["remote" if place.remote else "local", place.reason] += 1

    def _send(self, drafts: Sequence[Draft]) -> None:
        """Append effects and letters. One that no topic takes is left out: its request ends at its deadline."""
        try:
            self._log.append_soon(drafts)
        except ValueError as error:
            if len(drafts) == 1:
                self.unsent += 1
                logger.error("a record cannot be sent and is left out: %s", error)  # noqa: TRY400
                return
            for draft in drafts:
                self._send([draft])

    def _reports_output(self, pool: str) -> bool:
        return self.world.pools[pool].router.track_output_blocks

    async def _finish_interrupted(self, recovered: Standby) -> None:
        """Journal what the last owner decided and could not write, and send again what may be unanswered.

        Repeating is harmless: workers know the attempts they have, and clients the answers they got.
        """
        pending: list[JournalRecord] = list(recovered.followed.pending)
        if pending:
            await self._journal(pending)
        group = self._settings.group
        again = [*recovered.unsure, *(decided for decided in pending if isinstance(decided, Unsure))]
        drafts = []
        for decided in again:
            if not self._of_an_earlier_life(decided):
                drafts += answers(group, decided)
        drafts += self._resyncs()
        for given in self.world.commands.pending():
            drafts += self._commands(given.command_id)
        owner_epoch = self.world.owner_epoch
        for request in self.world.requests.active():
            worker = self.world.fleet.get(request.worker_id)
            if request.on_worker and worker is not None:
                asked = await self._asked.at(request.offset)
                report_output = self._reports_output(request.pool)
                to = Address(group, worker.spec.pool, worker.slot, request.worker_id, request.worker_epoch)
                drafts.append(work_again(to, request, owner_epoch, asked, report_output=report_output))
        self._asked.forget()
        self._send(drafts)

    def _of_an_earlier_life(self, decided: Unsure) -> bool:
        """Whether the id of a request was used again: then its answer is still to come, its KV still to be fetched."""
        if not isinstance(decided, RequestRejected | RequestAborted | KvReleased):
            return False
        request = self.world.requests.get(decided.request_id)
        if request is None or not isinstance(decided, KvReleased):
            return request is not None
        is_kept = request.prefilled is not None or request.phase is Phase.REMOTE_PREFILL
        return is_kept and request.prefills <= decided.attempt

    def _commands(self, command_id: str) -> Iterator[Draft]:
        pending = self.world.commands.get(command_id)
        if pending is not None:
            world = self.world
            yield from worker_commands(self._settings.group, pending, world.fleet, world.owner_epoch, world.now_us)

    def _resyncs(self) -> Iterator[Draft]:
        for cursor in self.world.index.resyncing():
            worker = self.world.fleet.get(cursor.worker_id)
            assert worker is not None, "the index has members of the fleet only"
            group = self._settings.group
            to = Address(group, worker.spec.pool, worker.slot, cursor.worker_id, cursor.worker_epoch)
            yield reannounce(to, self.world.owner_epoch, cursor.rank, cursor.last_seq)

    def _start_clock(self) -> None:
        self._clock.take_over(self.world.now_us)
        if self._clock.ahead_us > CLOCK_AHEAD_US:
            logger.warning(
                "the clock of an earlier owner was %.1f s ahead of this machine's: time goes on from there; "
                "check that the machines keep time",
                self._clock.ahead_us / 1e6,
            )

    async def _catch_up(self, topics: Sequence[Topic]) -> None:
        """Turn until these inputs are applied up to what is their end now."""
        view, partition = self.world.view, self._settings.partition
        ends = {topic.name: await self._log.end(topic.name, partition) for topic in topics}
        while behind := [topic for topic, end in ends.items() if view.get(topic, 0) < end]:
            await self.turn(topics)
            if any(view.get(topic, 0) < ends[topic] for topic in behind) and not self._any_ready(topics):
                try:
                    async with asyncio.timeout(CAUGHT_UP_S):
                        await self._wake.wait()
                except TimeoutError:
                    text = f"no record of {', '.join(behind)} came for {CAUGHT_UP_S} s, though there are some"
                    raise LogError(text) from None

    async def _configure_pools(self) -> None:
        settings, pools = self._settings, self.world.pools
        wanted = list(settings.pools)
        if not wanted:
            wanted = [msgspec.structs.replace(pools[name], router=settings.router) for name in sorted(pools)]
        changed = [pool for pool in wanted if pools.get(pool.pool) != pool]
        if changed:
            await self._append(CONTROL, changed)
            await self._catch_up([CONTROL])

    async def _poll_leases(self) -> None:
        assert self.admission is not None
        assert self.ingresses is not None
        readable = True
        workers, ingresses = ObservedTime(), ObservedTime()
        while True:
            try:
                leases, observed_ms, applied = await self._read_leases(self._leases, workers)
                ended = await self.admission.update(leases, self.world.pools, applied, observed_ms)
                await self._forget_leases(self._leases, ended)
                if self._ingress_leases is not None:
                    leases, observed_ms, applied = await self._read_leases(self._ingress_leases, ingresses)
                    ended = await self.ingresses.update(leases, applied, observed_ms)
                    await self._forget_leases(self._ingress_leases, ended)
                readable = True
            except LeaseError as error:
                # Who cannot be asked about is not lost: the fleet stays as it is.
                workers.failed()
                ingresses.failed()
                if readable:
                    logger.warning("the leases cannot be read, trying again: %s", error)
                readable = False
            await asyncio.sleep(self._settings.poll_s)

    async def _read_leases(self, leases: Leases, observed: ObservedTime) -> tuple[list[Lease], int, int]:
        """Return the leases of the group, the time observed since the last poll, and how far `fleet` is applied."""
        found = await asyncio.to_thread(leases.poll, self._settings.group)
        return found, observed.read(time.monotonic()), self.world.view.get(FLEET.name, 0)

    async def _forget_leases(self, leases: Leases, ended: Sequence[Lease]) -> None:
        for lease in ended:
            await asyncio.to_thread(leases.forget, self._settings.group, lease.worker_id, lease.token)

    def _any_ready(self, topics: Sequence[Topic] = INPUTS) -> bool:
        return any(len(self._tails[topic.name]) for topic in topics)

    async def _sleep(self) -> None:
        due_us = self.world.next_due_us()
        wait_s = self._settings.poll_s
        if self._heartbeats is not None:
            wait_s = min(wait_s, self._heartbeats.due_in_s())
        if due_us is not None:
            wait_s = min(wait_s, max(0.0, (due_us - self._clock.now_us()) / 1e6))
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _append(self, topic: Topic, events: Sequence[Event]) -> list[int]:
        partition = self._settings.partition
        return await self._log.append([Draft(topic.name, partition, encode(topic, event)) for event in events])


def _wall_clock_us() -> int:
    return time.time_ns() // 1000
