"""Execute the planner's decisions, each once, and record what became of them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from forebay import runtime
from forebay.core.scaling.state import Outcome, PoolKey
from forebay.events.scaling import ReachedSize, ScalingApplied, ScalingDecided, ScalingEvent, ScalingRefused
from forebay.live.planner.topic import ScalingTopic
from forebay.transport.base import Log

logger = logging.getLogger(__name__)

Refusal = Literal["stale", "unknown_pool", "failed"]
Result = Literal["applied", "partial"] | Refusal
STALE_MAX = 64  # stale decisions that wait for their refusal; a planner that meets more of them has given up


class ActuatorError(Exception):
    """An actuator could change nothing. The message says why."""


@dataclass(frozen=True, slots=True)
class Reached:
    """What an actuator reached.

    Attributes:
        sizes: number of workers that run or start, by pool.
        message: why a size differs from the requested one; empty if none does.
    """

    sizes: Mapping[PoolKey, int]
    message: str = ""


class Actuator(Protocol):
    """Starts and stops workers.

    Attributes:
        name: name of the actuator.
        pools: pools that it manages.
    """

    name: str
    pools: frozenset[PoolKey]

    async def scale(self, sizes: Mapping[PoolKey, int]) -> Reached:
        """Bring pools to these numbers of workers, and return without waiting until workers are ready or drained.

        A repeated call with the same sizes changes nothing. Raises ActuatorError if nothing could be changed.
        """
        ...


class ActuatorService:
    """Executes the decisions on the topic with one actuator.

    After a restart it executes the open decision again, which changes nothing if it was executed before.

    Attributes:
        results: number of replies of this process by result: `applied`, `partial` if a size was not reached, or the
            reason of a refusal.
    """

    def __init__(self, log: Log, actuator: Actuator) -> None:
        """Create a service for `actuator` on `log`."""
        self.results: Counter[Result] = Counter()
        self._actuator = actuator
        self._caught_up = False
        self._stale: list[int] = []
        self._topic = ScalingTopic(log, self._on_record)

    async def run(self) -> None:
        """Execute decisions until cancelled. Raises LogError if the log fails."""
        await self._topic.catch_up()
        self._caught_up = True
        following = asyncio.create_task(self._topic.follow(), name="scaling")
        executing = asyncio.create_task(self._run(), name="actuator")
        try:
            await asyncio.wait([following, executing], return_when=asyncio.FIRST_COMPLETED)
            for task in (following, executing):
                if task.done():
                    task.result()
        finally:
            for task in (following, executing):
                task.cancel()
            await asyncio.gather(following, executing, return_exceptions=True)

    def _on_record(self, offset: int, event: ScalingEvent, outcome: Outcome) -> None:
        # Decisions that were stale before the start have a refusal already, or their planner is gone.
        if self._caught_up and outcome == "stale" and isinstance(event, ScalingDecided) and _changes(event):
            self._stale = [*self._stale, offset][-STALE_MAX:]

    async def _run(self) -> None:
        while True:
            self._topic.changed.clear()
            while self._stale:
                refused = self._stale.pop(0)
                await self._refuse(refused, "stale", "its planner had not applied all records before it")
            if self._topic.state.open is not None:
                await self._execute(self._topic.state.open.offset, self._topic.state.open.decided)
            else:
                await self._topic.changed.wait()

    async def _execute(self, offset: int, decided: ScalingDecided) -> None:
        sizes = _changes(decided)
        unknown = sorted(sizes.keys() - self._actuator.pools)
        if unknown:
            names = ", ".join(f"{group}/{pool}" for group, pool in unknown)
            await self._refuse(offset, "unknown_pool", f"not managed: {names}")
            return
        try:
            reached = await self._actuator.scale(sizes)
        except ActuatorError as error:
            logger.error("decision %d failed: %s", offset, error)  # noqa: TRY400 - the message is enough
            await self._refuse(offset, "failed", str(error))
            return
        pools = tuple(ReachedSize(group=group, pool=pool, size=size) for (group, pool), size in reached.sizes.items())
        await self._topic.append(
            ScalingApplied(
                decision=offset,
                actuator=self._actuator.name,
                pools=pools,
                message=reached.message,
                at_us=runtime.wall_us(),
            )
        )
        is_partial = any(reached.sizes.get(pool, size) != size for pool, size in sizes.items())
        self.results["partial" if is_partial else "applied"] += 1

    async def _refuse(self, offset: int, reason: Refusal, message: str) -> None:
        await self._topic.append(
            ScalingRefused(
                decision=offset, actuator=self._actuator.name, reason=reason, message=message, at_us=runtime.wall_us()
            )
        )
        self.results[reason] += 1


def _changes(decided: ScalingDecided) -> dict[PoolKey, int]:
    """Return the sizes that a decision changes; none if it is advisory."""
    if decided.advisory:
        return {}
    return {(pool.group, pool.pool): pool.to_size for pool in decided.pools if pool.to_size != pool.from_size}
