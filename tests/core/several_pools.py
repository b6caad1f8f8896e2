"""Models with several pools, for tests."""

from typing import Any, TypeVar

from forebay.events.control import PoolConfigured, QueueConfig, RouterConfig
from forebay.events.fleet import WorkerJoined
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolGrid, PoolRouting, PoolRoutingConfigured
from tests.core.worlds import BLOCK, Driver, joined

AnyDriver = TypeVar("AnyDriver", bound=Driver)

ONE_EACH = QueueConfig(run_ahead=0.0)  # with max_num_seqs 1, a worker runs one request and queues none


def add_pools(drive: AnyDriver, *names: str, role: Any = "aggregated", **router: Any) -> AnyDriver:
    """Add pools of the model m, each with one worker `w-NAME` that runs one request. Return the driver."""
    for name in names:
        drive("control", pool_of(name, role, **router))
        drive("fleet", worker_of(name, role))
    return drive


def pool_of(name: str, role: Any = "aggregated", block_size: int = BLOCK, **router: Any) -> PoolConfigured:
    config = RouterConfig(**{"queue": ONE_EACH, **router})
    return PoolConfigured(pool=name, model="m", block_size=block_size, role=role, router=config)


def worker_of(pool: str, role: Any = "aggregated", slot: int = 0, **changes: Any) -> WorkerJoined:
    return joined(f"w-{pool}", slot, **{"pool": pool, "role": role, "max_num_seqs": 1, **changes})


def rules(drive: Driver, *grids: PoolGrid, retry: bool = False) -> list[Any]:
    return drive("control", PoolRoutingConfigured(model="m", routing=PoolRouting(grids=grids, retry=retry)))


def drain(drive: Driver, pool: str, *, drained: bool = True) -> list[Any]:
    return drive("control", PoolDrainSet(model="m", pool=pool, drained=drained))


def set_canary(drive: Driver, pool: str, base: str, share: float = 1.0) -> None:
    drive("control", PoolCanarySet(model="m", pool=pool, base=base, share=share))
