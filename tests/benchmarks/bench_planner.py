"""Comparison of planners on recorded traffic: SLO attainment and GPU hours, beside static sizes and an oracle.

The first half of a trace is day 1, on which the parameters of each planner are fitted. The second half is day 2, on
which the planners are judged. Arrival times are stretched, and of several requests one is kept, so that a fleet of
slow workers needs minutes to simulate. docs/scaling.md describes the comparison and defines the oracle.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product

from msgspec.structs import replace

from forebay.core.scaling.virtual_planner import Forecast
from forebay.engine_model.timing import LinearTiming
from forebay.events.scaling import (
    DecodePoint,
    DemandForecast,
    Method,
    PlannerSettings,
    PoolDemand,
    PoolScaling,
    PrefillPoint,
    ScalingObserved,
    SimulatedSize,
)
from forebay.planner.predictors import predictor
from forebay.planner.simulation import PoolEngine, simulated_sizes
from forebay.simulate.planned import Planning
from forebay.simulate.reading import open_workload
from forebay.simulate.settings import Delays, PoolSettings, Settings, WorkerGroup, engine_config, policy
from forebay.simulate.simulation import Simulation
from forebay.simulate.slo import Slo, goodput
from forebay.simulate.workload import Survey, Turn, WorkloadOptions

GROUP, POOL = "bench", "default"
COLD_START_S = 120.0
TARGET = 0.99
SIZE_MAX = 24
STEP_S = 60.0  # step of a schedule
PROCESSES = 4
SEQUENCES = 4  # running sequences per worker
US_PER_S = 1_000_000


@dataclass(frozen=True, slots=True)
class Trace:
    """Traffic and the workers that serve it.

    Attributes:
        stretch: factor of the times between arrivals.
        keep: one of this many requests is kept.
        prefill_us: engine time per prompt token in microseconds.
        decode_us: engine time per step that decodes, and per decoding sequence.
    """

    stretch: float
    keep: int
    prefill_us: float
    decode_us: tuple[float, float]
    slo: Slo


TRACES = {
    "azure": Trace(3.0, 3, 1_000.0, (60_000.0, 12_000.0), Slo(ttft_ms=6_000, itl_ms=300)),
    "mooncake": Trace(3.0, 3, 150.0, (60_000.0, 12_000.0), Slo(ttft_ms=30_000, itl_ms=500)),
}


class Day:
    """Workload of the given turns. Prompts share no prefixes, so all of them are computed."""

    name = "day"
    block_tokens = 64

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns

    def survey(self) -> Survey:
        return Survey(requests=len(self._turns))

    def turns(self) -> Iterator[Turn]:
        return iter(self._turns)


@dataclass(frozen=True, slots=True)
class Planned:
    """A planner with fixed parameters, or a schedule of sizes.

    Attributes:
        interval_s: seconds between observations.
        utilization: share of the profile's throughput that the planner counts on; for method `simulate`, share of the
            targets that it simulates for.
        cooldown_s: seconds before a change in the opposite direction.
        sensitivity: margin of method `load`.
        schedule: sizes per `STEP_S`; empty for a planner.
    """

    method: Method = "throughput"
    predictor: str = "constant"
    interval_s: float = STEP_S
    utilization: float = 1.0
    cooldown_s: float = 0.0
    sensitivity: float = 0.8
    schedule: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one day.

    Attributes:
        attained: share of the requests that met both targets.
        sizes: size after each step of `STEP_S` or of the planner's interval.
    """

    attained: float
    gpu_hours: float
    sizes: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ByHeart:
    """Predictor that knows the schedule: its forecast leads to these sizes."""

    schedule: tuple[int, ...]

    def __call__(self, history: Sequence[ScalingObserved], observed: int) -> DemandForecast:
        at = round(history[-1].at_us / US_PER_S / STEP_S)
        size = self.schedule[min(at, len(self.schedule) - 1)]
        demand = PoolDemand(group=GROUP, pool=POOL, requests_per_s=size, isl=1, osl=0)
        return DemandForecast(predictor="schedule", observed=observed, pools=(demand,))


def read_days(path: str, trace: Trace) -> tuple[list[Turn], list[Turn]]:
    """Return the requests of both days. Both begin at time 0."""
    turns = list(open_workload(path, WorkloadOptions(speed=1 / trace.stretch)).turns())
    half_us = turns[-1].at_us // 2
    days: tuple[list[Turn], list[Turn]] = ([], [])
    for turn in turns[:: trace.keep]:
        day = days[turn.at_us > half_us]
        at_us = turn.at_us - (half_us if turn.at_us > half_us else 0)
        day.append(replace(turn, number=len(day), block_ids=(), at_us=at_us, after=(), delay_us=0, session_id=""))
    return days


def profile(trace: Trace, turns: Sequence[Turn], utilization: float) -> dict[str, object]:
    """Return the points of one worker, with its throughput multiplied by `utilization`."""
    isl = sum(turn.prompt_tokens for turn in turns) / len(turns)
    osl = sum(turn.output_tokens for turn in turns) / len(turns)
    step_us, sequence_us = trace.decode_us
    decode = tuple(
        DecodePoint(
            context=isl + osl / 2,
            concurrency=count,
            itl_ms=(step_us + count * sequence_us) / 1e3,
            tokens_per_s=utilization * count * 1e6 / (step_us + count * sequence_us),
        )
        for count in (1, 2, SEQUENCES)
    )
    prefill = PrefillPoint(
        isl=isl, ttft_ms=isl * trace.prefill_us / 1e3, tokens_per_s=utilization * 1e6 / trace.prefill_us
    )
    return {"prefill": (prefill,), "decode": decode}


def run(trace: Trace, turns: Sequence[Turn], planned: Planned, first: int) -> Result:
    """Simulate one day, starting with `first` workers."""
    engine = engine_config(max_num_seqs=SEQUENCES, kv_blocks=65_536)
    timing = LinearTiming(prefill_token=trace.prefill_us, decode_step=trace.decode_us[0],
                          decode_sequence=trace.decode_us[1])  # fmt: skip
    group = WorkerGroup(count=first, engine=replace(engine, timing=timing))
    points = profile(trace, turns, planned.utilization)
    forecast: Forecast
    if planned.schedule:
        forecast = ByHeart(planned.schedule)
        points = {"prefill": (PrefillPoint(isl=1, ttft_ms=1, tokens_per_s=1),)}
    else:
        forecast = predictor(planned.predictor)
    pool = PoolScaling(
        group=GROUP, pool=POOL, max_size=SIZE_MAX, startup_s=COLD_START_S, **points  # type: ignore[arg-type]
    )  # fmt: skip
    margin = planned.utilization if planned.method == "simulate" else 1.0
    settings = PlannerSettings(
        pools=(pool,), interval_s=planned.interval_s, method=planned.method,
        ttft_ms=margin * (trace.slo.ttft_ms or 1.0), itl_ms=margin * (trace.slo.itl_ms or 1.0), gpu_budget=0,
        max_change=SIZE_MAX, cooldown_s=planned.cooldown_s,
        down_sensitivity=planned.sensitivity, predictor=planned.predictor,
    )  # fmt: skip
    fleet = Settings(pools=(PoolSettings(groups=(group,)),))
    engines = {(GROUP, POOL): PoolEngine(replace(group, count=1), Delays())}

    def simulate(expected: DemandForecast, target: float) -> Iterator[SimulatedSize]:
        return simulated_sizes(expected, settings, engines, target)

    simulation = Simulation(fleet, policy("least-loaded"), planning=Planning(settings, forecast, simulate))
    outcome = simulation.run(Day(turns), lambda _: None)
    sizes = tuple(one.sizes[POOL] for one in outcome.planned)
    return Result(goodput(outcome, trace.slo)["attained"], outcome.gpu_s / 3_600, sizes)


def worker_s(trace: Trace, turn: Turn) -> float:
    """Return the seconds that a full worker spends on a request, as its share of the worker's time."""
    step_us = (trace.decode_us[0] + SEQUENCES * trace.decode_us[1]) / SEQUENCES
    return (turn.prompt_tokens * trace.prefill_us + turn.output_tokens * step_us) / US_PER_S


def needed(trace: Trace, turns: Sequence[Turn], window_s: float) -> list[float]:
    """Return the busy workers that the arrivals around the end of each step need, as a moving average."""
    work = [0.0] * (int(turns[-1].at_us / US_PER_S / STEP_S) + 1)
    for turn in turns:
        work[int(turn.at_us / US_PER_S / STEP_S)] += worker_s(trace, turn) / STEP_S
    half = max(1, round(window_s / STEP_S / 2))
    spans = [work[max(0, at - half) : at + half] for at in range(len(work) + 1)]
    return [sum(span) / len(span) for span in spans]


def schedule(need: Sequence[float], headroom: float) -> tuple[int, ...]:
    """Return sizes that have `headroom` times the needed workers ready, so workers start before they are needed."""
    ahead = math.ceil(COLD_START_S / STEP_S) + 1
    highest = [max(need[at : at + ahead + 1]) for at in range(len(need))]
    return tuple(min(SIZE_MAX, max(1, math.ceil(headroom * one))) for one in highest)


_days: dict[str, object] = {}


def _load(name: str, path: str) -> None:
    _days["trace"], _days["days"] = TRACES[name], read_days(path, TRACES[name])


def _run(day: int, planned: Planned, first: int) -> Result:
    return run(_days["trace"], _days["days"][day], planned, first)  # type: ignore[arg-type, index]


class Comparison:
    """Runs of one trace. Each run is simulated once."""

    def __init__(self, name: str, path: str) -> None:
        self.trace = TRACES[name]
        self.days = read_days(path, self.trace)
        self._pool = ProcessPoolExecutor(PROCESSES, initializer=_load, initargs=(name, path))
        self._known: dict[tuple[int, Planned, int], Result] = {}

    def results(self, day: int, planned: Sequence[Planned]) -> list[Result]:
        """Simulate a day with each of the planners or schedules."""
        first = max(1, math.ceil(needed(self.trace, self.days[day], 600)[0] / 0.7))
        keys = [(day, one, one.schedule[0] if one.schedule else first) for one in planned]
        missing = list(dict.fromkeys(key for key in keys if key not in self._known))
        runs = [self._pool.submit(_run, *key) for key in missing]
        self._known.update({key: one.result() for key, one in zip(missing, runs, strict=True)})
        return [self._known[key] for key in keys]

    def fitted(self, day: int, candidates: Sequence[Planned]) -> Planned:
        """Return the cheapest candidate that attains the target on a day, or the one with the highest attainment."""
        found = list(zip(candidates, self.results(day, candidates), strict=True))
        attaining = [one for one in found if one[1].attained >= TARGET]
        if attaining:
            return min(attaining, key=lambda one: one[1].gpu_hours)[0]
        return max(found, key=lambda one: one[1].attained)[0]

    def cheapest(self, options: Sequence[Planned]) -> tuple[Planned, Result] | None:
        """Return the first option, of rising cost, that attains the target on day 2, by bisection."""
        low, high = 0, len(options)
        while low < high:
            middle = (low + high) // 2
            (result,) = self.results(1, [options[middle]])
            low, high = (low, middle) if result.attained >= TARGET else (middle + 1, high)
        return None if low == len(options) else (options[low], self.results(1, [options[low]])[0])

    def oracle(self) -> tuple[Planned, Result]:
        """Return the cheapest schedule that was found for day 2 with knowledge of its requests."""
        found = []
        for window_s in (600.0, 1_800.0):
            need = needed(self.trace, self.days[1], window_s)
            options = [Planned(schedule=schedule(need, 1 + step / 8)) for step in range(15)]
            if best := self.cheapest(options):
                found.append(best)
        best = min(found, key=lambda one: one[1].gpu_hours)
        return self._refined(*best)

    def _refined(self, planned: Planned, result: Result) -> tuple[Planned, Result]:
        """Remove a worker from as many parts of a schedule as possible, those first whose attainment falls least."""
        count = len(planned.schedule)
        parts = [range(at, min(at + 15, count)) for at in range(0, count, 15)]
        alone = self.results(1, [_without(planned, [part]) for part in parts])
        order = [part for _, part in sorted(zip((-one.attained for one in alone), parts, strict=True), key=_first)]
        options = [_without(planned, order[:removed]) for removed in range(len(order), -1, -1)]
        found = self.cheapest(options)
        return found if found is not None and found[1].gpu_hours < result.gpu_hours else (planned, result)


def _first(one: tuple[float, range]) -> float:
    return one[0]


def _without(planned: Planned, parts: Sequence[range]) -> Planned:
    removed = {at for part in parts for at in part}
    return Planned(schedule=tuple(max(1, size - (at in removed)) for at, size in enumerate(planned.schedule)))


def candidates() -> dict[str, list[Planned]]:
    """Return the planners with the parameters to choose from, by name."""
    found = {
        f"throughput, {name}": [
            Planned("throughput", name, interval_s=interval_s, utilization=share, cooldown_s=600.0)
            for interval_s, share in product((120.0, 300.0), (0.5, 0.65))
        ]
        for name in ("constant", "moving-average", "kalman", "arima")
    }
    found["load"] = [
        Planned("load", sensitivity=share, cooldown_s=cooldown_s)
        for share, cooldown_s in product((0.2, 0.6), (0.0, 600.0))
    ]
    found["simulate, constant"] = [
        Planned("simulate", interval_s=300.0, utilization=share, cooldown_s=600.0) for share in (0.35, 0.4, 0.45, 0.8)
    ]
    for name in ("constant", "moving-average"):
        found[f"both, {name}"] = [
            Planned("both", name, interval_s=120.0, utilization=share, sensitivity=0.4, cooldown_s=600.0)
            for share in (0.6, 0.8)
        ]
    return found


def compare(name: str, path: str) -> None:
    """Print the table of one trace."""
    comparison = Comparison(name, path)
    counts = " and ".join(f"{len(day):,}" for day in comparison.days)
    hours = comparison.days[0][-1].at_us / US_PER_S / 3_600
    print(f"\n{name}: days of {hours:.1f} h with {counts} requests", flush=True)
    length = len(needed(comparison.trace, comparison.days[1], STEP_S))
    statics = [Planned(schedule=(size,) * length) for size in range(1, SIZE_MAX + 1)]
    rows: list[tuple[str, Planned, Result]] = []
    static = comparison.cheapest(statics)
    if static is not None:
        rows.append((f"best static size: {static[0].schedule[0]}", *static))
    for label, options in candidates().items():
        best = comparison.fitted(0, options)
        rows.append((label, best, comparison.results(1, [best])[0]))
        print(f"{label}: {rows[-1][2].attained:.2%}, {rows[-1][2].gpu_hours:.2f} GPU hours", flush=True)
    oracle = comparison.oracle()
    attaining = [(planned, result) for _, planned, result in rows if result.attained >= TARGET]
    oracle = min([oracle, *attaining], key=lambda one: one[1].gpu_hours)
    rows.insert(0, ("oracle", *oracle))
    print("| planner | parameters | sizes | attainment | GPU hours | times the oracle |")
    print("|---|---|--:|--:|--:|--:|")
    for label, planned, result in rows:
        sizes = f"{min(result.sizes)} to {max(result.sizes)}"
        share = result.gpu_hours / oracle[1].gpu_hours
        cells = (label, parameters(planned), sizes, f"{result.attained:.2%}", f"{result.gpu_hours:.2f}", f"{share:.2f}")
        print("| " + " | ".join(cells) + " |", flush=True)


def parameters(planned: Planned) -> str:
    if planned.schedule:
        return ""
    parts = [f"`interval_s` {planned.interval_s:g}"]
    shares = {"simulate": "share of the targets", "load": ""}
    if share := shares.get(planned.method, "utilization"):
        parts.append(f"{share} {planned.utilization:g}")
    if planned.method in {"load", "both"}:
        parts.append(f"`down_sensitivity` {planned.sensitivity:g}")
    parts += [f"`cooldown_s` {planned.cooldown_s:g}"] if planned.method == "load" else []
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench ARGS=planner", description=__doc__)
    for name in TRACES:
        parser.add_argument(f"--{name}", metavar="FILE", help=f"trace {name}")
    given = vars(parser.parse_args())
    for name, path in given.items():
        if path is not None:
            compare(name, path)


if __name__ == "__main__":
    main()
