"""Generated engine runs with request times computed by the engine model from a known timing."""

import random
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from forebay.engine_model.model import EngineConfig, EngineModel, EngineRequest, EngineStep
from forebay.engine_model.timing import EngineTiming, LinearTiming, StepWork
from forebay.events.base import U32_BYTES
from forebay.events.fleet import WorkerSpec
from forebay.simulate.profiles.fitting import EngineRun, TimedRequest

FOREVER_US = 1 << 62  # no further arrivals: the engine may run until its next event
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


def spec(name: str = "w", **sizes: int) -> WorkerSpec:
    return WorkerSpec(worker_id=name, model="m", **{**SIZES, **sizes})


def engine_run(seed: int, requests: int = 200, every_us: int = 400_000, timing: EngineTiming = TRUTH) -> EngineRun:
    """Return a seeded run of short and long prompts, with times computed from `timing`."""
    rng = random.Random(seed)
    at_us = 0
    observed: list[TimedRequest] = []
    for _ in range(requests):
        at_us += round(rng.expovariate(1 / every_us))
        tokens = rng.choice((rng.randint(20, 200), rng.randint(200, 3000)))
        observed.append(TimedRequest(at_us, tokens, rng.randint(2, 120)))
    return with_observed_times(EngineRun(spec(f"w{seed}"), observed), timing)


def with_observed_times(run: EngineRun, timing: EngineTiming = TRUTH) -> EngineRun:
    """Fill in the times of the first and the last token of `run` from `timing`, and return it."""
    for one, done in ModelledRun(run, timing, WORK_US):
        one.first_us = one.routed_us + round(done.ttft_us)
        one.last_us = one.first_us + round(done.itl_us * (one.output_tokens - 1))
    return run


class ModelledTimes(NamedTuple):
    """Times of a request in the engine model, in microseconds."""

    ttft_us: float
    itl_us: float


class ModelledRun:
    """Runs the requests of one engine in the engine model, without shared prefixes."""

    def __init__(self, run: EngineRun, timing: EngineTiming, work_us: int = 0) -> None:
        self._model = EngineModel(EngineConfig(vocabulary=None, timing=timing, **SIZES))
        self._requests = run.requests
        self._work_us = work_us
        self._first: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[TimedRequest, ModelledTimes]]:
        events = deque(sorted((one.routed_us + self._work_us, number) for number, one in enumerate(self._requests)))
        now_us, left = 0, len(self._requests)
        while left:
            while events and events[0][0] <= now_us:
                self._submit(events.popleft()[1])
            next_us = events[0][0] if events else FOREVER_US
            step = self._model.step(next_us - now_us)
            if step is None:
                now_us = next_us
                continue
            now_us += step.duration_us
            left -= len(step.finished)
            yield from self._ended(step, now_us)

    def _submit(self, number: int) -> None:
        one = self._requests[number]
        tokens = bytes(one.prompt_tokens * U32_BYTES)
        hashes = b"".join((number << 32 | at).to_bytes(8, "little") for at in range(one.prompt_tokens // 16))
        self._model.submit(
            EngineRequest(
                request_id=str(number),
                attempt=1,
                token_ids=tokens,
                sequence_hashes=hashes,
                token_seed=number,
                max_tokens=one.output_tokens,
            )
        )

    def _ended(self, step: EngineStep, now_us: int) -> Iterator[tuple[TimedRequest, ModelledTimes]]:
        for first in step.first_tokens:
            self._first[first.request_id] = now_us
        for end in step.finished:
            one, first_us = self._requests[int(end.request_id)], self._first.pop(end.request_id)
            itl_us = (now_us - first_us) / max(1, end.output_tokens - 1)
            yield one, ModelledTimes(first_us - one.routed_us, itl_us)
