"""Follow the heartbeats of routers for one group, to find out whether it has an owner and how many standbys.

Ages are measured with this process's monotonic clock from the arrival of a heartbeat, so no clocks are compared.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from forebay import runtime
from forebay.events.codec import decode
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.topics import HEARTBEATS
from forebay.runtime.metrics import collector, gauge
from forebay.transport.base import Log, Record
from forebay.transport.follower import Follower
from forebay.transport.patience import until_available

OWNER_SILENT_S = 2.0  # four missed heartbeats, because a busy owner may miss one or two
STANDBY_SILENT_S = 10.0  # long, so that a standby that follows a long journal stays counted
STANDBYS_MAX = 64  # maximum number of standbys kept per group
HEARTBEATS_S = 2.5  # an owner writes four heartbeats per second, a standby one


class OwnerPresence(Protocol):
    """Owner and standbys of one group, as an ingress knows them."""

    group: str

    @property
    def owner(self) -> RouterHeartbeat | None:
        """Newest heartbeat of the owner, None if the group has had no owner yet."""
        ...

    @property
    def owner_age_s(self) -> float | None:
        """Age of the owner's newest heartbeat."""
        ...

    @property
    def has_owner(self) -> bool: ...

    def standbys(self) -> Sequence[RouterHeartbeat]: ...

    async def follow(self, partition: int) -> None:
        """Follow the owner of the group in this control partition until cancelled. Raises LogError."""
        ...


class RouterHeartbeats(Follower):
    """Owner and standbys of one group, from the heartbeats that arrive after `follow` began.

    `owner` is the newest heartbeat of the owner with the highest owner epoch. `changed` is set after each heartbeat of
    the group, and a reader clears it.
    """

    def __init__(self, log: Log, group: str, clock_s: Callable[[], float] = runtime.monotonic_s) -> None:
        super().__init__(log, HEARTBEATS)
        self.group = group
        self.owner: RouterHeartbeat | None = None
        self.changed = asyncio.Event()
        self._clock_s = clock_s
        self._owner_arrived_s = 0.0
        self._standbys: dict[str, tuple[float, RouterHeartbeat]] = {}

    @property
    def owner_age_s(self) -> float | None:
        return None if self.owner is None else self._clock_s() - self._owner_arrived_s

    @property
    def has_owner(self) -> bool:
        """Whether the owner's newest heartbeat is younger than `OWNER_SILENT_S`."""
        age_s = self.owner_age_s
        return age_s is not None and age_s < OWNER_SILENT_S

    def standbys(self, within_s: float = STANDBY_SILENT_S) -> list[RouterHeartbeat]:
        """Return the newest heartbeat of each standby not older than `within_s`, ordered by router id."""
        since_s = self._clock_s() - within_s
        return [beat for _, (at_s, beat) in sorted(self._standbys.items()) if at_s >= since_s]

    async def follow(self, partition: int) -> None:
        """Read the heartbeats in the group's control partition until cancelled. Raises LogError."""
        # Begin at the end, because older heartbeats would look new on arrival.
        end = await until_available(lambda: self._log.end(HEARTBEATS.name, partition))
        await self.follow_from(partition, end)

    def apply(self, record: Record) -> None:
        beat: RouterHeartbeat = decode(HEARTBEATS, record.value)
        if beat.group != self.group:
            return
        self.changed.set()
        if beat.role == "owner":
            self._standbys.pop(beat.router_id, None)
            if self.owner is None or beat.owner_epoch >= self.owner.owner_epoch:
                self.owner, self._owner_arrived_s = beat, self._clock_s()
        elif beat.router_id in self._standbys or len(self._standbys) < STANDBYS_MAX:
            self._standbys[beat.router_id] = self._clock_s(), beat
        else:
            self._forget_silent_standbys()

    def _forget_silent_standbys(self) -> None:
        since_s = self._clock_s() - STANDBY_SILENT_S
        self._standbys = {name: kept for name, kept in self._standbys.items() if kept[0] >= since_s}


async def owner_of(log: Log, group: str, partition: int) -> RouterHeartbeat | None:
    """Return the next heartbeat of the owner of a group, None if there is none. Raises LogError."""
    heartbeats = RouterHeartbeats(log, group)
    following = asyncio.create_task(heartbeats.follow(partition))
    try:
        async with asyncio.timeout(HEARTBEATS_S):
            while heartbeats.owner is None and not following.done():
                heartbeats.changed.clear()
                await asyncio.wait(
                    (following, waiting := asyncio.create_task(heartbeats.changed.wait())),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                waiting.cancel()
    except TimeoutError:
        return None
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    if heartbeats.owner is None:
        following.result()  # raises the error of the log
    return None if heartbeats.owner is None or heartbeats.owner.released else heartbeats.owner


@collector
def heartbeat_metrics(groups: Callable[[], Iterable[OwnerPresence]]) -> Iterator[Metric]:
    found = list(groups())
    standbys = {one.group: len(one.standbys()) for one in found}
    yield gauge("forebay_group_standbys", "routers that are standbys of the group", standbys, "group")
    ages = {one.group: one.owner_age_s for one in found if one.owner_age_s is not None}
    text = "seconds since the owner's last heartbeat arrived"
    yield gauge("forebay_owner_heartbeat_age_seconds", text, ages, "group")
