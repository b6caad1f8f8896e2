"""Method `simulate` of the planner: simulate the forecast with different sizes of each pool.

Theory of operation. The requests of a simulation are generated from the forecast of a pool: Poisson arrivals at its
rate, with its mean lengths. A shared prefix stands for the prompt tokens that the forecast expects in caches. All
random numbers come from one seed, so equal forecasts give equal results. The sizes are bisected, because attainment
rises with the number of workers. A separate process simulates, so that the planner keeps up with its topic. It is
killed after half an interval, or if the planner stops.
"""

import asyncio
import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import msgspec

from forebay import runtime
from forebay.core.scaling.state import PoolKey
from forebay.events.control import RouterConfig
from forebay.events.scaling import DemandForecast, PlannerSettings, PoolDemand, PoolScaling, SimulatedSize
from forebay.simulate.fleet_file import worker_group
from forebay.simulate.profiles.profile import Profile
from forebay.simulate.reading import open_workload
from forebay.simulate.settings import Delay, Delays, PoolSettings, Settings, WorkerGroup, engine_config
from forebay.simulate.simulation import Simulation
from forebay.simulate.slo import Slo, goodput
from forebay.simulate.workload import WorkloadOptions
from forebay.simulate.workloads.source import PROMPT_TOKENS_MAX

if TYPE_CHECKING:
    from forebay.live.planner.planner import Simulate

logger = logging.getLogger(__name__)

SEED = 0  # of arrivals and of ties
REQUESTS_MIN = 400  # four of them may miss a target of 99 %
REQUESTS_MAX = 2_000  # of one size; they take about a second
RATE_MIN = 1e-3  # requests per second; at a lower rate each request is alone, too
PREFIX_TOKENS = 64  # shared prefixes consist of whole blocks of this size
TIME_SHARE = 0.5  # of an interval, for the simulations of all pools


class SimulationFailed(Exception):
    """The sizes could not be simulated. The message says why."""


@dataclass(frozen=True, slots=True)
class PoolEngine:
    """Engine of the workers of a pool. Picklable."""

    workers: WorkerGroup
    delays: Delays  # latencies that the engine profile has measured


def pool_engine(profile: Profile, kv_tokens: int) -> PoolEngine:
    """Return the engine with this profile. For 0 `kv_tokens` per worker, the profile's value is used.

    Raises ConfigError if the sizes of the engine contradict each other.
    """
    block_size = profile.sizes.block_size or engine_config().block_size
    kv_blocks = max(1, kv_tokens // block_size) if kv_tokens else None
    sizes = dict.fromkeys(("block_size", "max_num_seqs", "max_num_batched_tokens"))
    workers = worker_group(profile, 1, kv_blocks=kv_blocks, **sizes)
    return PoolEngine(workers, Delays(work=Delay(fixed_ms=profile.work_us / 1e3)))


def simulated_sizes(
    forecast: DemandForecast, settings: PlannerSettings, engines: Mapping[PoolKey, PoolEngine], target: float
) -> Iterator[SimulatedSize]:
    """Simulate each pool of the forecast until its smallest size that attains the target is known.

    A prefill pool is simulated with the largest size of its decode pool, and must meet the TTFT. A decode pool is
    simulated with the largest size of its prefill pool, and must meet both targets. `target` is the share of requests.

    The sizes are in the order of the simulations. If none attains the target, the largest and the smallest one are
    among them.
    """
    demands = {(one.group, one.pool): one for one in forecast.pools}
    for pool in settings.pools:
        key, other = (pool.group, pool.pool), _other_stage(pool, settings.pools)
        if key not in demands:
            continue
        demand, pools = demands[key], [(pool, engines[key])]
        if other is not None:
            other_key = (other.group, other.pool)
            pools.append((other, engines[other_key]))
            demand = _of_both_stages(demand, demands.get(other_key), pool.role)
        yield from _bisected(_Simulated(pools, demand, settings), target)


def simulator(settings: PlannerSettings, engines: Mapping[PoolKey, PoolEngine]) -> "Simulate":
    """Return the function that simulates a forecast in another process. It raises SimulationFailed if it cannot."""
    limit_s = TIME_SHARE * settings.interval_s

    async def simulate(forecast: DemandForecast, target: float) -> tuple[SimulatedSize, ...]:
        context = multiprocessing.get_context("spawn")  # a forked child would inherit threads
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(sending, forecast, settings, engines, target), daemon=True)
        process.start()
        sending.close()
        try:
            async with asyncio.timeout(limit_s):
                return await runtime.offload(_received, receiving)
        except TimeoutError:
            remedy = "use a longer interval_s or a lower max_size"
            raise SimulationFailed(f"not finished after {limit_s:g} s, half of interval_s; {remedy}") from None
        except EOFError:
            raise SimulationFailed("its process ended early") from None
        finally:
            process.kill()  # also ends the thread that receives
            process.join()

    return simulate


def _run(
    sending: Connection,
    forecast: DemandForecast,
    settings: PlannerSettings,
    engines: Mapping[PoolKey, PoolEngine],
    target: float,
) -> None:
    """Send each simulated size, and None at the end. Runs in the other process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the planner, which kills this process
    for size in simulated_sizes(forecast, settings, engines, target):
        sending.send(size)
    sending.send(None)


def _received(receiving: Connection) -> tuple[SimulatedSize, ...]:
    """Receive all sizes. Raises EOFError if the process ends before the last one."""
    sizes: list[SimulatedSize] = []
    with receiving:
        while (one := receiving.recv()) is not None:
            logger.debug("simulated %s/%s with %d workers: %.1f %% of the requests meet both targets",
                         one.group, one.pool, one.size, 100 * one.attained)  # fmt: skip
            sizes.append(one)
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class _Simulated:
    # The pool with its engine, and the pool of the other stage, if there is one.
    pools: Sequence[tuple[PoolScaling, PoolEngine]]
    demand: PoolDemand
    settings: PlannerSettings

    @property
    def pool(self) -> PoolScaling:
        return self.pools[0][0]

    def run(self, size: int) -> SimulatedSize:
        pools = tuple(
            _fleet_pool(one, engine, one.max_size if at else size) for at, (one, engine) in enumerate(self.pools)
        )
        fleet = Settings(pools=pools, delays=self.pools[0][1].delays, seed=SEED)
        workload = open_workload(_workload(self.demand, self.settings.interval_s), WorkloadOptions(seed=SEED))
        ignore: Callable[[int], None] = lambda _: None  # noqa: E731 - the simulation reports each arrival
        outcome = Simulation(fleet, RouterConfig()).run(workload, ignore)
        itl_ms = None if self.pool.role == "prefill" else self.settings.itl_ms
        attained = float(goodput(outcome, Slo(ttft_ms=self.settings.ttft_ms, itl_ms=itl_ms))["attained"])
        return SimulatedSize(group=self.pool.group, pool=self.pool.pool, size=size, attained=attained)


def _fleet_pool(pool: PoolScaling, engine: PoolEngine, count: int) -> PoolSettings:
    assert pool.role != "encode", "the file of a planner has no such pool"
    workers = msgspec.structs.replace(engine.workers, count=count)
    return PoolSettings(name=pool.pool, role=pool.role, groups=(workers,))


def _other_stage(pool: PoolScaling, pools: Sequence[PoolScaling]) -> PoolScaling | None:
    """Return the decode pool of a prefill pool and the reverse, None for an aggregated pool."""
    roles = {"prefill": "decode", "decode": "prefill"}
    return next((one for one in pools if (one.group, one.role) == (pool.group, roles.get(pool.role))), None)


def _of_both_stages(own: PoolDemand, other: PoolDemand | None, role: str) -> PoolDemand:
    """Return the demand with the prompts of the prefill pool and the outputs of the decode pool."""
    prefill, decode = (own, other or own) if role == "prefill" else (other or own, own)
    return msgspec.structs.replace(own, isl=prefill.isl, kv_hit_rate=prefill.kv_hit_rate, osl=decode.osl)


def _bisected(simulated: _Simulated, target: float) -> Iterator[SimulatedSize]:
    pool = simulated.pool
    if not simulated.demand.requests_per_s:
        yield SimulatedSize(group=pool.group, pool=pool.pool, size=pool.min_size, attained=1.0)
        return
    least = max(1, pool.min_size)
    low, high = least, pool.max_size + 1  # sizes below `low` miss the target, and `high` attains it
    while low < high:
        size = (low + high) // 2
        found = simulated.run(size)
        yield found
        low, high = (low, size) if found.attained >= target else (size + 1, high)
    if low > pool.max_size > least:  # if more workers do not help, the smallest size is as good as a larger one
        yield simulated.run(least)


def _workload(demand: PoolDemand, interval_s: float) -> str:
    """Return the name of the workload that has the demand for one interval, within the limits of its requests."""
    rate = max(RATE_MIN, demand.requests_per_s)
    requests = max(REQUESTS_MIN, min(REQUESTS_MAX, round(rate * interval_s)))
    shared = round(demand.kv_hit_rate * demand.isl / PREFIX_TOKENS) * PREFIX_TOKENS
    prompt, output = max(1.0, demand.isl - shared), max(1.0, demand.osl)
    prefix = f",groups=1,prefix={shared}" if shared else ""
    return (
        f"synthetic:requests={requests},rate={rate!r},prompt={prompt!r},output={output!r}"
        f",context={PROMPT_TOKENS_MAX},block_tokens={PREFIX_TOKENS}{prefix}"
    )
