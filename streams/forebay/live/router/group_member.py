"""Serve one group in a router process: as a standby until this router should claim the group, then as its owner.

Theory of operation. The newest valid claim owns the group. A member follows the journal and the heartbeats of its
group. It claims when `forebay.live.router.succession` finds that the owner is silent or has released the group, and
only with a standby that has derived the journal up to its end. A claim by a router that could not continue would leave
the group without an owner.

The control partitions rotate over the live routers, so that each router is preferred for as many groups as the others.
An owner keeps its group until the standby of the preferred router has caught up. The owner then seals the journal, and
the other router claims at once. If the log fails a read or an append, for example while a broker restarts, the member
retries after a pause.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from forebay.core.world import CORE_VERSION
from forebay.events.topics import DECISIONS
from forebay.live.heartbeats import HeartbeatWriter
from forebay.live.owner.journal_writer import OwnershipLost
from forebay.live.owner.owner import Owner
from forebay.live.router.succession import LIVE_S, Backoff, Succession, may_have_rules
from forebay.live.standby import STOPS, Standby
from forebay.transport.base import Log, LogError
from forebay.transport.heartbeats import RouterHeartbeats

logger = logging.getLogger(__name__)

RETRY_MAX_S = 30.0  # pauses after a log failure double, because each claim adds a journal record
HANDOVER_RECORDS = 10_000  # journal records that a standby follows within the time of a planned stop


class GroupMember:
    """Member of one group on one router. `standby` is None while this router owns the group.

    `on_owned` is called with the owner after it has started, and with None when its ownership has ended. The pause
    `retry_s` after a log failure doubles with each failure up to `RETRY_MAX_S`.
    """

    def __init__(
        self,
        log: Log,
        group: str,
        partition: int,
        router_id: str,
        *,
        new_owner: Callable[[], Owner],
        new_standby: Callable[[], Standby],
        on_owned: Callable[[Owner | None], None],
        retry_s: float,
    ) -> None:
        self._log = log
        self.group = group
        self.partition = partition
        self._router_id = router_id
        self._new_owner = new_owner
        self._new_standby = new_standby
        self._on_owned = on_owned
        self._retry_s = retry_s
        self._heartbeats = RouterHeartbeats(log, group)
        self._backoff = Backoff()
        self._stopped = asyncio.Event()
        self.standby: Standby | None = None
        self._failed: str | None = None

    @property
    def stopped(self) -> str | None:
        """Why this router cannot derive the records of the owner, although both have the same rules; None if it can."""
        return self._failed if self.standby is None else self.standby.stopped

    @property
    def has_owner(self) -> bool:
        """Whether the group has an owner, according to its heartbeats."""
        return self._heartbeats.has_owner

    def stop(self) -> None:
        """End `run`. If this router is the owner, it first seals its journal."""
        self._stopped.set()
        self._heartbeats.changed.set()

    async def run(self) -> None:
        pause_s = self._retry_s
        standby: Standby | None = None
        while not self._stopped.is_set():
            following = asyncio.create_task(self._heartbeats.follow(self.partition), name="heartbeats")
            try:
                while not self._stopped.is_set():
                    standby = standby or self._new_standby()
                    if await self._until_due(standby, following):
                        followed, standby = standby, None
                        await self._own(followed, following)
                    elif standby.failed is not None:
                        self._failed, standby = standby.failed, None
                        await self._wait_for_change()
                        self._failed = None
                    pause_s = self._retry_s
            except LogError as error:
                standby = None
                logger.warning("the log failed for the group %s, retrying in %g s: %s", self.group, pause_s, error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stopped.wait()
                pause_s = min(2 * pause_s, RETRY_MAX_S)
            finally:
                await _cancel(following)

    async def _until_due(self, standby: Standby, following: "asyncio.Task[None]") -> bool:
        """Run the standby until this router should claim the group, or the standby fails, or the router stops.

        Returns True only if the standby has followed the journal up to its end. Raises LogError if the log fails.
        """
        writer = HeartbeatWriter(self._log, self.partition, self.group, self._router_id)
        succession = Succession(
            standby,
            self._heartbeats,
            self._router_id,
            self._is_preferred,
            lambda: writer.probe(standby, preferred=self._is_preferred()),
            self._backoff,
        )
        self.standby = standby
        beating = asyncio.create_task(writer.beat_as_standby(standby, self._is_preferred), name="standby heartbeats")
        try:
            while not self._stopped.is_set():
                due = asyncio.create_task(succession.until_due(), name="succession")
                running = asyncio.create_task(standby.run(), name="standby")
                await _race(due, running, asyncio.create_task(_wait(self._stopped)), keep=(following,))
                if due.cancelled():
                    return False
                epoch = standby.world.owner_epoch
                await standby.catch_up(await self._log.end(DECISIONS.name, self.partition))
                if standby.world.owner_epoch == epoch and standby.blocked is None:
                    return True  # otherwise another router claimed meanwhile
            return False
        except STOPS as error:
            # The other groups continue. This group needs an operator or another router.
            logger.error("this router cannot own the group %s: %s", self.group, error)  # noqa: TRY400
            return False
        finally:
            self.standby = None
            writer.close()
            await _cancel(beating)

    def _is_preferred(self) -> bool:
        """Whether this router should own the group, as far as the heartbeats show which routers are alive."""
        return self._preferred() == self._router_id and not self._backoff.delay_s

    def _preferred(self) -> str:
        owner, age_s = self._heartbeats.owner, self._heartbeats.owner_age_s
        routers = {self._router_id, *(beat.router_id for beat in self._heartbeats.standbys(LIVE_S))}
        # Also a silent or released one. Otherwise the place of each router would change at the moment of the claims.
        if owner is not None and age_s is not None and age_s < LIVE_S:
            routers.add(owner.router_id)
        return sorted(routers)[self.partition % len(routers)]

    async def _own(self, standby: Standby, following: "asyncio.Task[None]") -> None:
        """Own the group until another router claims it, or this router hands it over or stops. Raises LogError."""
        owner, beat = self._new_owner(), self._heartbeats.owner
        if beat is not None and beat.owner_epoch == standby.world.owner_epoch:
            standby.owner_seen_us = beat.at_us
        try:
            await owner.start(standby)
            self._on_owned(owner)
            running = asyncio.create_task(owner.run(), name=f"owner of {self.partition}")
            try:
                await _race(asyncio.create_task(self._until_successor(owner)), keep=(following, running))
                await owner.stop()
                await running
                await owner.close()
            finally:
                await _cancel(running)
            self._backoff.clear()
        except OwnershipLost as error:
            logger.warning("no longer the owner of %s: %s", self.group, error)
            self._backoff.lost()
        except STOPS as error:
            logger.error("this router cannot own the group %s: %s", self.group, error)  # noqa: TRY400
            self._backoff.lost()
        finally:
            owner.drop()
            self._on_owned(None)

    async def _until_successor(self, owner: Owner) -> None:
        """Wait until the router stops, or another router with a current standby is preferred.

        A router with other decision rules does not count, because an upgrade would change the rules back and forth.
        """
        heartbeats = self._heartbeats
        while not self._stopped.is_set():
            heartbeats.changed.clear()
            preferred = self._preferred()
            for beat in heartbeats.standbys(LIVE_S):
                is_near = owner.journal.end - beat.position <= HANDOVER_RECORDS
                is_near &= beat.owner_epoch == owner.world.owner_epoch  # a new router knows no others yet
                has_rules = may_have_rules(beat, CORE_VERSION)
                if beat.router_id == preferred != self._router_id and beat.preferred and is_near and has_rules:
                    logger.info("hand over the group %s to the router %s", self.group, beat.router_id)
                    return
            await heartbeats.changed.wait()

    async def _wait_for_change(self) -> None:
        """Wait until the router stops, or a newer snapshot may help a new standby."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_MAX_S):
                await self._stopped.wait()


async def _race(*tasks: "asyncio.Task[None]", keep: "Sequence[asyncio.Task[None]]" = ()) -> None:
    """Wait until a task ends, and cancel the others except those in `keep`. Raises the error of a task that failed."""
    try:
        await asyncio.wait((*tasks, *keep), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(*tasks)
    for task in (*tasks, *keep):
        if task.done() and not task.cancelled():
            task.result()


async def _cancel(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
