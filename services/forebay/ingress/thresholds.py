"""How the pools of a model are configured: what the log says, and how an operator changes when workers are busy.

`control` holds a record when a router starts with other settings, a pool appears, or an operator speaks. So it is read
when somebody asks, and not followed.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from forebay.events.codec import DecodeError, decode, encode
from forebay.events.control import BusyThresholds, BusyThresholdsSet, ControlEvent, PoolConfigured
from forebay.events.topics import CONTROL
from forebay.ingress.errors import ApiError
from forebay.transport.base import Draft, Log, LogError

logger = logging.getLogger(__name__)

READ_MAX = 256
LOOK_S = 5.0  # a pool keeps its block size until all its workers are replaced
FIELDS = BusyThresholds.__struct_fields__


class Thresholds:
    """The busy thresholds of the pools in one partition of `control`; `place` gives it, once there is one."""

    def __init__(self, log: Log, place: Callable[[], int | None], on_undecodable: Callable[[], None]) -> None:
        self._log = log
        self._place = place
        self._on_undecodable = on_undecodable
        self._position = 0
        self._pools: dict[str, tuple[str, BusyThresholds]] = {}
        self._block_sizes: dict[str, int] = {}
        self._looked_s = -LOOK_S
        self._turn = asyncio.Lock()

    async def pools(self) -> list[tuple[str, str, BusyThresholds]]:
        """Pool, model and thresholds, by pool. Raises ApiError when the log fails."""
        partition = self._place()
        if partition is not None:
            async with self._turn:
                await self._catch_up(partition)
        return [(pool, *self._pools[pool]) for pool in sorted(self._pools)]

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
        partition = self._place()
        if partition is None:
            raise ApiError(503, "no_group", f"no router serves {model} yet: has it any worker?")
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
            try:
                await self._log.append([Draft(CONTROL.name, partition, encode(CONTROL, event))])
            except LogError as error:
                raise _unavailable(error) from error
        return await self.of(model)

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
                self._block_sizes[event.model] = event.block_size
            case BusyThresholdsSet():
                for pool, (model, _) in self._pools.items():
                    if model == event.model:
                        self._pools[pool] = (model, event.thresholds)


def _no_pool(model: str) -> ApiError:
    return ApiError(503, "no_group", f"no pool serves {model} yet: has it any worker?")


def _unavailable(error: LogError) -> ApiError:
    return ApiError(503, "log_unavailable", str(error))
