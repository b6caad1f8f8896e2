"""How the pools of a model are configured: what the log says, and what of it an operator changes at run time.

`control` holds a record when a router starts with other settings, a pool appears, or an operator speaks. So it is read
when somebody asks, and not followed.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from forebay.events.codec import DecodeError, decode, encode
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    ControlEvent,
    DisaggConfig,
    DisaggregationSet,
    PoolConfigured,
)
from forebay.events.topics import CONTROL
from forebay.ingress.errors import ApiError
from forebay.transport.base import Draft, Log, LogError

logger = logging.getLogger(__name__)

READ_MAX = 256
LOOK_S = 5.0  # a pool keeps its block size until all its workers are replaced
FIELDS = BusyThresholds.__struct_fields__


class PoolConfigurator:
    """What operators set of the pools in one partition of `control`; `place` gives it, once there is one.

    When workers are busy, and which prompts of decode pools are computed by prefill workers.
    """

    def __init__(self, log: Log, place: Callable[[], int | None], on_undecodable: Callable[[], None]) -> None:
        self._log = log
        self._place = place
        self._on_undecodable = on_undecodable
        self._position = 0
        self._pools: dict[str, tuple[str, BusyThresholds]] = {}
        self._disagg: dict[str, tuple[str, DisaggConfig]] = {}
        self._block_sizes: dict[str, int] = {}
        self._looked_s = -LOOK_S
        self._turn = asyncio.Lock()

    async def pools(self) -> list[tuple[str, str, BusyThresholds]]:
        """Pool, model and thresholds, by pool. Raises ApiError when the log fails."""
        await self._look()
        return [(pool, *self._pools[pool]) for pool in sorted(self._pools)]

    async def decode_pools(self) -> list[tuple[str, str, DisaggConfig]]:
        """Pool, model and what its requests' prompts are computed by, by pool. Raises ApiError when the log fails."""
        await self._look()
        return [(pool, *self._disagg[pool]) for pool in sorted(self._disagg)]

    async def disaggregation(self, model: str) -> tuple[str, DisaggConfig]:
        """That of a model, and its decode pool. Raises ApiError when it has no decode pool, or the log fails."""
        await self._look()
        return self._disagg_of(model)

    async def of(self, model: str) -> BusyThresholds:
        """Those of a model, all off while no pool serves it. Raises ApiError when the log fails."""
        return next((busy for _, served, busy in await self.pools() if served == model), BusyThresholds())

    async def block_size(self, model: str) -> int:
        """Tokens a KV block of a model, as of the last `LOOK_S`. Raises ApiError when no pool serves it yet."""
        if time.monotonic() - self._looked_s >= LOOK_S or model not in self._block_sizes:
            await self.pools()
        if model not in self._block_sizes:
            raise _no_pool(model)
        return self._block_sizes[model]

    async def change(self, model: str, changes: Mapping[str, float | None]) -> BusyThresholds:
        """Set what `changes` names, None being off; those of the model as they then are. Raises ApiError."""
        partition = self._placed(model)
        async with self._turn:
            await self._catch_up(partition)
            if all(served != model for served, _ in self._pools.values()):
                raise _no_pool(model)
            current = next(self._pools[pool][1] for pool in sorted(self._pools) if self._pools[pool][0] == model)
            event = BusyThresholdsSet(
                model=model,
                thresholds=msgspec.structs.replace(current, **changes),
                at_us=time.time_ns() // 1000,
            )
            await self._append(partition, event)
        return await self.of(model)

    async def disaggregate(self, model: str, changes: Mapping[str, Any]) -> tuple[str, DisaggConfig]:
        """Change what `changes` names, of a model with a decode pool; the pool and what then holds. Raises ApiError."""
        partition = self._placed(model)
        async with self._turn:
            await self._catch_up(partition)
            disagg = msgspec.structs.replace(self._disagg_of(model)[1], **changes)
            await self._append(partition, DisaggregationSet(model=model, disagg=disagg, at_us=time.time_ns() // 1000))
        return await self.disaggregation(model)

    def _disagg_of(self, model: str) -> tuple[str, DisaggConfig]:
        pools = (pool for pool in sorted(self._disagg) if self._disagg[pool][0] == model)
        found = next(((pool, self._disagg[pool][1]) for pool in pools), None)
        if found is None:
            raise ApiError(409, "not_disaggregated", f"{model} has no decode pool: its workers do all of a request")
        return found

    def _placed(self, model: str) -> int:
        partition = self._place()
        if partition is None:
            raise ApiError(503, "no_group", f"no router serves {model} yet: has it any worker?")
        return partition

    async def _look(self) -> None:
        partition = self._place()
        if partition is not None:
            async with self._turn:
                await self._catch_up(partition)

    async def _append(self, partition: int, event: ControlEvent) -> None:
        try:
            await self._log.append([Draft(CONTROL.name, partition, encode(CONTROL, event))])
        except LogError as error:
            raise _unavailable(error) from error

    async def _catch_up(self, partition: int) -> None:
        log, topic = self._log, CONTROL.name
        try:
            self._position = max(self._position, await log.begin(topic, partition))
            end = await log.end(topic, partition)
            while self._position < end:
                records = await log.read(topic, partition, self._position, READ_MAX)
                for record in records:
                    self._take(record.value)
                self._position = records[-1].offset + 1 if records else end
            self._looked_s = time.monotonic()
        except LogError as error:
            raise _unavailable(error) from error

    def _take(self, value: bytes) -> None:
        try:
            self._apply(decode(CONTROL, value))
        except DecodeError as error:
            self._on_undecodable()
            logger.warning("a record of %s does not decode: %s", CONTROL.name, error)

    def _apply(self, event: ControlEvent) -> None:
        match event:
            case PoolConfigured():
                self._pools[event.pool] = (event.model, event.router.busy)
                if event.role in ("aggregated", "decode"):
                    self._block_sizes[event.model] = event.block_size
                self._disagg.pop(event.pool, None)
                if event.role == "decode":
                    self._disagg[event.pool] = (event.model, event.router.disagg)
            case BusyThresholdsSet():
                for pool, (model, _) in self._pools.items():
                    if model == event.model:
                        self._pools[pool] = (model, event.thresholds)
            case DisaggregationSet():
                for pool, (model, _) in self._disagg.items():
                    if model == event.model:
                        self._disagg[pool] = (model, event.disagg)


def _no_pool(model: str) -> ApiError:
    return ApiError(503, "no_group", f"no pool serves {model} yet: has it any worker?")


def _unavailable(error: LogError) -> ApiError:
    return ApiError(503, "log_unavailable", str(error))
