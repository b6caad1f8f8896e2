"""Synthetic simulation outcomes, for tests of reports and comparisons."""

import random
from collections.abc import Sequence

from forebay.analysis.runs import SimulationRun
from forebay.events.control import RouterConfig
from forebay.simulate.outcome import RequestOutcome, RequestOutcomes, SimulationOutcome, UtilizationTimeline, summary
from forebay.simulate.settings import engine_config
from tests.simulate.scene import one_pool

SEED = 20_262
BIN_US = 1_000_000
EVERY_US = 100_000  # between arrivals


def run(
    name: str,
    *,
    requests: int = 400,
    workers: int = 4,
    slower: float = 1.0,
    reuse: float = 0.3,
    failed: Sequence[int] = (),
    again: Sequence[int] = (),
    mode: str = "kv",
    held: bool = False,
) -> SimulationRun:
    """Return a run with latencies scaled by `slower`. Arrivals and sizes depend only on the number of requests.

    Requests in `failed` have no response and requests in `again` took two attempts, by number. With `held`,
    requests waited in the router.
    """
    settings = one_pool(workers, engine_config())
    names = [f"mock-{number}" for number in range(workers)]
    served = [
        _served(number, workers, slower, reuse, number in failed, 1 + (number in again)) for number in range(requests)
    ]
    outcome = SimulationOutcome(
        requests=RequestOutcomes(served),
        digest=f"digest of {name}",
        workers=names,
        gpu_s=workers * requests * EVERY_US / 1e6,
        lasted_us=max((one.last_us for one in served), default=0),
        timeline=_timeline(served, workers, held),
    )
    return SimulationRun(name, settings, RouterConfig(mode=mode), outcome, summary(outcome, workers))


def _served(number: int, workers: int, slower: float, reuse: float, failed: bool, attempts: int) -> RequestOutcome:
    rng = random.Random(SEED + number)
    arrived_us, prompt, output = number * EVERY_US, rng.randrange(200, 9_000), rng.randrange(1, 60)
    worker = rng.randrange(workers)
    first_us = arrived_us + round(rng.lognormvariate(11.5, 1.1) * slower)
    last_us = first_us + round((output - 1) * rng.uniform(6_000, 12_000) * slower)
    if failed:
        return RequestOutcome(arrived_us, prompt, output, None, failure="too large for any worker", number=number)
    cached = round(prompt * reuse * rng.random() * 2) // 64 * 64
    return RequestOutcome(arrived_us, prompt, output, worker, cached, first_us, last_us, attempts, number=number)


def _timeline(served: Sequence[RequestOutcome], workers: int, held: bool) -> UtilizationTimeline:
    bins = max((one.last_us for one in served), default=-1) // BIN_US + 1
    line = UtilizationTimeline(BIN_US)
    for name in ("arrived", "prompt_tokens", "cached_tokens", "queued", "workers"):
        setattr(line, name, [0] * bins)
    for name in ("computed", "running", "waiting"):
        setattr(line, name, [[0] * bins for _ in range(workers)])
    line.workers = (
        [workers if at != bins // 2 else workers - 1 for at in range(bins)] if workers > 1 else [workers] * bins
    )
    for one in served:
        line.arrived[one.arrived_us // BIN_US] += 1
        if one.worker is None:
            continue
        at = one.first_us // BIN_US
        line.prompt_tokens[at] += one.prompt_tokens
        line.cached_tokens[at] += one.cached_tokens
        line.computed[one.worker][at] += one.prompt_tokens - one.cached_tokens
        for when in range(one.arrived_us // BIN_US, one.last_us // BIN_US + 1):
            line.running[one.worker][when] += 1
            line.waiting[one.worker][when] += when < at
            line.queued[when] += held and when < at
    return line
