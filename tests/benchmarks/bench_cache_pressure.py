"""Benchmark of routing under cache pressure: reuse and mean TTFT of `kv` and of round-robin.

The workloads are generated from a seed (`tests.simulate.pressure_traces`). The results do not depend on the machine.
"""

import argparse

from forebay.simulate.outcome import summary
from forebay.simulate.settings import engine_config, policy
from forebay.simulate.simulation import Simulation
from tests.simulate.pressure_traces import PRESSURES, Pressure
from tests.simulate.scene import one_pool, played

POLICIES = ("round-robin", "kv:eviction_weight=0", "kv")


def result(pressure: Pressure, name: str, seed: int) -> str:
    """Return reuse and mean TTFT in milliseconds of one policy."""
    fleet = one_pool(pressure.workers, engine_config(kv_blocks=pressure.kv_blocks), seed=seed)
    outcome = Simulation(fleet, policy(name)).run(played(pressure.rows(seed), 1.0), lambda _: None)
    found = summary(outcome, pressure.workers)
    return f"{found['prefix_reuse']:.3f}, {found['ttft_ms']['mean']:.1f}"


def main() -> None:
    """Simulate all workloads and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of the workloads (default %(default)s)")
    seed = parser.parse_args().seed
    print(f"| workload: reuse, mean TTFT ms | {' | '.join(POLICIES)} |")
    print(f"|---|{'---|' * len(POLICIES)}")
    for name, pressure in PRESSURES.items():
        print(f"| {name} | {' | '.join(result(pressure, one, seed) for one in POLICIES)} |", flush=True)


if __name__ == "__main__":
    main()
