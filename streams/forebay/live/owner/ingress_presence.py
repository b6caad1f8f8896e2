"""Turn the leases of ingresses into `IngressJoined` and `IngressLost` events on the topic `fleet`.

Only the owner does this. It judges ingresses by the same rules as workers (see `forebay.live.owner.lease_judgement`).
An ingress that never had a lease is not a member. It cannot be lost, so none of its requests is aborted.

If clients still wait for a lost ingress, `IngressLost` follows after `RESUME_GRACE_S`, in which they may read their
responses at another ingress (`RequestResumed`). Only observed time counts, and a new owner starts the grace time again.
Meanwhile another incarnation of the ingress is not a member. If that is also lost in this time, its requests run on.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from forebay import runtime
from forebay.core.state.fleet import Fleet
from forebay.events.codec import encode
from forebay.events.fleet import FleetEvent, IngressJoined, IngressLost
from forebay.events.names import printable
from forebay.events.requests import RESUME_GRACE_S
from forebay.events.topics import FLEET
from forebay.live.owner.lease_judgement import LeaseJudge, Standing
from forebay.transport.base import Draft, Lease, Log

logger = logging.getLogger(__name__)

NAME_CHARS_MAX = 256  # the limit of names in events
GRACE_MS = round(RESUME_GRACE_S * 1000)


@dataclass(slots=True)
class _Lost:
    """Lost incarnation for which clients still wait. `waited_ms` is observed time since the loss."""

    reason: str
    waited_ms: int = 0


class IngressPresence:
    """Adds ingresses to the members of one group, and removes lost ingresses, as their leases require.

    `is_busy` returns whether clients wait for their responses at an incarnation. The loss of an incarnation that was
    busy when this owner started is logged as a warning, even if it ended before. `refused` counts rejected leases, and
    ingresses that foreign records changed, by reason.
    """

    def __init__(
        self, log: Log, partition: int, owner_epoch: int, fleet: Fleet, *, is_busy: Callable[[str], bool]
    ) -> None:
        self._log = log
        self._partition = partition
        self._owner_epoch = owner_epoch
        self._is_busy = is_busy
        self._judge = LeaseJudge()
        self._members: dict[str, str] = {}
        self._lost: dict[str, _Lost] = {}  # members in their grace time
        self._written_end = 0
        self._refused: set[str] = set()
        self._silent: dict[str, int] = {}  # deadlines of the leases of lost incarnations, by token
        self.refused: Counter[str] = Counter()
        for ingress in fleet.ingresses():
            self._members[ingress.ingress_id] = ingress.incarnation
            self._judge.add(ingress.ingress_id, ingress.incarnation, ingress.lease_ttl_ms)
        # Members of an earlier owner without requests, until this owner has seen their leases.
        self._unseen = {name for name, incarnation in self._members.items() if not is_busy(incarnation)}

    async def update(self, leases: list[Lease], fleet: Fleet, applied: int, observed_ms: int = 0) -> list[Lease]:
        """Append the changes since the last poll to `fleet`, and return the ended leases that may be deleted."""
        held = {lease.worker_id: lease for lease in leases}
        if applied >= self._written_end:
            await self._compare({one.ingress_id: one.incarnation for one in fleet.ingresses()})
        for name in self._unseen.intersection(held):
            if held[name].token == self._members[name] and not held[name].released:
                self._unseen.discard(name)
        for name in list(self._lost):
            await self._wait(name, held.get(name), observed_ms)
        for name, verdict in self._judge.poll(held, observed_ms).items():
            if verdict.standing is Standing.LOST:
                await self._lose(name, verdict.reason, held.get(name))
        others = [lease for lease in leases if lease.worker_id not in self._members]
        tokens = {lease.token for lease in leases}
        self._silent = {token: deadline_ms for token, deadline_ms in self._silent.items() if token in tokens}
        ended = [lease for lease in others if self._has_ended(lease)]
        for lease in others:
            if lease not in ended:
                await self._join(lease)
        return ended if applied >= self._written_end else []

    async def _compare(self, joined: dict[str, str]) -> None:
        """Undo foreign records of `fleet`. A member that such a record removed joins again by its lease."""
        for name in [name for name, incarnation in self._members.items() if joined.get(name) != incarnation]:
            logger.error("ingress %s joins again: a record of fleet that this router did not write removed it", name)
            self.refused["foreign_record"] += 1
            self._forget(name)
        for name, incarnation in joined.items():
            if self._members.get(name) != incarnation:
                logger.error("ingress %s joined by a record of fleet that this router did not write", printable(name))
                self.refused["foreign_record"] += 1
                await self._write_lost(name, incarnation, "it joined without a lease")

    def _forget(self, name: str) -> None:
        self._unseen.discard(name)
        if self._lost.pop(name, None) is None:
            self._judge.remove(name)
        del self._members[name]

    def _has_ended(self, lease: Lease) -> bool:
        # After a backward step of Redis's clock, the lease of a lost ingress would not expire for a long time. Only a
        # renewal after the loss shows that the ingress runs.
        return lease.released or lease.expires_in_ms <= 0 or self._silent.get(lease.token) == lease.deadline_ms

    async def _join(self, lease: Lease) -> None:
        name, token = lease.worker_id, lease.token
        if not (0 < len(name) <= NAME_CHARS_MAX and 0 < len(token) <= NAME_CHARS_MAX):
            if token not in self._refused:
                self._refused = {token}
                self.refused["name"] += 1
                logger.error(
                    "an ingress was rejected: its id has %d characters and its token %d, expected 1 to %d each",
                    len(name),
                    len(token),
                    NAME_CHARS_MAX,
                )
            return
        await self._write(
            IngressJoined(
                owner_epoch=self._owner_epoch,
                at_us=runtime.wall_us(),
                ingress_id=name,
                incarnation=token,
                lease_ttl_ms=lease.ttl_ms,
            )
        )
        self._members[name] = token
        self._judge.add(name, token, lease.ttl_ms, lease)
        logger.info("ingress %s joined", name)

    async def _lose(self, name: str, reason: str, lease: Lease | None) -> None:
        incarnation = self._members[name]
        if lease is not None and lease.token == incarnation:
            self._silent[incarnation] = lease.deadline_ms
        if name in self._unseen:
            logger.info("ingress %s ended while no router was running: %s", name, reason)
        elif lease is not None and lease.released and lease.token == incarnation:
            logger.info("ingress %s left: %s", name, reason)
        else:
            logger.warning("ingress %s is lost: %s", name, reason)
        self._judge.remove(name)
        self._lost[name] = _Lost(reason)
        await self._wait(name, lease, 0)

    async def _wait(self, name: str, lease: Lease | None, observed_ms: int) -> None:
        """Report the loss of an ingress once its grace time is over or no request waits for it, unless it is back."""
        incarnation, lost = self._members[name], self._lost[name]
        if lease is not None and lease.token == incarnation and not self._has_ended(lease):
            del self._lost[name]
            self._judge.add(name, incarnation, lease.ttl_ms, lease)
            logger.info("ingress %s renewed its lease", name)
            return
        # Capped, so that a paused owner reads the resumptions of its pause before the time is over.
        lost.waited_ms += min(observed_ms, GRACE_MS // 2)
        if lost.waited_ms >= GRACE_MS or not self._is_busy(incarnation):
            self._forget(name)
            await self._write_lost(name, incarnation, lost.reason)

    async def _write_lost(self, name: str, incarnation: str, reason: str) -> None:
        await self._write(
            IngressLost(
                owner_epoch=self._owner_epoch,
                at_us=runtime.wall_us(),
                ingress_id=name,
                incarnation=incarnation,
                reason=reason,
            )
        )

    async def _write(self, event: FleetEvent) -> None:
        (offset,) = await self._log.append([Draft(FLEET.name, self._partition, encode(FLEET, event))])
        self._written_end = offset + 1
