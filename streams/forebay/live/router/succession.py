"""Decide when a standby claims its group.

Theory of operation. The newest valid claim in the journal owns the group, so every router may claim at any time without
doing harm. A claim costs a takeover, though. A standby therefore claims only if the owner has released the group, or if
the owner's heartbeats have stopped.

Missing heartbeats prove nothing while the broker is unreachable or this process is paused. A standby therefore appends
a heartbeat of its own, and claims only if it reads this heartbeat within `PROBE_S`, and none of the owner before it.
The preferred router claims first, and the other standbys wait for `STAGGER_S` more each. Standbys with other decision
rules than the owner wait for all that have its rules, so an upgrade changes the rules once, when the last router of the
old version stops.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

from forebay import runtime
from forebay.core.world import CORE_VERSION
from forebay.events.heartbeats import RouterHeartbeat
from forebay.live.standby import Standby
from forebay.transport.heartbeats import RouterHeartbeats

logger = logging.getLogger(__name__)

SILENT_S = 0.8  # three missed heartbeats; a turn of a busy owner rarely takes a tenth of this
STAGGER_S = 0.3  # a claim and its first heartbeat are usually read within this time
# Until a router claims a group that nobody has owned, or whose owner has stopped as planned while no other router
# followed it. Routers that start together learn of each other by their first heartbeats in this time.
START_S = 0.5
PROBE_S = 0.5  # a heartbeat is usually appended and read within 30 ms
CHECK_S = 0.25  # maximum time until a released journal is noticed without its heartbeat
LIVE_S = 2.5  # standbys write a heartbeat every second
BACKOFF_S, BACKOFF_MAX_S = 1.0, 60.0
STEADY_S = 60.0  # losses are forgotten after this time


def may_have_rules(beat: RouterHeartbeat, rules: int) -> bool:
    """Return whether a router has this version of the decision rules, or does not report its version."""
    return beat.core_version in (0, rules)


class Backoff:
    """Time by which a router that lost a group delays its next claim. It doubles with each loss, and is jittered."""

    def __init__(self) -> None:
        self._base_s = 0.0
        self._delay_s = 0.0
        self._lost_s = 0.0

    @property
    def delay_s(self) -> float:
        """Additional silence before this router claims; 0 if it lost no group recently."""
        if self._delay_s and runtime.monotonic_s() - self._lost_s > STEADY_S + self._base_s:
            self.clear()
        return self._delay_s

    def lost(self) -> None:
        self._base_s = min(2 * self._base_s, BACKOFF_MAX_S) if self.delay_s else BACKOFF_S
        self._delay_s = self._base_s * (1 + runtime.random_int(4) / (1 << 32))
        self._lost_s = runtime.monotonic_s()

    def clear(self) -> None:
        self._base_s = self._delay_s = 0.0


class Succession:
    """Watch of one standby over its owner.

    `is_preferred` returns whether this router should own the group. `probe` appends a heartbeat of this standby, and
    returns its offset or None if that failed.
    """

    def __init__(
        self,
        standby: Standby,
        heartbeats: RouterHeartbeats,
        router_id: str,
        is_preferred: Callable[[], bool],
        probe: Callable[[], Awaitable[int | None]],
        backoff: Backoff,
    ) -> None:
        self._standby = standby
        self._heartbeats = heartbeats
        self._router_id = router_id
        self._is_preferred = is_preferred
        self._probe = probe
        self._backoff = backoff
        self._epoch = -1
        self._since_s = runtime.monotonic_s()
        self._saw_owner = False

    async def until_due(self) -> None:
        await self._standby.caught_up.wait()
        self._since_s = runtime.monotonic_s()
        self._epoch = self._standby.world.owner_epoch
        while True:
            self._heartbeats.changed.clear()
            left_s = self._due_after_s() - self._silent_s()
            if left_s > 0:
                try:
                    async with asyncio.timeout(min(left_s, CHECK_S)):
                        await self._heartbeats.changed.wait()
                except TimeoutError:
                    pass
            elif await self._is_confirmed():
                reason = "is released" if self._is_released() else f"has had no owner for {self._silent_s():.2f} s"
                logger.info("the group %s %s, so this router claims it", self._heartbeats.group, reason)
                return

    def _silent_s(self) -> float:
        """Return the seconds since the owner's newest heartbeat, since its claim, or since the watch began."""
        epoch = self._standby.world.owner_epoch
        if epoch != self._epoch:
            self._epoch, self._since_s = epoch, runtime.monotonic_s()
        silent_s = runtime.monotonic_s() - self._since_s
        owner, age_s = self._heartbeats.owner, self._heartbeats.owner_age_s
        if owner is None or age_s is None or owner.owner_epoch < epoch:
            return silent_s
        self._saw_owner = True
        return min(silent_s, age_s)

    def _due_after_s(self) -> float:
        """Return the silence in seconds after which this router claims."""
        if self._standby.blocked is not None and not self._has_unread_release():
            return math.inf
        rules = self._standby.validity.rules
        place = (rules != CORE_VERSION, not self._is_preferred(), self._router_id)
        others = [beat for beat in self._heartbeats.standbys(LIVE_S) if beat.router_id != self._router_id]
        before = sum((not may_have_rules(beat, rules), not beat.preferred, beat.router_id) < place for beat in others)
        if self._is_released():
            silent_s = 0.0 if self._saw_owner else START_S
        else:
            silent_s = SILENT_S if self._epoch >= 0 else START_S
        return silent_s + before * STAGGER_S + self._backoff.delay_s

    def _is_released(self) -> bool:
        owner = self._heartbeats.owner
        # The standby may not have read the claim of this owner yet.
        return self._standby.released or (owner is not None and owner.released and owner.owner_epoch >= self._epoch)

    def _has_unread_release(self) -> bool:
        """Return whether an owner has sealed a part of the journal that the standby has not read yet."""
        owner = self._heartbeats.owner
        return owner is not None and owner.released and owner.position > self._standby.position

    async def _is_confirmed(self) -> bool:
        """Return whether the group is silent although heartbeats arrive, or is released or new."""
        if self._epoch < 0 or self._is_released():
            return True
        sent_s = runtime.monotonic_s()
        try:
            async with asyncio.timeout(PROBE_S):
                offset = await self._probe()
                if offset is not None:
                    await self._heartbeats.reach(offset + 1)
        except TimeoutError:
            offset = None
        if offset is None or runtime.monotonic_s() - sent_s > PROBE_S:
            self._since_s = runtime.monotonic_s()
            return False
        return self._silent_s() >= self._due_after_s()
