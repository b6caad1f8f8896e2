"""Execute the planner's decisions, each once, and record what became of them."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from forebay import runtime
from forebay.core.scaling.state import Outcome, PoolKey, changed_pools
from forebay.events.scaling import (
    ReachedSize,
    RefusedPool,
    ScalingApplied,
    ScalingDecided,
    ScalingEvent,
    ScalingRefused,
)
from forebay.live.planner.topic import ScalingTopic
from forebay.transport.base import Log

logger = logging.getLogger(__name__)

Refusal = Literal["stale", "failed"]
Result = Literal["applied", "partial"] | Refusal
STALE_MAX = 64  # stale decisions that wait for their refusal; a planner that meets more of them has given up


class ActuatorError(Exception):
    """An actuator could change nothing. The message says why."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Workers that run or start, by pool; a missing pool has the requested size. `message` explains other sizes."""

    sizes: Mapping[PoolKey, int]
    message: str = ""


class Actuator(Protocol):
    """Starts and stops workers."""

    name: str
    pools: frozenset[PoolKey]

    async def scale(self, sizes: Mapping[PoolKey, int]) -> Reached:
        """Bring pools to these numbers of workers, and return without waiting until workers are ready or drained.

        A repeated call with the same sizes changes nothing. Raises ActuatorError if nothing could be changed.
        """
        ...


class ActuatorService:
    """Executes the decisions on the topic with one actuator, for the pools that it manages.

    Each actuator of the topic replies for its own pools. After a restart it executes the changes without reply again,
    which has no effect if they were executed before. The result `partial` means that a size was not reached.
    """

    def __init__(self, log: Log, actuator: Actuator) -> None:
        self.results: Counter[Result] = Counter()
        self._actuator = actuator
        self._caught_up = False
        self._stale: list[tuple[int, frozenset[PoolKey]]] = []
        self._topic = ScalingTopic(log, self._on_record)

    async def run(self) -> None:
        """Execute decisions until cancelled. Raises LogError if the log fails."""
        await self._topic.catch_up()
        self._caught_up = True
        await self._topic.follow_beside(self._run())

    def _on_record(self, offset: int, event: ScalingEvent, outcome: Outcome) -> None:
        # Decisions that were stale before the start have a refusal already, or their planner is gone.
        if not self._caught_up or outcome != "stale" or not isinstance(event, ScalingDecided) or event.advisory:
            return
        if pools := self._actuator.pools & changed_pools(event).keys():
            self._stale = [*self._stale, (offset, pools)][-STALE_MAX:]

    async def _run(self) -> None:
        while True:
            self._topic.changed.clear()
            while self._stale:
                refused, pools = self._stale.pop(0)
                await self._refuse(refused, pools, "stale", "its planner had not applied all records before it")
            own = {key: change for key, change in self._topic.state.open.items() if key in self._actuator.pools}
            if own:
                decision = min(change.decision for change in own.values())
                sizes = {key: one.decided.to_size for key, one in own.items() if one.decision == decision}
                await self._execute(decision, sizes)
            else:
                await self._topic.changed.wait()

    async def _execute(self, offset: int, sizes: Mapping[PoolKey, int]) -> None:
        try:
            reached = await self._actuator.scale(sizes)
        except ActuatorError as error:
            logger.error("decision %d failed: %s", offset, error)  # noqa: TRY400 - the message is enough
            await self._refuse(offset, sizes, "failed", str(error))
            return
        pools = tuple(
            ReachedSize(group=group, pool=pool, size=reached.sizes.get((group, pool), size))
            for (group, pool), size in sizes.items()
        )
        await self._topic.append(
            ScalingApplied(
                decision=offset,
                actuator=self._actuator.name,
                pools=pools,
                message=reached.message,
                at_us=runtime.wall_us(),
            )
        )
        is_partial = any(one.size != sizes[one.group, one.pool] for one in pools)
        self.results["partial" if is_partial else "applied"] += 1

    async def _refuse(self, offset: int, pools: Iterable[PoolKey], reason: Refusal, message: str) -> None:
        await self._topic.append(
            ScalingRefused(
                decision=offset,
                actuator=self._actuator.name,
                pools=tuple(RefusedPool(group=group, pool=pool) for group, pool in sorted(pools)),
                reason=reason,
                message=message,
                at_us=runtime.wall_us(),
            )
        )
        self.results[reason] += 1
