"""The planner of a namespace: observe, forecast and decide, or stand by for the planner that does.

Theory of operation. The newest claim on the topic `scaling` owns it. A standby follows the topic, so its state is
always complete. It claims the topic if the active planner has stopped, or has written no record for `SILENT_INTERVALS`
intervals. A planner that finds a newer claim stands by again. Its records after that claim have no effect.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec
from prometheus_client.core import Metric

from forebay import runtime
from forebay.core.scaling.decide import decide
from forebay.core.scaling.state import RULES_VERSION, SILENT_INTERVALS, SILENT_MORE_S, Outcome
from forebay.core.scaling.virtual_planner import SIMULATED_TARGET, Forecast
from forebay.events.scaling import (
    DemandForecast,
    PlannerClaimed,
    PlannerPaused,
    PlannerRecord,
    PlannerSettings,
    PlannerStopped,
    PoolObserved,
    PoolSizeSet,
    ScalingApplied,
    ScalingEvent,
    ScalingObserved,
    ScalingRefused,
    SimulatedSize,
    SizesSimulated,
)
from forebay.live.planner.topic import ScalingTopic
from forebay.runtime.metrics import collector, counter, gauge
from forebay.transport.base import Log
from forebay.transport.patience import until_available

logger = logging.getLogger(__name__)

DIGITS = 6  # of an interval in seconds, which is measured in microseconds
DECISIONS_MAX = 8  # attempts to decide; each failed one means that somebody wrote a record in between
REPLIES = (ScalingApplied, ScalingRefused)
COMMANDS = (PoolSizeSet, PlannerPaused)

# Simulates a forecast with different sizes of the pools. The second argument is the target.
Simulate = Callable[[DemandForecast, float], Awaitable[tuple[SimulatedSize, ...]]]

RecordT = TypeVar("RecordT", bound=PlannerRecord)


class Observer(Protocol):
    def observe(self) -> tuple[PoolObserved, ...]:
        """Return what happened in the pools since the previous call."""


class Planner:
    """Planner of one namespace. It is active while its claim is the newest."""

    def __init__(
        self, log: Log, planner_id: str, settings: PlannerSettings, observer: Observer, forecast: Forecast,
        simulate: Simulate | None = None,
    ) -> None:  # fmt: skip
        """Create a planner.

        `forecast` is called on another thread, with the observations of the state, oldest first, and the offset of the
        newest one. The method `simulate` requires `simulate`, which is cancelled if the planner stops.
        """
        if settings.method == "simulate" and simulate is None:
            raise ValueError("method simulate needs a function that simulates")
        self.planner_id = planner_id
        self.is_active = False
        self.decisions = 0
        self.stale = 0
        self.forecast_failures = 0
        self.simulation_failures = 0
        self._settings = settings
        self._observer = observer
        self._forecast = forecast
        self._simulate = simulate
        self._stopping = asyncio.Event()
        self._prompted = asyncio.Event()
        self._epoch = -1
        self._heard_s = 0.0
        self._observed_s = 0.0
        self._unobserved: list[str] = []
        self.topic = ScalingTopic(log, self._on_record)

    async def run(self) -> None:
        """Plan, or stand by, until `stop` is called. Raises LogError if the log fails."""
        await until_available(self.topic.catch_up)
        self._heard_s = runtime.monotonic_s()
        await self.topic.follow_beside(self._run())

    def stop(self) -> None:
        """End `run` after the current step. An active planner writes that it stops."""
        self._stopping.set()
        self._prompted.set()
        self.topic.changed.set()

    def _on_record(self, offset: int, event: ScalingEvent, outcome: Outcome) -> None:
        if outcome == "stale":
            return
        if isinstance(event, PlannerRecord):
            self._heard_s = runtime.monotonic_s()
        if isinstance(event, PlannerClaimed) and self.is_active and offset > self._epoch:
            logger.warning("the planner %s claimed the topic at offset %d; standing by", event.planner_id, offset)
            self.is_active = False
            self._prompted.set()
        fell_short = self.topic.state.fell_short
        if isinstance(event, COMMANDS) or (isinstance(event, REPLIES) and not fell_short):
            self._prompted.set()  # decide at once

    async def _run(self) -> None:
        while not self._stopping.is_set():
            await self._stand_by()
            if not self._stopping.is_set():
                await self._plan()

    async def _stand_by(self) -> None:
        """Return when this planner should claim the topic."""
        claim = self.topic.state.claim
        if claim is not None:
            logger.info("planner %s stands by for planner %s", self.planner_id, claim.planner_id)
        while not self._stopping.is_set() and (wait_s := self._silent_in_s()) > 0:
            self.topic.changed.clear()
            await _within(self.topic.changed.wait(), wait_s)
        silent = self.topic.state.claim
        if silent is not None and not self._stopping.is_set():
            logger.warning("planner %s has written nothing for too long; taking over", silent.planner_id)

    def _silent_in_s(self) -> float:
        """Return the seconds until the active planner counts as failed, 0 if there is none."""
        settings = self.topic.state.settings
        if settings is None:
            return 0.0
        silent_s = SILENT_INTERVALS * settings.interval_s + SILENT_MORE_S
        return max(0.0, self._heard_s + silent_s - runtime.monotonic_s())

    async def _plan(self) -> None:
        claim = PlannerClaimed(
            planner_id=self.planner_id, rules_version=RULES_VERSION, settings=self._settings, at_us=runtime.wall_us()
        )
        self._prompted.clear()
        self._epoch, _ = await self.topic.append(claim)
        self.is_active = self.topic.state.epoch == self._epoch
        logger.info("planner %s claimed the topic at offset %d", self.planner_id, self._epoch)
        self._observed_s = runtime.monotonic_s()
        self._observer.observe()  # an interval begins here
        await self._decide()
        while self.is_active and not self._stopping.is_set():
            # Due times follow the last observation, so a late one does not make the next interval shorter.
            due_s = self._observed_s + self._settings.interval_s
            await _within(self._prompted.wait(), max(0.0, due_s - runtime.monotonic_s()))
            self._prompted.clear()  # not before the wait: a command during `_decide` must not be lost
            if not self.is_active or self._stopping.is_set():
                break
            if runtime.monotonic_s() >= due_s:
                await self._observe()
            await self._decide()
        if self.is_active:
            await self.topic.append(PlannerStopped(planner_epoch=self._epoch, at_us=runtime.wall_us()))
            self.is_active = False

    async def _observe(self) -> None:
        """Record an observation, and the forecast and the simulations that follow from it."""
        began_s, self._observed_s = self._observed_s, runtime.monotonic_s()
        pools = self._observer.observe()
        self._log_unobserved(pools)
        observed = ScalingObserved(
            planner_epoch=self._epoch,
            at_us=runtime.wall_us(),
            interval_s=round(self._observed_s - began_s, DIGITS),
            pools=pools,
        )
        offset, outcome = await self.topic.append(observed)
        if outcome == "stale" or self._settings.method == "load":
            return
        await self._record_forecast(offset)
        if self._settings.method == "simulate":
            await self._record_simulations()

    async def _record_forecast(self, offset: int) -> None:
        try:
            forecast = await runtime.offload(self._forecast, tuple(self.topic.state.history), offset)
        except Exception:  # a predictor is third-party code, and a planner without forecast still has limits and load
            self.forecast_failures += 1
            logger.exception("the predictor %s failed; deciding without a new forecast", self._settings.predictor)
            return
        await self.topic.append(_stamped(forecast, self._epoch))

    async def _record_simulations(self) -> None:
        """Record simulations of the newest forecast.

        Without a new forecast, or if they fail, a record without sizes replaces older simulations. So no decision
        follows from the demand of an earlier interval.
        """
        known = self.topic.state.forecast
        if known is None:  # after a claim, so there are no simulations either
            return
        offset, forecast = known
        sizes: tuple[SimulatedSize, ...] | None = ()
        if forecast.observed == self.topic.state.observed:
            try:
                sizes = await self._simulated(forecast)
            except Exception:  # a planner without simulations still has limits and orders of operators
                self.simulation_failures += 1
                logger.exception("the forecast was not simulated; deciding without it")
        if sizes is not None:
            simulated = SizesSimulated(forecast=offset, target=SIMULATED_TARGET, sizes=sizes)
            await self.topic.append(_stamped(simulated, self._epoch))

    async def _simulated(self, forecast: DemandForecast) -> tuple[SimulatedSize, ...] | None:
        """Return the simulations of a forecast, None if the planner stops or stands by. Commands do not wait."""
        assert self._simulate is not None, "checked in __init__"
        simulation = asyncio.ensure_future(self._simulate(forecast, SIMULATED_TARGET))
        simulation.add_done_callback(lambda _: self._prompted.set())
        try:
            while not simulation.done():
                await self._prompted.wait()
                self._prompted.clear()  # before the checks: a stop or a command during `_decide` must not be lost
                if not self.is_active or self._stopping.is_set():
                    return None
                if not simulation.done():
                    await self._decide()
            return simulation.result()
        finally:
            simulation.cancel()
            await asyncio.gather(simulation, return_exceptions=True)

    def _log_unobserved(self, pools: Sequence[PoolObserved]) -> None:
        observed = {(one.group, one.pool) for one in pools}
        missing = [f"{one.group}/{one.pool}" for one in self._settings.pools if (one.group, one.pool) not in observed]
        if missing and missing != self._unobserved:
            logger.warning("not observed in this interval: %s; the group was not followed, or none has this name",
                           ", ".join(missing))  # fmt: skip
        self._unobserved = missing

    async def _decide(self) -> None:
        """Record the decision that follows from the state. Decide again if a record came in between."""
        for _ in range(DECISIONS_MAX):
            decision = decide(self.topic.state)
            if decision is None or not self.is_active:
                return
            offset, outcome = await self.topic.append(_stamped(decision, self._epoch))
            if outcome == "applied":
                self.decisions += 1
                for pool in decision.pools:
                    if pool.to_size != pool.from_size:
                        logger.info(
                            "decision %d: %s/%s from %d to %d workers (%s)%s", offset, pool.group, pool.pool,
                            pool.from_size, pool.to_size, pool.reason, " (advisory)" if decision.advisory else "",
                        )  # fmt: skip
                return
            self.stale += 1


def _stamped(record: RecordT, epoch: int) -> RecordT:
    return msgspec.structs.replace(record, planner_epoch=epoch, at_us=runtime.wall_us())


async def _within(waiting: Awaitable[object], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await waiting


@collector
def planner_metrics(planner: Planner) -> Iterator[Metric]:
    """Metrics of one planner, active or standby, and of the pools that the active planner scales."""
    state = planner.topic.state
    yield gauge("forebay_planner_active", "1 if this planner decides, 0 if it stands by", planner.is_active)
    yield gauge("forebay_planner_paused", "1 if an operator has paused the planner", state.paused)
    text = "decided changes of pools without reply of an actuator"
    yield gauge("forebay_planner_open_changes", text, len(state.open))
    decisions = {"applied": planner.decisions, "stale": planner.stale}
    yield counter("forebay_planner_decisions", "decisions of this process by effect", decisions, "effect")
    text = "intervals in which the predictor failed"
    yield counter("forebay_planner_forecast_failures", text, planner.forecast_failures)
    text = "intervals whose forecast could not be simulated"
    yield counter("forebay_planner_simulation_failures", text, planner.simulation_failures)
    pools = {(pool.group, pool.pool): pool for pool in (state.settings.pools if state.settings else ())}
    sizes = {key: size for key, pool in pools.items() if (size := state.size(pool)) is not None}
    yield gauge("forebay_pool_size", "workers of a pool as decided", sizes, "group", "pool")
    ready = {key: seen.ready for key, pool in pools.items() if (seen := state.last_observed(pool)) is not None}
    yield gauge("forebay_pool_ready", "ready workers of a pool as last observed", ready, "group", "pool")
