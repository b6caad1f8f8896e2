"""Orders of an operator to a planner, and their effect: the next decisions, and the replies of actuators."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from forebay import runtime
from forebay.core.scaling.state import Outcome, PoolKey, changed_pools
from forebay.events.names import unknown_name
from forebay.events.scaling import (
    PlannerClaimed,
    PlannerPaused,
    PoolSizeSet,
    ScalingApplied,
    ScalingDecided,
    ScalingEvent,
    ScalingRefused,
)
from forebay.events.topics import SCALING
from forebay.live.planner.topic import ScalingTopic
from forebay.replay.scaling.decisions import REASONS
from forebay.replay.scaling.reader import has_scaling, pool_text
from forebay.runtime.errors import ConfigError
from forebay.transport.base import Log
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings

WATCHED = ScalingDecided | ScalingApplied | ScalingRefused


@dataclass(frozen=True, slots=True)
class Order:
    event: PlannerPaused | PoolSizeSet  # record of the order
    text: str  # the order in words
    pool: PoolKey | None = None  # pool whose size it sets or releases; None for all pools

    def decides(self, decided: ScalingDecided) -> bool:
        """Return whether a decision that knows the order follows it, and does not have to wait."""
        if self.pool is None:
            return True
        found = next((one for one in decided.pools if (one.group, one.pool) == self.pool), None)
        return found is not None and found.reason not in {"in_progress", "no_observation"}


OnStep = Callable[[str, str], None]
"""Called with each step of an order (`recorded`, `decision`, `outcome`, or `problem`: it has no effect) and a text."""


@asynccontextmanager
async def scaling_on_kafka(settings: KafkaSettings) -> AsyncIterator[KafkaLog]:
    """Open Kafka for orders. Raises ConfigError if the topic `scaling` is missing, LogError if Kafka fails."""
    log = await KafkaLog.open(settings)
    try:
        if not await has_scaling(log):
            name = settings.topic(SCALING.name)
            raise ConfigError(
                f"{settings.bootstrap} has no topic {name}; check --namespace, or use `forebay topics create`"
            )
        yield log
    finally:
        await log.close()


def pause_order(operator: str, *, paused: bool) -> Order:
    event = PlannerPaused(paused=paused, operator=operator, at_us=runtime.wall_us())
    return Order(event, "pause the planner" if paused else "resume the planner")


def size_order(pools: list[PoolKey], pool: str, size: int | None, operator: str) -> Order:
    """Return the order to set the size of a pool, or to release it.

    Raises ConfigError if no planner scales the pool.
    """
    known = {pool_text(one): one for one in pools}
    if pool not in known:
        raise ConfigError(unknown_name("pool", pool, known))
    key = known[pool]
    event = PoolSizeSet(group=key[0], pool=key[1], size=size, operator=operator, at_us=runtime.wall_us())
    return Order(event, f"release {pool}" if size is None else f"set {pool} to {_workers(size)}", key)


async def execute_order(
    log: Log, make: Callable[[list[PoolKey]], Order], timeout_s: float | None, on_step: OnStep
) -> bool:
    """Record an order made for the pools that planners scale, and wait for its effect. Return whether it was seen.

    If `timeout_s` is None, return true once the order is recorded. Raises ConfigError if the order cannot be recorded,
    LogError if the log cannot be read or written.
    """
    watch = EffectWatch(log, on_step)
    await watch.topic.catch_up()
    if not watch.pools:
        raise ConfigError("no planner has claimed the topic scaling; start one with `forebay planner run`")
    order = make(list(watch.pools))
    async with watch.following():
        offset, _ = await watch.topic.append(order.event)
        on_step("recorded", f"{order.text}, at offset {offset} by {order.event.operator}")
        if timeout_s is None:
            return True
        if watch.topic.state.claim is None:
            on_step("problem", f"no planner is active; the next one follows the record at offset {offset}")
            return False
        try:
            async with asyncio.timeout(timeout_s):
                return await watch.effect(order, offset)
        except TimeoutError:
            text = f"{watch.waits_for} within {timeout_s:g} s; the record at offset {offset} stays in force"
            on_step("problem", text)
            return False


class EffectWatch:
    """Follows the topic, and waits for the effect of an order. `waits_for` says what has not happened yet."""

    def __init__(self, log: Log, on_step: OnStep) -> None:
        self.topic = ScalingTopic(log, self._on_record)
        self.pools: dict[PoolKey, None] = {}
        self.waits_for = ""
        self._on_step = on_step
        self._planner = ""
        self._is_following = False
        self._records: asyncio.Queue[tuple[int, ScalingEvent]] = asyncio.Queue()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the topic while the body runs. Raises LogError if the log cannot be read."""
        body = asyncio.current_task()
        assert body is not None
        self._is_following = True
        following = asyncio.create_task(self.topic.follow())
        following.add_done_callback(lambda task: None if task.cancelled() else body.cancel())
        try:
            yield
        except asyncio.CancelledError:
            if following.done():
                following.result()
            raise
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def effect(self, order: Order, offset: int) -> bool:
        """Wait for the decision that follows an order at `offset`, and for its execution. Return whether it succeeded.

        A decision about a pool is executed by an actuator, unless it is advisory or keeps the size of the pool.
        """
        self.waits_for = f"the planner {self._planner} has not decided"
        place, decided = await self._decision(order, offset)
        for pool in decided.pools:
            if order.pool in {None, (pool.group, pool.pool)}:
                size = f"{pool.from_size} -> {pool.to_size}" if pool.to_size != pool.from_size else f"{pool.to_size}"
                text = f"{place}: {pool.group}/{pool.pool} {size} ({pool.reason}): {REASONS[pool.reason]}"
                self._on_step("decision", text)
        if order.pool is None or order.pool not in changed_pools(decided):
            return True
        if decided.advisory:
            self._on_step("outcome", "advisory: the planner only records its decisions")
            return True
        self.waits_for = f"no actuator of {pool_text(order.pool)} has replied to decision {place}"
        reply = await self._reply(place, order.pool)
        return self._report_reply(reply, order.pool, changed_pools(decided)[order.pool].to_size)

    async def _decision(self, order: Order, offset: int) -> tuple[int, ScalingDecided]:
        while True:
            place, event = await self._records.get()
            if isinstance(event, ScalingDecided) and event.after >= offset:
                if order.decides(event):
                    return place, event
                found = next((one for one in event.pools if (one.group, one.pool) == order.pool), None)
                reason = "the planner does not scale the pool any more" if found is None else REASONS[found.reason]
                self.waits_for = (
                    f"decision {place} could not follow the order ({reason.rstrip('.')}), and no later one did"
                )

    async def _reply(self, decision: int, pool: PoolKey) -> ScalingApplied | ScalingRefused:
        while True:
            _, event = await self._records.get()
            if not isinstance(event, ScalingApplied | ScalingRefused) or event.decision != decision:
                continue
            if any((one.group, one.pool) == pool for one in event.pools):
                return event

    def _on_record(self, offset: int, event: ScalingEvent, outcome: Outcome) -> None:
        if isinstance(event, PlannerClaimed):
            self._planner = event.planner_id
            self.pools |= dict.fromkeys((pool.group, pool.pool) for pool in event.settings.pools)
        elif self._is_following and outcome == "applied" and isinstance(event, WATCHED):
            self._records.put_nowait((offset, event))

    def _report_reply(self, reply: ScalingApplied | ScalingRefused, pool: PoolKey, size: int) -> bool:
        if isinstance(reply, ScalingRefused):
            text = f"{reply.actuator} refused decision {reply.decision}: {reply.reason}: {reply.message}"
            self._on_step("problem", text)
            return False
        reached = next(one.size for one in reply.pools if (one.group, one.pool) == pool)
        if reached != size:
            self._on_step("problem", f"{reply.actuator} reached {_workers(reached)} instead of {size}: {reply.message}")
            return False
        text = f"applied by {reply.actuator}: {pool_text(pool)} has {_workers(size)}, which may still start"
        self._on_step("outcome", text)
        return True


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"
