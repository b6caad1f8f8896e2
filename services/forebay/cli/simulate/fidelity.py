"""Fidelity of the simulation: recorded requests are simulated again, and compared with the recorded times.

All times are of the owner's clock in the recording. The arrival, the first token and the end of a request are the times
at which the owner applied the corresponding events.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.cli.common.recorded_simulation import RecordedRequests, RecordedSimulation
from forebay.cli.simulate.fidelity_stages import PlacementAgreement, agreement, placeable, specs, stages
from forebay.cli.simulate.simulations import OnDone, Work, run_all
from forebay.core.routing.policies import CustomPolicies
from forebay.core.state.holder_bits import HolderKey
from forebay.engine_model.timing import EngineTiming
from forebay.events.control import DisaggregationSet, PoolConfigured, RouterConfig
from forebay.events.fleet import WorkerJoined, WorkerLost
from forebay.events.snapshots import Chunk, WorldState
from forebay.ingress.errors import Unusable
from forebay.replay.observed import ExternalEvent, ObservedHistory
from forebay.simulate.outcome import LOWER_TIERS, RequestOutcome, percentiles, tier_tokens
from forebay.simulate.resumed import MOCKER, NO_DELAYS, NO_TIERS, rank_keys
from forebay.simulate.settings import Delays
from forebay.simulate.tiers.settings import FleetTiers
from forebay.simulate.transfer_fit import TransferFit

AS_RECORDED = "as recorded"
PLACED = "recorded placement"  # no decision differs from the recording, so the error is that of the engine model
TIMES = ("ttft_ms", "itl_ms", "e2e_ms")
STAGE_TIMES = ("prefill_ms", "transfer_ms")  # of remote prefills
STATISTICS = ("mean", "p50", "p90", "p99")
LATER_US = 1_000  # one clock reading of the owner covers up to five times as much
FAILURES_SHOWN = 5
MOVED = ("prefilled_remotely", "transferred_bytes")


@dataclass(frozen=True, slots=True)
class FidelitySettings:
    """Settings of the simulations that are compared with a recording.

    Attributes:
        speedup: factor by which the simulated engines are faster than the modelled GPU.
        repeat: number of simulations. All but the first shift each arrival by a random delay up to `LATER_US`.
        delays: latencies between router and engines. Latencies to the router are ignored, because the recorded times
            include them. Latencies to clients are ignored, because times are measured at the router.
        link: values of `Transfer` fields that the user has set. The other fields are fitted to the recorded transfers.
        kv_bytes_per_token: bytes of KV per token in these tiers; None if the user has not set them.
    """

    speedup: float = 1.0
    repeat: int = 1
    delays: Delays = NO_DELAYS
    timing: EngineTiming = MOCKER
    link: Mapping[str, float] = field(default_factory=dict)
    tiers: FleetTiers = NO_TIERS
    kv_bytes_per_token: int | None = None


class FidelityMetric(msgspec.Struct, frozen=True):
    """One metric, as recorded (observed) and as simulated.

    Attributes:
        error: simulated minus observed, in percent of the observed value, or in percentage points for shares. None if
            the observed value is 0 and the simulated value is not.
    """

    observed: float
    simulated: float
    error: float | None


EXACT = FidelityMetric(0.0, 0.0, 0.0)  # a metric that is 0 in the recording and in the simulation


class ErrorSpread(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of the errors of a simulated latency over the requests.

    Attributes:
        percent_p50: median absolute error in percent of the observed time.
        percent_p90: 90th percentile of the absolute error in percent of the observed time.
        ms_p10: 10th percentile of simulated minus observed, in milliseconds.
        ms_p50: median of simulated minus observed, in milliseconds.
        ms_p90: 90th percentile of simulated minus observed, in milliseconds.
    """

    percent_p50: float
    percent_p90: float
    ms_p10: float
    ms_p50: float
    ms_p90: float


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of one simulation with the recording. All metrics cover only the `compared` requests.

    Attributes:
        name: name of the simulated policy. `AS_RECORDED` and `PLACED` use the recorded configuration.
        draw: number of the random shift that was applied to the arrival times; 0 if they are as recorded.
        compared: number of requests that completed in the recording and in the simulation.
        failed: number of requests that completed in the recording, but not in the simulation.
        times: latencies in milliseconds. The first key is the name of the latency: one of `TIMES`, in a disaggregated
            fleet also of `STAGE_TIMES`. The second key is the statistic: one of `OF`.
        prefix_reuse: share of prompt tokens found in a cache.
        tiers: shares of prompt tokens by where their KV came from, as in `tier_tokens`; empty if no request loaded KV.
        load_max_over_mean: prompt tokens computed by the busiest worker, divided by the mean of all workers. In a
            disaggregated fleet only prefill workers count.
        placement: agreement of recording and simulation on the worker rank that generated the response.
        stages: agreement per kind of decision in a disaggregated fleet; see
            `forebay.cli.simulate.fidelity_stages.stages`.
        prefilled_remotely: number of remote prefills; None without prefill workers.
        transferred_bytes: bytes of KV transferred; None without prefill workers.
        single: distribution of the errors over the requests, by latency (`TIMES`).
        failures: most frequent failure reasons.
        digest: hash of all simulated decisions. Equal simulations have equal digests.
    """

    name: str
    draw: int
    compared: int
    failed: int
    times: dict[str, dict[str, FidelityMetric]]
    prefix_reuse: FidelityMetric
    tiers: dict[str, FidelityMetric]
    load_max_over_mean: FidelityMetric
    placement: PlacementAgreement
    stages: dict[str, PlacementAgreement]
    prefilled_remotely: FidelityMetric | None
    transferred_bytes: FidelityMetric | None
    single: dict[str, ErrorSpread]
    failures: list[str]
    digest: str


class FidelityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `forebay simulate --against`: facts about the recording, and the comparison with each simulation.

    Attributes:
        span_s: seconds from the first to the last event of the recording.
        requests: number of recorded requests, including requests in flight at the beginning of the recording.
        left_out: number of requests that are not compared, by reason.
        hops_ms: p50 and p90 of recorded latencies, measured between the wall clocks of two processes. `submit` is from
            the ingress to the router, `progress` from the worker to the router.
        speedup: factor by which the simulated engines are faster than the modelled GPU.
        transfer: KV transfer model fitted to the recording; None without prefill workers.
        simulated: comparison of each simulation, sorted so that simulations of one name are consecutive.
    """

    span_s: float
    requests: int
    workers: int
    left_out: dict[str, int]
    hops_ms: dict[str, dict[str, float]]
    speedup: float
    transfer: TransferFit | None
    simulated: list[SimulatedRun]
    notes: list[str]

    def above(self, bounds: Mapping[str, float]) -> list[str]:
        """Return a message for each metric whose mean error over the simulations `AS_RECORDED` exceeds its bound."""
        runs = [one for one in self.simulated if one.name == AS_RECORDED]
        found = []
        for name, most in bounds.items():
            for what, unit, of in _BOUNDED[name]:
                errors = [of(one).error for one in runs]
                sized = [error for error in errors if error is not None]
                mean = statistics.fmean(sized) if len(sized) == len(errors) else None
                if mean is None or abs(mean) > most:
                    size = "undefined, because the observed value is 0" if mean is None else f"{mean:+.2f} {unit}"
                    found.append(f"error of {what} is {size}; the bound is {most:g}")
        return found


@dataclass(frozen=True, slots=True)
class _Pair:
    """Recorded and simulated outcome of one request. Both use the same numbers for the worker ranks."""

    observed: RequestOutcome
    simulated: RequestOutcome


def fidelity(
    history: ObservedHistory, routers: Mapping[str, RouterConfig], playing: FidelitySettings, custom: CustomPolicies
) -> FidelityReport:
    """Simulate a recording under its own configuration and under each of `routers`, and compare the results with it.

    Args:
        history: the recorded requests, events and state.
        routers: further routing configurations to simulate, by name. Each simulation runs in its own process.

    Raises:
        Unusable: the history cannot be simulated.
    """
    simulation = RecordedSimulation.of(history.requests, _ranks(history), list(specs(history)), playing.link)
    requests, fit = simulation.requests, simulation.fit
    idle = [name for name in routers if "disagg." in name]
    if fit is None and idle:
        raise Unusable(f"{idle[0]}: disagg settings need prefill and decode workers, but the recording has none")
    if fit is None and playing.link:
        raise Unusable("the recording has no KV transfers; omit the --kv-transfer-* options")
    played = partial(_FidelityRun, history, simulation, playing, custom)
    runs = [played(AS_RECORDED, draw=draw) for draw in range(playing.repeat)]
    runs.append(played(PLACED, placed=True))
    for name, router in routers.items():
        runs += [played(name, router, draw) for draw in range(playing.repeat)]
    simulated = []
    for one in run_all([Work(run.label, len(requests.by_id), run) for run in runs]):
        if isinstance(one, Exception):
            raise one
        simulated.append(one)
    return FidelityReport(
        span_s=(history.end_us - history.begin_us) / 1e6,
        requests=len(requests.by_id),
        workers=len(simulation.ranks),
        left_out=_left_out(requests),
        hops_ms=_hops(requests),
        speedup=playing.speedup,
        transfer=fit,
        simulated=simulated,
        notes=_notes(history, requests, playing),
    )


@dataclass(frozen=True, slots=True)
class _FidelityRun:
    """One simulation of a history.

    Attributes:
        router: routing configuration that replaces the recorded one; None keeps it.
        draw: number of the random shift of arrivals; 0 for none.
        placed: whether requests that ran on a single worker are sent to the same worker again.
    """

    history: ObservedHistory
    simulation: RecordedSimulation
    playing: FidelitySettings
    custom: CustomPolicies
    name: str
    router: RouterConfig | None = None
    draw: int = 0
    placed: bool = False

    @property
    def label(self) -> str:
        """Name in the progress display."""
        return f"{self.name}, {self.draw + 1}" if self.draw else self.name

    def __call__(self, on_done: OnDone) -> SimulatedRun:
        """Run the simulation and compare it with the recording.

        Raises:
            Unusable: the history cannot be simulated, or no request completed on both sides.
        """
        state, events = placeable(self.history) if self.placed else (self.history.state, self.history.external_events)
        state, events = _routed_by(self.router, state, events, over_operators="disagg." in self.name)
        playing, simulation = self.playing, self.simulation
        resumed = simulation.run(
            state,
            simulation.requests.arrivals(events, _arrival_shift(self.draw), placed=self.placed),
            on_done,
            speedup=playing.speedup,
            delays=msgspec.structs.replace(playing.delays, submit=NO_DELAYS.submit, tokens=playing.delays.progress),
            timing=playing.timing,
            custom=self.custom,
            tiers=playing.tiers,
            kv_bytes_per_token=playing.kv_bytes_per_token,
        )
        pairs = []
        failures: Counter[str] = Counter()
        for request_id, recorded in simulation.observed().items():
            served = resumed.served[request_id]
            if served.failure:
                failures[served.failure] += 1
            else:
                pairs.append(_Pair(recorded, served))
        if not pairs:
            reasons = f": {failures.most_common(1)[0][0]}" if failures else ""
            raise Unusable(f"{self.name}: no request completed both in the recording and in the simulation{reasons}")
        return _compare(self, pairs, failures, resumed.digest)


def _arrival_shift(draw: int) -> Callable[[int], int]:
    """Return a function that maps a request number to the delay of its arrival in microseconds."""
    if not draw:
        return lambda _: 0
    return lambda number: xxh3_64_intdigest(b"%d" % number, draw) % LATER_US


def _compare(run: _FidelityRun, pairs: Sequence[_Pair], failures: Counter[str], digest: str) -> SimulatedRun:
    ours = run.simulation.summarize(pair.observed for pair in pairs)
    theirs = run.simulation.summarize(pair.simulated for pair in pairs)
    prefill_workers = run.simulation.prefill_workers
    moved = {of: _percent(ours[of], theirs[of]) if of in ours else None for of in MOVED}
    times = TIMES + STAGE_TIMES if prefill_workers else TIMES
    return SimulatedRun(
        name=run.name,
        draw=run.draw,
        compared=len(pairs),
        failed=failures.total(),
        times={
            time: {of: _percent(ours[time].get(of, 0.0), theirs[time].get(of, 0.0)) for of in STATISTICS}
            if ours[time] or theirs[time]
            else {}
            for time in times
        },
        prefix_reuse=_points(ours["prefix_reuse"], theirs["prefix_reuse"]),
        tiers=_tiers(pairs),
        load_max_over_mean=_percent(ours["load_max_over_mean"], theirs["load_max_over_mean"]),
        placement=agreement([(pair.observed.worker, pair.simulated.worker) for pair in pairs]),
        stages=stages([(pair.observed, pair.simulated) for pair in pairs]) if prefill_workers else {},
        **moved,
        single={time: spread for time in TIMES if (spread := _spread(pairs, _MS[time])) is not None},
        failures=[reason for reason, _ in failures.most_common(FAILURES_SHOWN)],
        digest=digest,
    )


def _tiers(pairs: Sequence[_Pair]) -> dict[str, FidelityMetric]:
    ours, theirs = tier_tokens(pair.observed for pair in pairs), tier_tokens(pair.simulated for pair in pairs)
    if not any(side[tier] for side in (ours, theirs) for tier in LOWER_TIERS):
        return {}
    total = max(1, sum(ours.values()))
    return {name: _points(ours[name] / total, theirs[name] / total) for name in ours}


_MS: dict[str, Callable[[RequestOutcome], float | None]] = {
    "ttft_ms": lambda one: (one.first_us - one.arrived_us) / 1e3,
    "itl_ms": lambda one: (
        (one.last_us - one.first_us) / 1e3 / (one.output_tokens - 1) if one.output_tokens > 1 else None
    ),
    "e2e_ms": lambda one: (one.last_us - one.arrived_us) / 1e3,
}


def of_time(time: str, of: str) -> Callable[[SimulatedRun], FidelityMetric]:
    """Return a function that reads a metric of a run: the statistic `of` (`OF`) of the latency `time` (`TIMES`)."""
    return lambda one: one.times[time].get(of, EXACT)


_BOUNDED: dict[str, list[tuple[str, str, Callable[[SimulatedRun], FidelityMetric]]]] = {
    **{time.removesuffix("_ms"): [(f"{time} {of}", "%", of_time(time, of)) for of in ("p50", "p90")] for time in TIMES},
    "reuse": [("prefix_reuse", "points", lambda one: one.prefix_reuse)],
    "load": [("load_max_over_mean", "%", lambda one: one.load_max_over_mean)],
}


def _percent(ours: float, theirs: float) -> FidelityMetric:
    if ours:
        return FidelityMetric(ours, theirs, 100 * (theirs - ours) / ours)
    return FidelityMetric(ours, theirs, None if theirs else 0.0)


def _points(ours: float, theirs: float) -> FidelityMetric:
    return FidelityMetric(ours, theirs, 100 * (theirs - ours))


def _spread(pairs: Sequence[_Pair], of: Callable[[RequestOutcome], float | None]) -> ErrorSpread | None:
    """Return the errors of single requests; None if no request has this latency."""
    both = [
        (ours, theirs) for pair in pairs if (ours := of(pair.observed)) and (theirs := of(pair.simulated)) is not None
    ]
    if not both:
        return None
    percent = _deciles([100 * abs(theirs - ours) / ours for ours, theirs in both])
    ms = _deciles([theirs - ours for ours, theirs in both])
    return ErrorSpread(percent_p50=percent[4], percent_p90=percent[8], ms_p10=ms[0], ms_p50=ms[4], ms_p90=ms[8])


def _deciles(values: Sequence[float]) -> Sequence[float]:
    return statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [*values] * 9


def _routed_by(
    router: RouterConfig | None,
    state: Sequence[Chunk],
    events: Sequence[tuple[int, ExternalEvent]],
    *,
    over_operators: bool,
) -> tuple[Sequence[Chunk], Sequence[tuple[int, ExternalEvent]]]:
    """Return the state and the events with another routing configuration in every pool.

    Args:
        router: the configuration; None changes nothing.
        over_operators: whether to drop the operators' disaggregation overrides.
    """
    if router is None:
        return state, events

    def altered(pool: PoolConfigured) -> PoolConfigured:
        return msgspec.structs.replace(pool, router=router)

    chunks = [
        msgspec.structs.replace(one, pools=tuple(map(altered, one.pools))) if isinstance(one, WorldState) else one
        for one in state
    ]
    events = [(at_us, altered(one) if isinstance(one, PoolConfigured) else one) for at_us, one in events]
    if over_operators:
        chunks = [msgspec.structs.replace(one, disagg=()) if isinstance(one, WorldState) else one for one in chunks]
        events = [(at_us, one) for at_us, one in events if not isinstance(one, DisaggregationSet)]
    return chunks, events


def _ranks(history: ObservedHistory) -> list[HolderKey]:
    """Return every prefill, decode or aggregated rank of a recording once."""
    joined = [
        one.spec for _, one in history.external_events if isinstance(one, WorkerJoined) and one.spec.role != "encode"
    ]
    later = [(spec.worker_id, rank) for spec in joined for rank in spec.ranks]
    return list(dict.fromkeys([*rank_keys(history.state), *later]))


def _left_out(requests: RecordedRequests) -> dict[str, int]:
    found: Counter[str] = Counter()
    for one in requests.by_id.values():
        if one.in_flight:
            found["in flight at the beginning"] += 1
        elif one.output_tokens is not None:
            continue
        elif one.cancelled_us:
            found["cancelled by their clients"] += 1
        elif one.worker is one.prefiller is None:
            found["rejected or never routed"] += 1
        else:
            found["unfinished"] += 1
    return dict(found)


def _hops(requests: RecordedRequests) -> dict[str, dict[str, float]]:
    recorded = requests.by_id.values()
    hops = {
        "submit": [(one.at_us - one.stamped_us) / 1e3 for one in recorded if one.stamped_us],
        "progress": [(one.first_us - one.first_stamped_us) / 1e3 for one in recorded if one.first_stamped_us],
    }
    return {name: {of: percentiles(ms)[of] for of in ("p50", "p90")} for name, ms in hops.items() if ms}


def _notes(history: ObservedHistory, requests: RecordedRequests, playing: FidelitySettings) -> list[str]:
    joined = sum(isinstance(one, WorkerJoined) for _, one in history.external_events)
    lost = sum(isinstance(one, WorkerLost) for _, one in history.external_events)
    notes = ["Times are by the recorded owner's clock, from the applied submission to the applied progress events."]
    if playing.repeat > 1:
        ms = f"{LATER_US / 1e3:g} ms"
        notes.append(f"Simulated {playing.repeat} times; all but the first shift each arrival by up to {ms}.")
    if playing.speedup != 1.0:
        notes.append(f"Engines run {playing.speedup:g} times as fast as their model.")
    if history.state and rank_keys(history.state):
        notes.append("Caches start with the blocks of the index, in its order; the recency of blocks is unknown.")
    if joined or lost:
        notes.append(f"{joined:,} workers joined with empty caches and {lost:,} were lost, as recorded.")
    if requests.assumed:
        text = f"{requests.assumed:,} unfinished requests are simulated with the median response length of the others"
        notes.append(f"{text}, {requests.median:,} tokens.")
    if history.commands:
        notes.append(f"{history.commands:,} commands to workers are ignored, because simulated engines have none.")
    return notes
