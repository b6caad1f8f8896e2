"""`forebay planner pause`, `resume` and `set-size`: orders of an operator, and their effect."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import typer

from forebay import runtime
from forebay.cli.common.cluster_options import KafkaOptions
from forebay.cli.common.errors import complain, explained, fail
from forebay.cli.common.operator_name import operator_name
from forebay.cli.common.terminal import counted, printable
from forebay.cli.planner.source import scaling_on_kafka
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
from forebay.live.planner.topic import ScalingTopic
from forebay.replay.scaling.decisions import REASONS
from forebay.replay.scaling.journal import pool_text
from forebay.transport.base import Log
from forebay.transport.kafka.settings import KafkaSettings

NO_EFFECT = 1
WATCHED = ScalingDecided | ScalingApplied | ScalingRefused


@dataclass(frozen=True, slots=True)
class Order:
    """An order of an operator.

    Attributes:
        event: record of the order.
        text: the order in words.
        pool: pool whose size it sets or releases; None for all pools.
    """

    event: PlannerPaused | PoolSizeSet
    text: str
    pool: PoolKey | None = None

    def decides(self, decided: ScalingDecided) -> bool:
        """Return whether a decision that knows the order follows it, and does not have to wait."""
        if self.pool is None:
            return True
        found = next((one for one in decided.pools if (one.group, one.pool) == self.pool), None)
        return found is not None and found.reason not in {"in_progress", "no_observation"}


def run_pause(*, kafka: KafkaOptions, operator: str, timeout_s: float, wait: bool) -> None:
    """Run `forebay planner pause`. command.py documents its options."""
    _pause(kafka, operator, timeout_s if wait else None, paused=True)


def run_resume(*, kafka: KafkaOptions, operator: str, timeout_s: float, wait: bool) -> None:
    """Run `forebay planner resume`. command.py documents its options."""
    _pause(kafka, operator, timeout_s if wait else None, paused=False)


def _pause(kafka: KafkaOptions, operator: str, timeout_s: float | None, *, paused: bool) -> None:
    event = PlannerPaused(paused=paused, operator=operator_name(operator), at_us=runtime.wall_us())
    order = Order(event, "pause the planner" if paused else "resume the planner")
    _execute(kafka, lambda _: order, timeout_s)


def run_set_size(
    *,
    pool: str,
    kafka: KafkaOptions,
    size: int | None,
    release: bool,
    operator: str,
    timeout_s: float,
    wait: bool,
) -> None:
    """Run `forebay planner set-size`. command.py documents its options."""
    if (size is None) != release:
        fail("expected either the number of workers N or --release")
    name = operator_name(operator)

    def order(pools: list[PoolKey]) -> Order:
        known = {pool_text(one): one for one in pools}
        if pool not in known:
            fail(unknown_name("pool", pool, known))
        key = known[pool]
        event = PoolSizeSet(group=key[0], pool=key[1], size=size, operator=name, at_us=runtime.wall_us())
        return Order(event, f"release {pool}" if release else f"set {pool} to {counted(size or 0, 'worker')}", key)

    _execute(kafka, order, timeout_s if wait else None)


def _execute(kafka: KafkaOptions, order: Callable[[list[PoolKey]], Order], timeout_s: float | None) -> None:
    """Record an order, and wait for its effect unless `timeout_s` is None."""
    with explained():
        is_effective = asyncio.run(_run(kafka.settings(), order, timeout_s))
    if not is_effective:
        raise typer.Exit(NO_EFFECT)


async def _run(settings: KafkaSettings, order: Callable[[list[PoolKey]], Order], timeout_s: float | None) -> bool:
    """Record an order, and return whether its effect was seen."""
    async with scaling_on_kafka(settings) as log:
        watch = EffectWatch(log)
        await watch.topic.catch_up()
        if not watch.pools:
            fail("no planner has claimed the topic scaling; start one with `forebay planner run`")
        made = order(list(watch.pools))
        async with watch.following():
            offset, _ = await watch.topic.append(made.event)
            _say(f"recorded   {made.text}, at offset {offset} by {made.event.operator}")
            if timeout_s is None:
                return True
            if watch.topic.state.claim is None:
                complain(f"no planner is active; the next one follows the record at offset {offset}")
                return False
            try:
                async with asyncio.timeout(timeout_s):
                    return await watch.effect(made, offset)
            except TimeoutError:
                complain(f"{watch.waits_for} within {timeout_s:g} s; the record at offset {offset} stays in force")
                return False


class EffectWatch:
    """Follows the topic, and waits for the effect of an order.

    Attributes:
        topic: the topic with its state.
        pools: pools of all claims.
        waits_for: what has not happened yet, in words.
    """

    def __init__(self, log: Log) -> None:
        """Watch the topic of `log`."""
        self.topic = ScalingTopic(log, self._on_record)
        self.pools: dict[PoolKey, None] = {}
        self.waits_for = ""
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
                _say(f"decision   {place}: {pool.group}/{pool.pool} {size} ({pool.reason}): {REASONS[pool.reason]}")
        if order.pool is None or order.pool not in changed_pools(decided):
            return True
        if decided.advisory:
            _say("outcome    advisory: the planner only records its decisions")
            return True
        self.waits_for = f"no actuator of {pool_text(order.pool)} has replied to decision {place}"
        return _show_reply(await self._reply(place, order.pool), order.pool, changed_pools(decided)[order.pool].to_size)

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


def _show_reply(reply: ScalingApplied | ScalingRefused, pool: PoolKey, size: int) -> bool:
    """Print a reply, and return whether the pool has the size."""
    if isinstance(reply, ScalingRefused):
        complain(f"{reply.actuator} refused decision {reply.decision}: {reply.reason}: {reply.message}")
        return False
    reached = next(one.size for one in reply.pools if (one.group, one.pool) == pool)
    if reached != size:
        complain(f"{reply.actuator} reached {counted(reached, 'worker')} instead of {size}: {reply.message}")
        return False
    workers = counted(size, "worker")
    _say(f"outcome    applied by {reply.actuator}: {pool_text(pool)} has {workers}, which may still start")
    return True


def _say(text: str) -> None:
    typer.echo(printable(text))
