"""Read and change the configuration of pools at run time: thresholds, disaggregation, and rules for their choice.

The topic `control` receives few records: only when a router starts with other settings, a pool appears, or an operator
changes a setting. So `PoolConfigurator` reads the new records before each result, instead of following the topic.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from forebay import runtime
from forebay.core.routing.policies import BUILT_IN
from forebay.core.state.pool_settings import PoolSettings, is_allowed
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    ControlEvent,
    DisaggregationSet,
    PolicySet,
    PoolConfigured,
    Role,
    WorkerCommanded,
)
from forebay.events.names import unknown_name
from forebay.events.pools import PoolCanarySet, PoolRouting, PoolRoutingConfigured, PoolRule
from forebay.events.topics import CONTROL
from forebay.events.versions import may_write
from forebay.ingress.errors import ApiError, no_router
from forebay.transport.base import Draft, Log, LogError, records_of

logger = logging.getLogger(__name__)

REFRESH_S = 5.0  # a pool keeps its block size until all its workers are replaced, so a cached value may be this old


@dataclass(frozen=True, slots=True)
class ListedPool:
    pool: PoolConfigured
    is_drained: bool
    canary: PoolCanarySet | None


class PoolConfigurator:
    """Reads the configuration of the pools of one group from the topic `control`, and appends changes to it.

    `allowed_policies` returns the custom policies that the owner may run; None while there is no owner. `owner_events`
    returns the version of the event types that it can read; 1 while there is no owner.
    """

    def __init__(self, log: Log, find_partition: Callable[[], int | None], on_undecodable: Callable[[], None]) -> None:
        self._log = log
        self._find_partition = find_partition
        self._on_undecodable = on_undecodable
        self.allowed_policies: Callable[[], Collection[str] | None] = lambda: None
        self.owner_events: Callable[[], int] = lambda: 1
        self._position = 0
        self._settings = PoolSettings()
        self._block_sizes: dict[str, int] = {}
        self._refreshed_s = -REFRESH_S
        self._lock = asyncio.Lock()

    async def configured(self) -> dict[str, PoolConfigured]:
        """Return the configuration of each pool by name, with the changes of operators. Raises ApiError (503)."""
        partition = self._find_partition()
        if partition is not None:
            async with self._lock:
                await self._catch_up(partition)
        return self._settings.in_effect()

    async def disaggregation(self, model: str) -> PoolConfigured:
        """Return the decode pool of a model. Raises ApiError: 409 if it has none, 503 if the log fails."""
        await self.configured()
        return self._decode_pool(model)

    async def busy_thresholds(self, model: str) -> BusyThresholds:
        """Return the busy thresholds of a model. All are disabled while no pool serves the model."""
        await self.configured()
        return next((pool.router.busy for pool in self._pools_of(model)), BusyThresholds())

    async def block_size(self, model: str) -> int:
        """Return the tokens per KV block of a model. The value may be up to `REFRESH_S` seconds old.

        Raises ApiError (503) while no pool serves the model, or if the log fails.
        """
        if runtime.monotonic_s() - self._refreshed_s >= REFRESH_S or model not in self._block_sizes:
            await self.configured()
        if model not in self._block_sizes:
            raise _no_pool(model)
        return self._block_sizes[model]

    async def set_busy_thresholds(self, model: str, changes: Mapping[str, float | None], operator: str = "") -> None:
        """Change busy thresholds of a model; None disables a threshold.

        Raises ApiError (503) if no router or pool serves the model, or the log fails.
        """

        def event() -> ControlEvent:
            pools = self._pools_of(model)
            if not pools:
                raise _no_pool(model)
            thresholds = msgspec.structs.replace(pools[0].router.busy, **changes)
            return BusyThresholdsSet(model=model, thresholds=thresholds, at_us=runtime.wall_us(), operator=operator)

        await self._change(model, event)

    async def set_disaggregation(self, model: str, changes: Mapping[str, Any], operator: str = "") -> None:
        """Change fields of the `DisaggConfig` of a model.

        Raises ApiError: 409 if the model has no decode pool, 503 if no router serves the model or the log fails.
        """

        def event() -> ControlEvent:
            disagg = msgspec.structs.replace(self._decode_pool(model).router.disagg, **changes)
            return DisaggregationSet(model=model, disagg=disagg, at_us=runtime.wall_us(), operator=operator)

        await self._change(model, event)

    async def rules(self, model: str) -> tuple[PoolRouting, dict[str, ListedPool]]:
        """Return how the owner chooses the pool of a request, and the rules for each pool of a model, by its name."""
        await self.configured()
        settings = self._settings
        return settings.routing_of(model), {
            pool.pool: ListedPool(pool, settings.is_drained(model, pool.pool), settings.canary(model, pool.pool))
            for pool in self._pools_of(model)
        }

    async def set_rule(self, event: PoolRule | PolicySet) -> None:
        """Append a rule for the choice of pools, or the policy of a pool, to the log.

        Raises ApiError: 404 for an unknown pool, or a policy that the owner cannot run; 503 as `set_disaggregation`.
        """

        def checked() -> ControlEvent:
            self._require_known(event)
            return event

        await self._change(event.model, checked)

    async def _change(self, model: str, event: Callable[[], ControlEvent]) -> None:
        partition = self._find_partition()
        if partition is None:
            raise no_router(model)
        async with self._lock:
            await self._catch_up(partition)
            made = event()
            if not may_write(type(made), self.owner_events()):
                text = f"the router of {model} is of an earlier version, which ignores this change; upgrade all routers"
                raise ApiError(503, "router_outdated", text)
            try:
                await self._log.append([Draft(CONTROL.name, partition, encode(CONTROL, made))])
            except LogError as error:
                raise _unavailable(error) from error

    def _require_policy(self, mode: str) -> None:
        allowed = sorted(self.allowed_policies() or ())
        if is_allowed(mode, allowed):
            return
        text = unknown_name("policy", mode, [*BUILT_IN, *allowed])
        if "." in mode:
            text = (
                f"the policy {mode!r} is not allowed on the router; its operator can start it with --allow-policy"
                " and the path of the class"
            )
        raise ApiError(404, "unknown_policy", text, "mode")

    def _require_known(self, event: PoolRule | PolicySet) -> None:
        """Raise ApiError (404) for an unknown pool or policy. A rule may end without its pool."""
        named: list[tuple[str, str, Role | None]] = []
        match event:
            case PoolRoutingConfigured():
                for at, grid in enumerate(event.routing.grids):
                    named += [(f"grids[{at}].pools", one.pool, grid.role) for one in grid.pools]
            case PolicySet():
                self._require_policy(event.mode)
                named = [("pool", event.pool, None)]
            case _ if not event.ends:
                named = [("pool", event.pool, None)]
                if isinstance(event, PoolCanarySet):
                    named.append(("base", event.base, None))
        pools = self._pools_of(event.model)
        for param, name, role in named:
            known = [pool.pool for pool in pools if role in (None, pool.role)]
            if name not in known:
                kind = f"{role} pool" if role else "pool"
                raise ApiError(404, "unknown_pool", unknown_name(kind, name, known), param)

    def _pools_of(self, model: str) -> list[PoolConfigured]:
        return [pool for pool in self._settings.in_effect().values() if pool.model == model]

    def _decode_pool(self, model: str) -> PoolConfigured:
        found = next((pool for pool in self._pools_of(model) if pool.role == "decode"), None)
        if found is None:
            raise ApiError(409, "not_disaggregated", f"{model} is not disaggregated: it has no decode pool")
        return found

    async def _catch_up(self, partition: int) -> None:
        log = self._log
        try:
            start, end = await log.begin(CONTROL.name, partition), await log.end(CONTROL.name, partition)
            async for record in records_of(log, CONTROL, partition, max(self._position, start), end):
                self._apply_record(record.value)
                self._position = record.offset + 1
            self._refreshed_s = runtime.monotonic_s()
            if (allowed := self.allowed_policies()) is not None:
                self._settings.reset_policies(allowed)  # as an owner does when it takes over, without an event
        except LogError as error:
            raise _unavailable(error) from error

    def _apply_record(self, value: bytes) -> None:
        try:
            event: ControlEvent = decode(CONTROL, value)
        except DecodeError as error:
            self._on_undecodable()
            logger.warning("cannot decode a record of %s: %s", CONTROL.name, error)
            return
        if not isinstance(event, WorkerCommanded):
            self._settings.apply(event)
        if isinstance(event, PoolConfigured) and event.role in ("aggregated", "decode"):
            self._block_sizes[event.model] = event.block_size


def _no_pool(model: str) -> ApiError:
    return ApiError(503, "no_group", f"no pool serves {model} yet; start a worker for it")


def _unavailable(error: LogError) -> ApiError:
    return ApiError(503, "log_unavailable", str(error))
