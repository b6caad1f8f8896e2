"""Fleets, turns, conversations, planners and a user-defined policy for tests of the simulator."""

import json
import random
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.routing.policies import RoutingRequest, RoutingWorld
from forebay.engine_model.model import EngineConfig
from forebay.events.decisions import JournalRecord, RequestRouted
from forebay.events.scaling import (
    DecodePoint,
    DemandForecast,
    PlannerSettings,
    PoolDemand,
    PoolScaling,
    PrefillPoint,
    ScalingObserved,
)
from forebay.simulate.outcome import RequestOutcome, SimulationOutcome
from forebay.simulate.planned import Planning
from forebay.simulate.settings import (
    DELAYS,
    Delay,
    LifeCycleSettings,
    PoolSettings,
    Settings,
    WorkerFault,
    WorkerGroup,
    WorkerStart,
    engine_config,
    policy,
)
from forebay.simulate.simulation import Simulation
from forebay.simulate.tiers.settings import FleetTiers, HostTier, StoreTier
from forebay.simulate.workload import Survey, Turn
from forebay.simulate.workloads.rows import BLOCK_TOKENS, MooncakeRow


def one_pool(workers: int, engine: EngineConfig, *, seed: int = 0) -> Settings:
    """Return settings with one pool of identical workers, without delays, failures or scale-up."""
    return Settings(pools=(PoolSettings(groups=(WorkerGroup(count=workers, engine=engine),)),), seed=seed)


def crash_at(at_us: int, worker: str, back_us: int | None = None) -> WorkerFault:
    return WorkerFault(worker=worker, at_s=at_us / S, back_s=None if back_us is None else back_us / S)


def start_at(at_us: int, pool: str = "default", group: int = 0, count: int = 1) -> WorkerStart:
    return WorkerStart(at_s=at_us / S, pool=pool, group=group, count=count)


def latency(fixed_us: int = 0, jitter_us: int = 0) -> Delay:
    return Delay(fixed_ms=fixed_us / MS, jitter_ms=jitter_us / MS)


class LeastUsed:
    """Select the worker with the fewest reported used blocks; break ties by order."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        used = [candidate.kv_blocks_used or 0 for candidate in world.candidates]
        return used.index(min(used))


CUSTOM = {f"{__name__}.LeastUsed": LeastUsed}


class Turns:
    """Workload of given turns."""

    name = "turns"

    def __init__(self, *turns: Turn, block_tokens: int = 64) -> None:
        self._turns = turns
        self.block_tokens = block_tokens

    def survey(self) -> Survey:
        return Survey(requests=len(self._turns))

    def turns(self) -> Iterator[Turn]:
        yield from self._turns


def turn(number: int, prompt: int = 64, output: int = 1, **changes: Any) -> Turn:
    return Turn(number=number, prompt_tokens=prompt, output_tokens=output, **changes)


def fleet(
    workers: int = 2, life: LifeCycleSettings | None = None, sizes: dict[str, int] | None = None, **changes: Any
) -> Settings:
    group = WorkerGroup(count=workers, engine=engine_config(**(sizes or {})))
    return Settings(pools=(PoolSettings(groups=(group,)),), life=life or LifeCycleSettings(), **changes)


def split(
    prefill: int,
    decode: int,
    life: LifeCycleSettings | None = None,
    sizes: dict[str, int] | None = None,
    **changes: Any,
) -> Settings:
    """Return a prefill pool (if `prefill` > 0) and a decode pool of one model. Prefill workers come first by name."""
    engine = engine_config(**(sizes or {}))
    decoders = PoolSettings(role="decode", groups=(WorkerGroup(count=decode, engine=engine),))
    prefillers = PoolSettings(name="prefill", role="prefill", groups=(WorkerGroup(count=prefill, engine=engine),))
    pools = (prefillers, decoders) if prefill else (decoders,)
    return Settings(pools=pools, life=life or LifeCycleSettings(), **changes)


def run(system: Settings, *turns: Turn, router: str = "kv", planning: Planning | None = None) -> SimulationOutcome:
    return Simulation(system, policy(router), CUSTOM, planning=planning).run(Turns(*turns), lambda _: None)


def routed(system: Settings, *turns: Turn, router: str = "kv") -> dict[int, RequestRouted]:
    """Return the last routing decision of each request, by its number."""
    simulation, found = Simulation(system, policy(router), CUSTOM), dict[int, RequestRouted]()
    write = simulation.cluster.journal

    def journal(record: JournalRecord) -> None:
        write(record)
        if isinstance(record, RequestRouted):
            found[int(record.request_id)] = record

    simulation.cluster.journal = journal  # type: ignore[method-assign]
    simulation.run(Turns(*turns), lambda _: None)
    return found


def served(system: Settings, *turns: Turn, router: str = "kv") -> list[RequestOutcome]:
    return list(run(system, *turns, router=router).requests)


# Conversations with growing prompts and a common prefix


SEED = 20_261


def conversations(sessions: int, turns: int, every_ms: int = 150) -> list[MooncakeRow]:
    """Return the turns of all sessions, interleaved. Each prompt extends the previous one; two rows share each time."""
    rng = random.Random(SEED)
    last: dict[int, list[int]] = {session: [0] for session in range(sessions)}
    rows: list[MooncakeRow] = []
    for number in range(sessions * turns):
        ids = last[number % sessions]
        ids += [number * 10 + more for more in range(1, rng.randrange(2, 6))]
        length = len(ids) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)
        rows.append(MooncakeRow(number // 2 * every_ms, length, rng.randrange(1, 150), list(ids)))
    return rows


def turn_of(row: MooncakeRow, number: int, speed: float = 1.0) -> Turn:
    return Turn(
        number=number,
        prompt_tokens=row.input_length,
        output_tokens=row.output_length,
        block_ids=tuple(row.hash_ids),
        at_us=round(row.timestamp * 1_000 / speed),
    )


def played(rows: Sequence[MooncakeRow], speed: float = 1.0) -> Turns:
    """Return the rows of a trace as a workload."""
    return Turns(*(turn_of(row, number, speed) for number, row in enumerate(rows)), block_tokens=BLOCK_TOKENS)


def write(path: Path, rows: list[MooncakeRow]) -> Path:
    path.write_text(
        "".join(json.dumps({name: getattr(row, name) for name in row.__struct_fields__}) + "\n" for row in rows)
    )
    return path


# Simulations with a planner


S = 1_000_000
INTERVAL_S = 30.0
GROUP = "simulated"


def expect_the_same(history: Sequence[ScalingObserved], observed: int) -> DemandForecast:
    last = history[-1]
    pools = tuple(
        PoolDemand(
            group=one.group,
            pool=one.pool,
            requests_per_s=one.requests / last.interval_s,
            isl=one.isl or 1.0,
            osl=one.osl or 1.0,
        )
        for one in last.pools
        if one.requests
    )
    return DemandForecast(predictor="constant", observed=observed, pools=pools)


def planning(*, pool: dict[str, Any] | None = None, **settings: Any) -> Planning:
    """Return a planner of the pool `default`. Its profile says that a worker prefills 1,300 tokens per second."""
    described = {
        "group": GROUP,
        "pool": "default",
        "max_size": 8,
        "startup_s": 40.0,
        "prefill": (PrefillPoint(isl=100, ttft_ms=50, tokens_per_s=1_300),),
        "decode": (DecodePoint(context=100, concurrency=1, itl_ms=10, tokens_per_s=1_000_000),),
        **(pool or {}),
    }
    options = {"interval_s": INTERVAL_S, "gpu_budget": 0, "pools": (PoolScaling(**described),), **settings}
    return Planning(PlannerSettings(**options), expect_the_same)


def wave(*rates: int, prompt: int = 1_000, output: int = 4) -> list[Turn]:
    """Return turns that arrive with these rates per second, each for one interval."""
    turns: list[Turn] = []
    for at, rate in enumerate(rates):
        for number in range(int(rate * INTERVAL_S)):
            at_us = round((at * INTERVAL_S + number / rate) * S)
            turns.append(turn(len(turns), prompt, output, at_us=at_us))
    return turns


# A run that covers most event types, and the form in which two runs are compared


MS = 1_000


def comparable(outcome: SimulationOutcome) -> Any:
    return list(outcome.requests), outcome.digest, outcome.gpu_s, outcome.timeline, outcome.workers


def eventful() -> str:
    """Return the digest of a run that covers most event types and a hash of its request outcomes."""
    life = LifeCycleSettings(
        faults=(crash_at(worker="mock-1", at_us=900 * MS, back_us=2_000 * MS),),
        starts=(start_at(at_us=1_500 * MS, pool="elsewhere"),),
        mtbf_s=9.0,
        repair_s=1.0,
        cold_start_s=0.5,
        lease_ttl_s=1.0,
    )
    small = {"kv_blocks": 20}  # so that blocks are evicted, and loaded again
    [pool] = fleet(2, sizes=small).pools
    apart = split(2, 2, sizes=small).pools
    system = Settings(
        pools=(
            pool,
            msgspec.structs.replace(pool, name="elsewhere", model="other"),
            *(msgspec.structs.replace(one, name=one.role, model="apart") for one in apart),
        ),
        delays=DELAYS["kafka"],
        life=life,
        tiers=FleetTiers(host=HostTier(size="8blocks"), store=StoreTier(size="40blocks", filter=False)),
        timeout_s=20.0,
    )
    turns = [
        turn(
            number,
            300 + number,
            40,
            block_ids=tuple(range(5 + number % 3)),
            at_us=number * 40 * MS,
            after=(number - 1,) if number % 3 else (),
            delay_us=MS,
            session_id="abc"[number % 3],
            model=("other", "simulated", "apart", "simulated", "apart")[number % 5],
        )
        for number in range(150)
    ]
    outcome = run(system, *turns, router="kv:temperature=0.4,session_ttl_s=2,session_mode=soft")
    assert {one.attempts for one in outcome.requests} >= {1, 2}
    assert any(one.transferred_bytes for one in outcome.requests)
    assert outcome.tiers is not None
    assert set(outcome.tiers.loaded) == {"host", "store"}
    return f"{outcome.digest} {sha256(repr(comparable(outcome)).encode()).hexdigest()}"
