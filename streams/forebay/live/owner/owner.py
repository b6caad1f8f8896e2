"""Run the owner of a group: apply events one at a time, journal each decision, then send its effects.

Theory of operation. The owner claims its partition, recovers the world from snapshot and journal, then follows its
input topics. In each turn it applies the records that are ready, requests first. It applies them in runs: a run has one
clock reading and takes at most `RUN_US_MAX`. The owner appends the decisions of the turn to the journal. It sends their
effects only once the journal confirms the append (see `forebay.live.owner.journal_writer`).

A failed append ends the ownership, and so does a newer owner on the journal or on `fleet`. The owner does not roll
anything back, because the next owner rebuilds the state from the log.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from forebay import runtime
from forebay.core.adapter_placement import UNLOAD
from forebay.core.phases import Phase
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.fleet import FleetWorker
from forebay.core.step import CONSUMED_RUNS_MAX, AnyDecision, InputEvent, advance, open_run, step
from forebay.core.world import CORE_VERSION, World
from forebay.events.base import Event
from forebay.events.codec import DecodeError, encode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.decisions import (
    AdapterPlaced,
    CommandEnded,
    CommandSent,
    JournalRecord,
    KvReleased,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
)
from forebay.events.fleet import OwnershipAnnounced
from forebay.events.pools import PoolRouting, PoolRoutingConfigured
from forebay.events.requests import RequestResumed, RequestSubmitted
from forebay.events.topics import CONTROL, DEAD_LETTERS, DECISIONS, FLEET, INPUTS, REQUESTS, Topic
from forebay.events.versions import EVENTS_VERSION
from forebay.journal.release import own_release
from forebay.live.heartbeats import HeartbeatWriter
from forebay.live.owner.admission import SLOTS_MAX, PoolsByLease, RequireSlot, Slots, WorkerAdmission
from forebay.live.owner.effects import (
    WorkerAddress,
    address_of,
    encode_commands,
    encode_destination,
    encode_effects,
    encode_reannounce,
    encode_work,
    expected_blocks,
)
from forebay.live.owner.ingress_presence import IngressPresence
from forebay.live.owner.journal_writer import JournalWriter, OwnershipLost
from forebay.live.owner.lease_judgement import ObservedTime
from forebay.live.owner.snapshot_writer import Snapshots
from forebay.live.owner.submissions import SubmissionReader
from forebay.live.owner.ttft_metrics import TtftRecorder
from forebay.live.standby import Standby, Unconfirmed
from forebay.transport.base import Draft, Lease, LeaseError, Leases, Log, LogError, Record, Tail, event_of
from forebay.transport.dead_letters import dead_letter

logger = logging.getLogger(__name__)

__all__ = ["GroupSettings", "Owner", "OwnershipLost"]


RUN_US_MAX = 5_000  # bounds how long the records of one topic delay the records of the next topic
RUN_SLICE = 16  # records between two readings of the clock
# Bounds after which applied events are journalled without a decision, for readers of the journal. An indexer answers no
# query while it applies the events of one record, at up to 20 µs per event.
QUIET_S = 1.0
UNREAD_MAX = 1_000
CAUGHT_UP_S = 60  # a reader that gets no record for this long, although the partition has more, is stuck
NONCE_BYTES = 8  # no two claims of any groups have the same nonce
CLOCK_AHEAD_US = 1_000_000  # synchronised clocks differ by less


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings of the owner of one group.

    The owner appends `pools`, `router` and `routing` to `control` if they differ from the settings on the log.

    Attributes:
        group: Name of the model, and of the group in the leases. One owner decides for all pools of the model.
        pools: All pools that may have workers. If empty, the first lease of each pool configures the pool.
        router: Routing settings of pools that leases configure.
        routing: Rules for the choice of pools. None keeps the rules of the log.
        slots_max: Maximum number of slots per pool, which are partitions of its work topic. All groups share them.
        require_slot: Adds a missing slot to a pool. None if all slots exist.
        policies: Custom policies that the operator allowed, by router mode. The owner writes their names into its
            claim, and rejects requests of pools whose mode names any other custom policy.
        groups: Number of control partitions. Each group can use slots_max / groups slots of a pool.
        snapshot_age_s: Maximum time between two snapshots, if at least one record was journalled since.
        heartbeats: Whether the owner appends to `heartbeats`, for ingresses in other processes.
        has_readers: Whether something else reads the journal of an owner without heartbeats.
    """

    group: str
    partition: int
    owner_id: str
    pools: tuple[PoolConfigured, ...] = ()
    router: RouterConfig = field(default_factory=RouterConfig)
    routing: PoolRouting | None = None
    policies: CustomPolicies = field(default_factory=dict)
    slots_max: int = SLOTS_MAX
    require_slot: RequireSlot | None = None
    groups: int = 1
    snapshot_every: int = 5_000
    snapshot_age_s: float = 300.0
    poll_s: float = 0.5
    heartbeats: bool = False
    has_readers: bool = False


class Owner:
    """Owner of one group on one log, from `start` to `stop` or until the log fails."""

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
        self._submissions = SubmissionReader(log, settings.partition)
        self._wake = asyncio.Event()
        self._tails: dict[str, Tail] = {}
        self._stopping = False
        self.world = World(settings.policies)
        self.journal = JournalWriter(log, settings.partition)
        self.snapshots = Snapshots(
            log,
            settings.partition,
            every=settings.snapshot_every,
            age_s=settings.snapshot_age_s,
            wake=self._wake,
        )
        self.admission: WorkerAdmission | None = None
        self._heartbeats: HeartbeatWriter | None = None
        if settings.heartbeats:
            self._heartbeats = HeartbeatWriter(log, settings.partition, settings.group, settings.owner_id)
        self.ingresses: IngressPresence | None = None
        self._journalled_s = runtime.monotonic_s()
        self.dead_letters = 0
        self.unsent = 0
        self.tally = DecisionTally()
        self.first_tokens = TtftRecorder()

    @property
    def clock_ahead_us(self) -> int:
        return self._clock.ahead_us

    async def start(self, standby: Standby | None = None) -> None:
        """Recover the world of the group, claim the group, and apply all records that were on the log at the claim.

        A router that cannot derive the journal claims nothing, so the group keeps its owner. A stopped `standby` of the
        group is continued if it can follow the journal. Raises OwnershipLost, or LogError like `recover`.
        """
        settings = self._settings
        end = await self._log.end(DECISIONS.name, settings.partition)
        recovered = await recover(self._log, settings.partition, end, settings.policies, standby)
        seen_us = max(recovered.world.now_us, recovered.sealed_us, 0 if standby is None else standby.owner_seen_us)
        seen_us = max(seen_us, 0 if recovered.claim is None else recovered.claim.at_us)
        claim = OwnerClaimed(
            owner_id=settings.owner_id,
            core_version=CORE_VERSION,
            at_us=runtime.wall_us(),
            policies=tuple(sorted(settings.policies)),
            seal=recovered.seal,
            snapshot=recovered.snapshot,
            events_version=EVENTS_VERSION,
            release=own_release(),
            owner_nonce=runtime.random_bytes(NONCE_BYTES).hex(),
            previous_nonce=recovered.validity.nonce or "",
            previous_seen_us=0 if recovered.validity.epoch < 0 else seen_us,
        )
        await self.journal.claim(claim)
        epoch = self.journal.epoch
        await recovered.catch_up(epoch)  # the previous owner may have decided
        self.journal.add_skipped(recovered.validity)
        was_sealed = recovered.released
        await recovered.catch_up(epoch + 1)
        if recovered.world.owner_epoch != epoch:
            self.journal.surrender(
                f"the claim at journal offset {epoch} is void: another router claimed the group first"
            )
        announced = OwnershipAnnounced(owner_epoch=epoch, at_us=runtime.wall_us(), events_version=EVENTS_VERSION)
        await self._append(FLEET, [announced])
        self.world = recovered.world
        self._start_clock()
        for topic in INPUTS:
            offset = self.world.view.get(topic.name, 0)
            self._tails[topic.name] = self._log.tail(topic.name, settings.partition, offset, self._wake)
        interrupted = await self._finish_interrupted(recovered, was_sealed=was_sealed)
        # Other topics come first, so that pending requests are not decided on an old state.
        await self._catch_up([topic for topic in INPUTS if topic is not REQUESTS])
        await self._catch_up([REQUESTS])
        self._send_again([*recovered.unconfirmed, *interrupted])
        await self._configure_pools()
        self.snapshots.freeze_large_index(self.world)
        # `fleet` is applied past this owner's announcement, so events of earlier owners are fenced from here on.
        by_lease = None if settings.pools else PoolsByLease(settings.group, settings.router)
        active = self.world.requests.active()
        self.admission = WorkerAdmission(
            self._log,
            settings.partition,
            epoch,
            self.world.fleet,
            slots=Slots(range(settings.partition, settings.slots_max, settings.groups), settings.require_slot),
            by_lease=by_lease,
            busy={request.worker_id for request in active},
        )
        self.ingresses = IngressPresence(
            self._log,
            settings.partition,
            epoch,
            self.world.fleet,
            is_busy=lambda incarnation: bool(self.world.requests.of_ingress(incarnation)),
        )

    async def run(self) -> None:
        """Repeat `turn` until `stop` is called. Raises LogError if the log fails or another owner took over."""
        polling = asyncio.create_task(self._poll_leases(), name="lease polling")
        try:
            while not (self._stopping and self.snapshots.can_stop):
                await self.turn()
                self._beat()
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

    async def _poll_leases(self) -> None:
        """Write the changes of leases to `fleet` until cancelled. Raises LogError if the log accepts no event."""
        assert self.admission is not None
        assert self.ingresses is not None
        world, readable = self.world, True
        workers, ingresses = ObservedTime(), ObservedTime()
        while True:
            try:
                leases, observed_ms, applied = await self._read_leases(self._leases, workers)
                ended = await self.admission.update(leases, world.pools, world.fleet, applied, observed_ms)
                await self._forget_leases(self._leases, ended)
                if self._ingress_leases is not None:
                    leases, observed_ms, applied = await self._read_leases(self._ingress_leases, ingresses)
                    ended = await self.ingresses.update(leases, world.fleet, applied, observed_ms)
                    await self._forget_leases(self._ingress_leases, ended)
                readable = True
            except LeaseError as error:
                # Without readable leases no worker counts as lost: the fleet stays as it is.
                workers.failed()
                ingresses.failed()
                if readable:
                    logger.warning("the leases cannot be read, retrying: %s", error)
                readable = False
            await asyncio.sleep(self._settings.poll_s)

    async def _read_leases(self, leases: Leases, observed: ObservedTime) -> tuple[list[Lease], int, int]:
        """Return the leases, the milliseconds observed since the last poll, and the applied offset of `fleet`."""
        polled = await runtime.offload(leases.poll, self._settings.group)
        return polled, observed.read(runtime.monotonic_s()), self.world.view.get(FLEET.name, 0)

    async def _forget_leases(self, leases: Leases, ended: list[Lease]) -> None:
        for lease in ended:
            await runtime.offload(leases.forget, self._settings.group, lease.worker_id, lease.token)

    async def stop(self) -> None:
        """End `run` once the blocks for the last snapshot are walked. Until then the owner decides as before."""
        self._stopping = True
        self.snapshots.prepare_stop()

    async def close(self) -> None:
        """Apply the ready records, seal the state, and end the journal with `Sealed`.

        The next owner then starts without replaying the journal. The owner applies nothing between the seal and
        `Sealed`. All its effects are durable before `Sealed`. Raises OwnershipLost or LogError.
        """
        self.snapshots.prepare_stop()
        while not self.snapshots.can_stop:
            await self.turn()
            self._beat()
            await self.snapshots.settle()
        began_s = runtime.monotonic_s()
        await self.turn(seals=True)
        await self._log.flush()
        await self._journal([await self.snapshots.finish(self.world)])
        stopped_ms = (runtime.monotonic_s() - began_s) * 1000
        logger.info("sealed the journal of %s in %.0f ms", self._settings.group, stopped_ms)
        if self._heartbeats is not None:
            await self._heartbeats.release(self.world, self.journal.end)
        self.drop()

    def drop(self) -> None:
        """Stop following the input topics without writing anything, after a failure or the loss of the group."""
        self.snapshots.drop()
        if self._heartbeats is not None:
            self._heartbeats.close()
        for tail in self._tails.values():
            tail.close()

    async def turn(self, topics: Sequence[Topic] = INPUTS, *, seals: bool = False) -> None:
        """Apply the ready records of `topics`, journal the decisions, then send their effects.

        With `seals`, seal the last snapshot after these decisions. No turn may follow.
        """
        self._wake.clear()
        submitted: dict[int, RequestSubmitted] = {}
        decided: list[AnyDecision] = []
        records: list[JournalRecord] = []
        letters: list[Draft] = []
        for topic in topics:
            self._apply_ready(topic, submitted, decided, records, letters)
        decisions = self._open_run(self._clock.now_us())
        decided += decisions
        records += decisions
        newest = self.world.fleet.owner_epoch
        if newest > self.journal.epoch:
            self.journal.surrender(
                f"a newer owner with epoch {newest} announced itself on `fleet`; this owner has epoch"
                f" {self.journal.epoch}"
            )
        records += [self.snapshots.seal_last(self.world)] if seals else self.snapshots.records(self.world)
        if not records and self._has_unread():
            records.append(advance(self.world))
        if records:
            await self._journal(records)
            await self._act(decided, submitted)
        if letters:
            self._send(letters)
        if not seals:
            self.snapshots.work(self.world)

    def _has_unread(self) -> bool:
        """Return whether the journal lacks too many applied events, or lacks one for too long."""
        consumed = self.world.consumed
        if not consumed or not (self._settings.heartbeats or self._settings.has_readers):
            return False
        is_quiet = runtime.monotonic_s() - self._journalled_s >= QUIET_S
        return is_quiet or sum(run.count for run in consumed) >= UNREAD_MAX

    def _beat(self) -> None:
        if self._heartbeats is not None:
            rejected = () if self.admission is None else self.admission.rejected
            self._heartbeats.beat_as_owner(self.world, self.journal.end, rejected)

    def _apply_ready(
        self,
        topic: Topic,
        submitted: dict[int, RequestSubmitted],
        decided: list[AnyDecision],
        records: list[JournalRecord],
        letters: list[Draft],
    ) -> None:
        world, tail = self.world, self._tails[topic.name]
        ends_ns = runtime.monotonic_ns() + RUN_US_MAX * 1000
        while len(tail):
            now_us = self._clock.now_us()
            decisions = self._open_run(now_us)
            run_ends_ns = runtime.monotonic_ns() + RUN_US_MAX * 1000
            has_resumed = False
            for record in tail.take(RUN_SLICE):
                if runtime.monotonic_ns() > run_ends_ns:
                    now_us = self._clock.now_us()
                    decisions += self._open_run(now_us)
                    run_ends_ns = runtime.monotonic_ns() + RUN_US_MAX * 1000
                event = self._decode(topic, record, letters)
                if isinstance(event, RequestSubmitted):
                    submitted[record.offset] = event
                has_resumed = has_resumed or isinstance(event, RequestResumed)
                decisions_of_event = step(world, topic.name, event, now_us)
                self.first_tokens.observe(world, event, decisions_of_event, now_us)
                decisions += decisions_of_event
            decided += decisions
            records += decisions
            # The next owner must apply a resumption before the loss of the earlier ingress, which is on another topic.
            if has_resumed or len(world.consumed) >= CONSUMED_RUNS_MAX:
                records.append(advance(world))
            if runtime.monotonic_ns() > ends_ns:
                return

    def _open_run(self, now_us: int) -> list[AnyDecision]:
        decisions = open_run(self.world, now_us)
        self.first_tokens.observe(self.world, None, decisions, now_us)
        return decisions

    def _decode(self, topic: Topic, record: Record, letters: list[Draft]) -> InputEvent | None:
        try:
            event: InputEvent = event_of(topic, record)
        except DecodeError as error:
            logger.warning("moved a record that does not decode to %s: %s", DEAD_LETTERS.name, error)
            letters.append(self._dead_letter(record, str(error)))
            return None
        if isinstance(event, RequestSubmitted) and event.model != self._settings.group:
            # The core rejects the request; the dead letter lets the operator find the producer.
            reason = f"this partition belongs to the group {self._settings.group}, not to {event.model}"
            letters.append(self._dead_letter(record, reason))
        return event

    def _dead_letter(self, record: Record, reason: str) -> Draft:
        self.dead_letters += 1
        return dead_letter(record, self._settings.partition, reason)

    async def _journal(self, records: Sequence[JournalRecord]) -> None:
        await self.journal.append(records)
        self._journalled_s = runtime.monotonic_s()
        self.snapshots.journalled(records, self.journal.end)

    async def _act(self, decided: Sequence[AnyDecision], submitted: dict[int, RequestSubmitted]) -> None:
        drafts: list[Draft] = []
        for decision in decided:
            self.tally.count(decision)
            if isinstance(decision, RequestRouted):
                request = self.world.requests.get(decision.request_id)
                if request is None:
                    continue  # the request ended in the same turn, so its work is cancelled
                if (request.stage, request.stage_attempt) != (decision.stage, decision.attempt):
                    continue  # the worker was lost in the same turn, so this attempt is stale
                epoch = decision.owner_epoch
                if request.submitted.is_external:
                    drafts.append(self._destination(request, epoch, decision))
                    continue
                # Look up by offset: the same turn may hold a rejected submission with the same id.
                submission = submitted.get(request.submitted.offset) or await self._submissions.at(
                    request.submitted.offset
                )
                to = address_of(self._settings.group, decision)
                grown, hint = self._reports_output(decision.pool), expected_blocks(decision.terms)
                drafts.append(encode_work(to, request, epoch, submission, report_output=grown, store_blocks=hint))
                continue
            drafts += encode_effects(self._settings.group, decision, self._settings.partition)
            if isinstance(decision, AdapterPlaced):
                drafts += self._commands(f"{decision.command_id}{UNLOAD}")
            if isinstance(decision, CommandSent | AdapterPlaced):
                drafts += self._commands(decision.command_id)
        self._submissions.forget()
        self._send(drafts)

    def _send(self, drafts: Sequence[Draft]) -> None:
        """Append effects and dead letters, but drop those that no topic accepts. Their requests end at the deadline."""
        try:
            self._log.append_soon(drafts)
        except ValueError as error:
            if len(drafts) == 1:
                self.unsent += 1
                logger.error("dropped a record that cannot be appended: %s", error)  # noqa: TRY400
                return
            for draft in drafts:
                self._send([draft])

    def _destination(self, request: ActiveRequest, owner_epoch: int, decision: RequestRouted | None = None) -> Draft:
        group, fleet, grown = self._settings.group, self.world.fleet, self._reports_output(request.submitted.pool)
        return encode_destination(group, request, owner_epoch, fleet, report_output=grown, decision=decision)

    def _reports_output(self, pool: str) -> bool:
        return self.world.pools[pool].router.track_output_blocks

    async def _finish_interrupted(self, recovered: Standby, *, was_sealed: bool) -> list[Unconfirmed]:
        """Journal the decisions that the previous owner did not write, and send orders to workers again.

        Workers ignore attempts that they have. If the previous owner sealed, all its work is durable. Returns the new
        decisions whose effects `_send_again` sends.
        """
        pending: list[JournalRecord] = list(recovered.followed.pending)
        if pending:
            await self._journal(pending)
        owner_epoch = self.world.owner_epoch
        drafts = list(self._resyncs())
        for command in self.world.commands.pending():
            drafts += self._commands(command.command_id)
        for request in () if was_sealed else self.world.requests.active():
            worker = self.world.fleet.get(request.worker_id)
            if request.on_worker and worker is not None:
                if request.submitted.is_external:
                    drafts.append(self._destination(request, owner_epoch))
                    continue
                submission = await self._submissions.at(request.submitted.offset)
                report_output = self._reports_output(request.submitted.pool)
                to = self._address(worker, request.worker_epoch)
                drafts.append(encode_work(to, request, owner_epoch, submission, report_output=report_output))
        self._submissions.forget()
        self._send(drafts)
        return [decided for decided in pending if isinstance(decided, Unconfirmed)]

    def _send_again(self, unconfirmed: Sequence[Unconfirmed]) -> None:
        """Send effects of earlier decisions again, which may be missing. Ingresses ignore repeated responses.

        Called once the owner has applied all requests, because a later request may use the same id.
        """
        missing = [decided for decided in unconfirmed if not is_superseded(self.world, decided)]
        group, partition = self._settings.group, self._settings.partition
        self._send([draft for decided in missing for draft in encode_effects(group, decided, partition)])

    def _commands(self, command_id: str) -> Iterator[Draft]:
        pending = self.world.commands.get(command_id)
        if pending is not None:
            world = self.world
            yield from encode_commands(self._settings.group, pending, world.fleet, world.owner_epoch, world.now_us)

    def _resyncs(self) -> Iterator[Draft]:
        for cursor in self.world.index.resyncing():
            worker = self.world.fleet.get(cursor.worker_id)
            assert worker is not None, "the index holds only members of the fleet"
            to = self._address(worker, cursor.worker_epoch)
            yield encode_reannounce(to, self.world.owner_epoch, cursor.rank, cursor.last_seq)

    def _address(self, worker: FleetWorker, epoch: int) -> WorkerAddress:
        return WorkerAddress(self._settings.group, worker.spec.pool, worker.slot, worker.spec.worker_id, epoch)

    def _start_clock(self) -> None:
        self._clock.resume(self.world.now_us)
        if self._clock.ahead_us > CLOCK_AHEAD_US:
            logger.warning(
                "the clock of the previous owner was %.1f s ahead of this machine's; time continues from its last "
                "reading. Check the clock synchronisation of both machines",
                self._clock.ahead_us / 1e6,
            )

    async def _catch_up(self, topics: Sequence[Topic]) -> None:
        """Repeat `turn` until these topics are applied up to their current ends."""
        view, partition = self.world.view, self._settings.partition
        found = await asyncio.gather(*(self._log.end(topic.name, partition) for topic in topics))
        ends = {topic.name: end for topic, end in zip(topics, found, strict=True)}
        while behind := [topic for topic, end in ends.items() if view.get(topic, 0) < end]:
            await self.turn(topics)
            self._beat()
            if any(view.get(topic, 0) < ends[topic] for topic in behind) and not self._any_ready(topics):
                try:
                    async with asyncio.timeout(CAUGHT_UP_S):
                        await self._wake.wait()
                except TimeoutError:
                    text = (
                        f"no record of {', '.join(behind)} arrived for {CAUGHT_UP_S} s, although the log holds more;"
                        " check the broker and restart the router"
                    )
                    raise LogError(text) from None

    async def _configure_pools(self) -> None:
        settings, pools = self._settings, self.world.settings.configured()
        wanted = list(settings.pools)
        if not wanted:
            wanted = [msgspec.structs.replace(pools[name], router=settings.router) for name in sorted(pools)]
        changed: list[Event] = [pool for pool in wanted if pools.get(pool.pool) != pool]
        routing = settings.routing
        if routing is not None and routing != self.world.settings.routing_of(settings.group):
            changed.append(PoolRoutingConfigured(model=settings.group, routing=routing, at_us=runtime.wall_us()))
        if changed:
            await self._append(CONTROL, changed)
            await self._catch_up([CONTROL])

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


def steady_clock() -> Callable[[], int]:
    """Return a clock in microseconds that starts at the wall clock and ignores its later steps."""
    offset_ns = runtime.wall_ns() - runtime.monotonic_ns()
    return lambda: (offset_ns + runtime.monotonic_ns()) // 1000


class RunClock:
    """Clock of an owner, which never goes backwards. All events of a run share one reading.

    `ahead_us` is how far the last recorded reading was ahead of this machine's clock at the takeover.
    """

    def __init__(self, clock_us: Callable[[], int]) -> None:
        self._clock_us = clock_us
        self._last_us = 0
        self.ahead_us = 0

    def resume(self, recorded_us: int) -> None:
        """Continue from the last recorded reading."""
        self._last_us = recorded_us
        self.ahead_us = max(0, recorded_us - self._clock_us())

    def now_us(self) -> int:
        self._last_us = max(self._last_us, self._clock_us() + self.ahead_us)
        return self._last_us


class DecisionTally:
    """Counts of an owner's decisions: `prefills` by ("remote" or "local", reason), `pools` by (pool, role, reason)."""

    def __init__(self) -> None:
        self.stages: Counter[str] = Counter()
        self.prefills: Counter[tuple[str, str]] = Counter()
        self.pools: Counter[tuple[str, str, str]] = Counter()

    def count(self, decision: AnyDecision) -> None:
        match decision:
            case RequestRouted():
                self.stages[decision.stage] += 1
                if (placement := decision.prefill) is not None:
                    self.prefills["remote" if placement.remote else "local", placement.reason] += 1
            case RequestHeld() | RequestRejected():
                pass
            case _:
                return
        self.pools.update((choice.pool, choice.role, choice.reason) for choice in decision.pools)


async def recover(
    log: Log, partition: int, end: int, custom: CustomPolicies = ONLY_BUILT_IN, standby: Standby | None = None
) -> Standby:
    """Return a replica that has followed the journal to `end`: `standby` if it can follow, otherwise a new replica.

    Raises OtherRules, RecoveryDiverged, PolicyNotAllowed, or LogError if a part of the log is missing or damaged.
    """
    if standby is not None:
        start = standby.position
        try:
            await standby.catch_up(end)
        except LogError as error:
            logger.warning("the standby cannot follow the journal, recovering from the newest snapshot: %s", error)
        else:
            await standby.prepare_claim()
            logger.info("the standby followed the last %d journal records", end - start)
            return standby
    cold = Standby(log, partition, custom=custom, waits_for_seal=True)
    await cold.catch_up(end)
    await cold.prepare_claim()
    logger.info("recovered up to journal offset %d, %d workers", end, len(cold.world.fleet))
    return cold


def is_superseded(world: World, decided: Unconfirmed) -> bool:
    """Return whether another request or command uses the same id, so that the effect would end it."""
    if isinstance(decided, CommandSent | CommandEnded):
        return world.commands.get(decided.command_id) is not None
    if not isinstance(decided, RequestRejected | RequestRepeated | RequestAborted | KvReleased):
        return False
    request = world.requests.get(decided.request_id)
    if isinstance(decided, RequestRejected | RequestRepeated):
        # The other request may be the older one because of which this one was rejected, for another client.
        return request is not None and request.submitted.reply_slot == decided.reply_slot
    if request is None or not isinstance(decided, KvReleased):
        return request is not None
    has_kv = request.prefilled is not None or request.phase is Phase.REMOTE_PREFILL
    return has_kv and request.prefills <= decided.attempt
