"""Generated engine runs with request times computed by the engine model from a known timing."""

import random
from typing import Any

from forebay.engine_model.model import EngineConfig
from forebay.engine_model.timing import EngineTiming, LinearTiming, StepWork
from forebay.events.base import pack_u64
from forebay.simulate.profiles.observed import EngineRun, ModelledRun, ObservedRequest

TRUTH = LinearTiming(
    step=2000.0, prefill_token=60.0, attended_pair=0.02, decode_step=3000.0, decode_sequence=400.0, context_token=1.5
)
WORK_US = 1500
SIZES: dict[str, Any] = {"block_size": 16, "kv_blocks_total": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 2048}


class Jittered:
    """Engine timing that scales each step by a seeded random factor of up to 1 ± `spread`."""

    def __init__(self, timing: EngineTiming, spread: float, seed: int) -> None:
        self._timing = timing
        self._spread = spread
        self._rng = random.Random(seed)

    def step_us(self, work: StepWork) -> int:
        return max(1, round(self._timing.step_us(work) * self._rng.uniform(1 - self._spread, 1 + self._spread)))


def engine_run(seed: int, requests: int = 200, every_us: int = 400_000, timing: EngineTiming = TRUTH) -> EngineRun:
    """Return a seeded run of short and long prompts, with times computed from `timing`."""
    rng = random.Random(seed)
    at_us = 0
    observed: list[ObservedRequest] = []
    for _ in range(requests):
        at_us += round(rng.expovariate(1 / every_us))
        tokens = rng.choice((rng.randint(20, 200), rng.randint(200, 3000)))
        hashes = pack_u64([rng.getrandbits(64) for _ in range(tokens // SIZES["block_size"])])
        observed.append(ObservedRequest(at_us, tokens, hashes, rng.randint(2, 120)))
    return with_observed_times(EngineRun(f"w{seed}", EngineConfig(vocabulary=None, **SIZES), (), observed), timing)


def with_observed_times(run: EngineRun, timing: EngineTiming = TRUTH) -> EngineRun:
    """Fill in the first-token, last-token and cache observations of `run` from `timing`, and return it."""
    for one, done in ModelledRun(run, timing, WORK_US):
        one.first_us = one.routed_us + round(done.ttft_us)
        one.last_us = one.first_us + round(done.itl_us * (one.output_tokens - 1))
        one.cached_tokens = done.cached_tokens
    return run
