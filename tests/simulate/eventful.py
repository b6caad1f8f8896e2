"""A simulated run that covers most event types, and the form in which two runs are compared."""

from hashlib import sha256
from typing import Any

import msgspec

from forebay.simulate.outcome import SimulationOutcome
from forebay.simulate.settings import DELAYS, LifeCycleSettings, Settings, WorkerFault, WorkerStart, policy
from forebay.simulate.simulation import Simulation
from forebay.simulate.tiers.settings import FleetTiers, HostTier, StoreTier
from forebay.simulate.workload import Turn
from tests.simulate.fleets import Turns, fleet, split, turn
from tests.simulate.policies import CUSTOM

MS = 1_000


def run(system: Settings, name: str, turns: tuple[Turn, ...]) -> SimulationOutcome:
    return Simulation(system, policy(name), CUSTOM).run(Turns(*turns), lambda _: None)


def comparable(outcome: SimulationOutcome) -> Any:
    return list(outcome.requests), outcome.digest, outcome.gpu_s, outcome.timeline, outcome.routed, outcome.workers


def eventful() -> str:
    """Return the digest of a run that covers most event types and a hash of its request outcomes."""
    life = LifeCycleSettings(
        faults=(WorkerFault(worker="mock-1", at_us=900 * MS, back_us=2_000 * MS),),
        starts=(WorkerStart(at_us=1_500 * MS, pool="elsewhere"),),
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
    outcome = run(system, "kv:temperature=0.4,session_ttl_s=2,session_mode=soft", tuple(turns))
    assert {one.attempts for one in outcome.requests} >= {1, 2}
    assert any(one.transferred_bytes for one in outcome.requests)
    assert outcome.tiers is not None
    assert set(outcome.tiers.loaded) == {"host", "store"}
    return f"{outcome.digest} {sha256(repr(comparable(outcome)).encode()).hexdigest()}"
