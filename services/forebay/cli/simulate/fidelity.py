"""How near a simulation comes to what was lived: a recorded history, played again by engine models.

Both sides are told by one clock, the recorded owner's: a request begins when its submission is applied, its first token
is there when the router hears of it, and so is its end.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.cli.common.recorded_requests import RecordedRequests, answered, transfers_of
from forebay.cli.simulate.fidelity_stages import Placement, agreement, placeable, specs, stages
from forebay.cli.simulate.simulations import OnDone, Work, run_all
from forebay.core.state.holder_bits import HolderKey
from forebay.engine_model.timing import EngineTiming
from forebay.events.control import DisaggregationSet, PoolConfigured, RouterConfig
from forebay.events.fleet import WorkerJoined, WorkerLost
from forebay.events.snapshots import Chunk, WorldState
from forebay.ingress.errors import Unusable
from forebay.replay.observed import External, Lived
from forebay.simulate.outcome import Outcome, Requests, Served, percentiles, summary
from forebay.simulate.resumed import MOCKER, NO_DELAYS, NotSimulable, rank_keys, resume
from forebay.simulate.settings import Delays, Transfer
from forebay.simulate.transfer_fit import TransferFit

AS_RECORDED = "as recorded"
PLACED = "placed as lived"  # the error of the engine model alone: no decision differs
TIMES = ("ttft_ms", "itl_ms", "e2e_ms")
STAGE_TIMES = ("prefill_ms", "transfer_ms")  # of prompts that were computed by another than who answered
OF = ("mean", "p50", "p90", "p99")
LATER_US = 1_000  # a reading of the owner's clock stands for up to five times as much
FAILURES_SHOWN = 5
MOVED = ("prefilled_remotely", "transferred_bytes")


@dataclass(frozen=True, slots=True)
class Playing:
    """How a history is simulated.

    Attributes:
        speedup: how much faster than their model engines are.
        repeat: how often; each time but the first requests come up to `LATER_US` later, by draws of their own.
        delays: how long what is said takes to arrive. That to the router is in the recording; clients are not heard.
        timing: how long an engine's steps take.
        link: what of `Transfer` is given; the rest is fitted to the recorded transfers.
    """

    speedup: float = 1.0
    repeat: int = 1
    delays: Delays = NO_DELAYS
    timing: EngineTiming = MOCKER
    link: Mapping[str, float] = field(default_factory=dict)


class Compared(msgspec.Struct, frozen=True):
    """One figure of both.

    `error` is the simulated one minus the lived, in percent of the lived, or in points of a share. None where something
    was simulated and nothing lived: that has no size in percent.
    """

    lived: float
    simulated: float
    error: float | None


EXACT = Compared(0.0, 0.0, 0.0)  # of what was neither lived nor simulated


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How far single requests are off.

    Attributes:
        percent_p50: of the error without its sign, in percent of the lived time; `percent_p90` likewise.
        ms_p10: of simulated minus lived, with its sign; `ms_p50` and `ms_p90` likewise.
    """

    percent_p50: float
    percent_p90: float
    ms_p10: float
    ms_p50: float
    ms_p90: float


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation beside what was lived; all figures are of the `compared` requests.

    Attributes:
        name: of the policy; `AS_RECORDED` and `PLACED` are under the recorded configuration.
        draw: 0 for the recorded times of arrival; else which draw of later ones.
        failed: requests that history answered and the simulation did not.
        times: by `TIMES` and `OF`, in milliseconds; of prefill and decode workers by `STAGE_TIMES`, too.
        placement: who answered, by worker rank and its name. `stages` are all that was decided of prefill and decode
            workers: `forebay.cli.simulate.fidelity_stages.stages`.
        prefilled_remotely: prompts that were computed by another than who answered; the KV of these was
            `transferred_bytes`. None where there are no prefill workers, whom `load_max_over_mean` is of otherwise.
        single: by `TIMES`, of requests one by one.
        failures: the first reasons of those that failed.
        digest: of all simulated decisions.
    """

    name: str
    draw: int
    compared: int
    failed: int
    times: dict[str, dict[str, Compared]]
    prefix_reuse: Compared
    load_max_over_mean: Compared
    placement: Placement
    stages: dict[str, Placement]
    prefilled_remotely: Compared | None
    transferred_bytes: Compared | None
    single: dict[str, Spread]
    failures: list[str]
    digest: str


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """A recording, and what came of simulating it.

    Attributes:
        span_s: from its first event to its last.
        requests: that it holds, those under way at its beginning included.
        left_out: why how many of these are not compared.
        hops_ms: p50 and p90 of how long records were on their way, as far as wall clocks were written down:
            `submit` from the ingress to the router, `progress` from the worker to the router.
        transfer: how KV moves between prefill and decode workers; None where there are none.
        simulated: for each name one for each draw, in this order.
        notes: what all this means, for people.
    """

    span_s: float
    requests: int
    workers: int
    left_out: dict[str, int]
    hops_ms: dict[str, dict[str, float]]
    speedup: float
    transfer: TransferFit | None
    simulated: list[Simulated]
    notes: list[str]

    def above(self, bounds: Mapping[str, float]) -> list[str]:
        """What of the simulations as recorded is further off, on average, than `bounds` allow, in words."""
        runs = [one for one in self.simulated if one.name == AS_RECORDED]
        found = []
        for name, most in bounds.items():
            for what, unit, of in _BOUNDED[name]:
                errors = [of(one).error for one in runs]
                sized = [error for error in errors if error is not None]
                mean = statistics.fmean(sized) if len(sized) == len(errors) else None
                if mean is None or abs(mean) > most:
                    size = "by any measure: nothing was lived" if mean is None else f"by {mean:+.2f} {unit}"
                    found.append(f"{what} is off {size}, more than {most:g}")
        return found


@dataclass(frozen=True, slots=True)
class _Pair:
    """One request, lived and simulated; both workers are places in one list of ranks."""

    lived: Served
    simulated: Served


def fidelity(history: Lived, routers: Mapping[str, RouterConfig], playing: Playing) -> Fidelity:
    """Simulate a history under its own configuration, and under each of `routers`, by name; a process each.

    Raises Unusable.
    """
    requests = RecordedRequests(history.asked)
    fit = transfers_of(history.asked, list(specs(history)), playing.link)
    idle = [name for name in routers if "disagg." in name]
    if fit is None and idle:
        raise Unusable(f"{idle[0]}: disagg is of prefill and decode workers, and the recording has none")
    if fit is None and playing.link:
        raise Unusable("no KV moves between the workers of this recording: leave the options of its transfer out")
    played = partial(_Run, history, requests, playing, Transfer() if fit is None else fit.transfer)
    runs = [played(AS_RECORDED, draw=draw) for draw in range(playing.repeat)]
    runs.append(played(PLACED, placed=True))
    for name, router in routers.items():
        runs += [played(name, router, draw) for draw in range(playing.repeat)]
    simulated = []
    for one in run_all([Work(run.told, len(requests.asked), run) for run in runs]):
        if isinstance(one, Exception):
            raise one
        simulated.append(one)
    return Fidelity(
        span_s=(history.end_us - history.begin_us) / 1e6,
        requests=len(requests.asked),
        workers=len(_ranks(history)),
        left_out=_left_out(requests),
        hops_ms=_hops(requests),
        speedup=playing.speedup,
        transfer=fit,
        simulated=simulated,
        notes=_notes(history, requests, playing),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One simulation of a history, under another router than the recorded one if there is one here.

    `placed`: who was sent to one worker goes there again.
    """

    history: Lived
    requests: RecordedRequests
    playing: Playing
    transfer: Transfer
    name: str
    router: RouterConfig | None = None
    draw: int = 0
    placed: bool = False

    @property
    def told(self) -> str:
        """What progress calls it."""
        return f"{self.name}, {self.draw + 1}" if self.draw else self.name

    def __call__(self, on_done: OnDone) -> Simulated:
        """Raises Unusable."""
        state, said = placeable(self.history) if self.placed else (self.history.state, self.history.said)
        state, said = _routed_by(self.router, state, said, over_operators="disagg." in self.name)
        playing = self.playing
        try:
            resumed = resume(
                state,
                self.requests.arrivals(said, _later(self.draw), placed=self.placed),
                on_done,
                speedup=playing.speedup,
                delays=msgspec.structs.replace(playing.delays, submit=NO_DELAYS.submit, tokens=playing.delays.progress),
                timing=playing.timing,
                transfer=self.transfer,
            )
        except NotSimulable as error:
            raise Unusable(str(error)) from None
        places = {key: number for number, key in enumerate(_ranks(self.history))}
        pairs = []
        failures: Counter[str] = Counter()
        for request_id, asked in self.requests.comparable.items():
            served = resumed.served[request_id]
            if served.failure:
                failures[served.failure] += 1
                continue
            if served.worker is not None:
                served.worker = places[resumed.ranks[served.worker]]
            if served.prefiller is not None:
                served.prefiller = places[resumed.ranks[served.prefiller]]
            pairs.append(_Pair(answered(asked, places), served))
        if not pairs:
            reasons = f": {failures.most_common(1)[0][0]}" if failures else ""
            raise Unusable(f"{self.name}: there is no request that was answered both times{reasons}")
        prefilling = {spec.worker_id for spec in specs(self.history) if spec.role == "prefill"}
        numbers = tuple(number for key, number in places.items() if key[0] in prefilling)
        return _beside(self, pairs, failures, numbers, resumed.digest)


def _later(draw: int) -> Callable[[int], int]:
    """How much later than recorded a request comes, by its number, in microseconds."""
    if not draw:
        return lambda _: 0
    return lambda number: xxh3_64_intdigest(b"%d" % number, draw) % LATER_US


def _beside(
    run: _Run, pairs: Sequence[_Pair], failures: Counter[str], prefill_workers: tuple[int, ...], digest: str
) -> Simulated:
    workers = len(_ranks(run.history))
    ours, theirs = (
        summary(Outcome(Requests(side), prefill_workers=prefill_workers), workers)
        for side in ([pair.lived for pair in pairs], [pair.simulated for pair in pairs])
    )
    moved = {of: _percent(ours[of], theirs[of]) if of in ours else None for of in MOVED}
    times = TIMES + STAGE_TIMES if prefill_workers else TIMES
    return Simulated(
        name=run.name,
        draw=run.draw,
        compared=len(pairs),
        failed=failures.total(),
        times={
            time: {of: _percent(ours[time].get(of, 0.0), theirs[time].get(of, 0.0)) for of in OF}
            if ours[time] or theirs[time]
            else {}
            for time in times
        },
        prefix_reuse=_points(ours["prefix_reuse"], theirs["prefix_reuse"]),
        load_max_over_mean=_percent(ours["load_max_over_mean"], theirs["load_max_over_mean"]),
        placement=agreement([(pair.lived.worker, pair.simulated.worker) for pair in pairs]),
        stages=stages([(pair.lived, pair.simulated) for pair in pairs]) if prefill_workers else {},
        **moved,
        single={time: spread for time in TIMES if (spread := _spread(pairs, _MS[time])) is not None},
        failures=[reason for reason, _ in failures.most_common(FAILURES_SHOWN)],
        digest=digest,
    )


_MS: dict[str, Callable[[Served], float | None]] = {
    "ttft_ms": lambda one: (one.first_us - one.arrived_us) / 1e3,
    "itl_ms": lambda one: (
        (one.last_us - one.first_us) / 1e3 / (one.output_tokens - 1) if one.output_tokens > 1 else None
    ),
    "e2e_ms": lambda one: (one.last_us - one.arrived_us) / 1e3,
}


def of_time(time: str, of: str) -> Callable[[Simulated], Compared]:
    """How to find a figure of `TIMES` and `OF`."""
    return lambda one: one.times[time].get(of, EXACT)


_BOUNDED: dict[str, list[tuple[str, str, Callable[[Simulated], Compared]]]] = {
    **{time.removesuffix("_ms"): [(f"{time} {of}", "%", of_time(time, of)) for of in ("p50", "p90")] for time in TIMES},
    "reuse": [("prefix_reuse", "points", lambda one: one.prefix_reuse)],
    "load": [("load_max_over_mean", "%", lambda one: one.load_max_over_mean)],
}


def _percent(ours: float, theirs: float) -> Compared:
    if ours:
        return Compared(ours, theirs, 100 * (theirs - ours) / ours)
    return Compared(ours, theirs, None if theirs else 0.0)


def _points(ours: float, theirs: float) -> Compared:
    return Compared(ours, theirs, 100 * (theirs - ours))


def _spread(pairs: Sequence[_Pair], of: Callable[[Served], float | None]) -> Spread | None:
    """None where no request has such a time."""
    both = [(ours, theirs) for pair in pairs if (ours := of(pair.lived)) and (theirs := of(pair.simulated)) is not None]
    if not both:
        return None
    percent = _deciles([100 * abs(theirs - ours) / ours for ours, theirs in both])
    ms = _deciles([theirs - ours for ours, theirs in both])
    return Spread(percent_p50=percent[4], percent_p90=percent[8], ms_p10=ms[0], ms_p50=ms[4], ms_p90=ms[8])


def _deciles(values: Sequence[float]) -> Sequence[float]:
    return statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [*values] * 9


def _routed_by(
    router: RouterConfig | None,
    state: Sequence[Chunk],
    said: Sequence[tuple[int, External]],
    *,
    over_operators: bool,
) -> tuple[Sequence[Chunk], Sequence[tuple[int, External]]]:
    """The same with another rule in every pool.

    Where that names who computes prompts, it wins `over_operators`, who set that by hand.
    """
    if router is None:
        return state, said

    def altered(pool: PoolConfigured) -> PoolConfigured:
        return msgspec.structs.replace(pool, router=router)

    chunks = [
        msgspec.structs.replace(one, pools=tuple(map(altered, one.pools))) if isinstance(one, WorldState) else one
        for one in state
    ]
    said = [(at_us, altered(one) if isinstance(one, PoolConfigured) else one) for at_us, one in said]
    if over_operators:
        chunks = [msgspec.structs.replace(one, disagg=()) if isinstance(one, WorldState) else one for one in chunks]
        said = [(at_us, one) for at_us, one in said if not isinstance(one, DisaggregationSet)]
    return chunks, said


def _ranks(history: Lived) -> list[HolderKey]:
    """Every rank that ever took part in a recording and answers requests, once."""
    joined = [one.spec for _, one in history.said if isinstance(one, WorkerJoined) and one.spec.role != "encode"]
    later = [(spec.worker_id, rank) for spec in joined for rank in spec.ranks]
    return list(dict.fromkeys([*rank_keys(history.state), *later]))


def _left_out(requests: RecordedRequests) -> dict[str, int]:
    found: Counter[str] = Counter()
    for one in requests.asked.values():
        if one.under_way:
            found["under way at the beginning"] += 1
        elif one.output_tokens is not None:
            continue
        elif one.cancelled_us:
            found["cancelled by their clients"] += 1
        elif one.worker is one.prefiller is None:
            found["refused, or sent to nobody"] += 1
        else:
            found["not finished"] += 1
    return dict(found)


def _hops(requests: RecordedRequests) -> dict[str, dict[str, float]]:
    asked = requests.asked.values()
    hops = {
        "submit": [(one.at_us - one.stamped_us) / 1e3 for one in asked if one.stamped_us],
        "progress": [(one.first_us - one.first_stamped_us) / 1e3 for one in asked if one.first_stamped_us],
    }
    return {name: {of: percentiles(ms)[of] for of in ("p50", "p90")} for name, ms in hops.items() if ms}


def _notes(history: Lived, requests: RecordedRequests, playing: Playing) -> list[str]:
    joined = sum(isinstance(one, WorkerJoined) for _, one in history.said)
    lost = sum(isinstance(one, WorkerLost) for _, one in history.said)
    said = ["Times are the recorded owner's clock: from the submission, as applied, to what the router heard."]
    if playing.repeat > 1:
        ms = f"{LATER_US / 1e3:g} ms"
        said.append(f"Decided {playing.repeat} times; but for the first, every request came up to {ms} later.")
    if playing.speedup != 1.0:
        said.append(f"Engines are taken to be {playing.speedup:g} times as fast as their model.")
    if history.state and rank_keys(history.state):
        said.append("Caches begin as the index had them, in its order: how recently a block was used is not known.")
    if joined or lost:
        said.append(f"{joined:,} workers joined, with empty caches, and {lost:,} were lost, as recorded.")
    if requests.assumed:
        text = f"{requests.assumed:,} requests that history did not finish are simulated with answers of"
        said.append(f"{text} {requests.median:,} tokens, the others' median.")
    if history.commands:
        said.append(f"{history.commands:,} commands to workers are left out: simulated engines obey none.")
    return said
