"""Explanation of one decision of the planner: inputs, proposals, limits, reply, and the second derivation."""

from typing import Any, Literal, assert_never

from forebay.core.scaling.basis import DecodeNeed, LoadSignal, PrefillNeed, SimulatedAttainment
from forebay.core.scaling.decide import PoolSizing, gpus_before_budget
from forebay.core.scaling.proposal import Proposal
from forebay.core.scaling.rederive import RecordedDecision
from forebay.events.scaling import PlannerSettings, PoolDecision, PoolDemand, PoolObserved, PoolScaling, Reason
from forebay.replay.moment import Fact
from forebay.replay.scaling.decisions import OUTCOMES, REASONS, DecisionEntry, entry_of
from forebay.replay.scaling.history import differences_of
from forebay.replay.scaling.journal import OnProgress, ScalingJournal
from forebay.transport.base import Log, LogError
from forebay.transport.recording.manifest import utc

NEAR_MAX = 4  # decisions that an error suggests


class UnknownDecision(LogError):
    """The topic has no such decision, or several."""


class StageBasis(Fact, frozen=True, kw_only=True):
    """Numbers of method `throughput` for one stage.

    Attributes:
        stage: `prefill` or `decode`.
        requests_per_s: requests per second of the forecast.
        tokens: tokens per request: uncached prompt tokens, or output tokens.
        length: length at which the profile was read: uncached prompt tokens, or the mean context length.
        tokens_per_s: tokens per second of the forecast, with the correction of the prefill.
        correction: factor of the equations `corrected`: of the tokens for prefill, of the target for decode.
        latency_ms: TTFT of a request alone for prefill; ITL within which the profile was read for decode.
        concurrency_max: requests for which the KV cache of a worker has room; null for prefill, or if unknown.
        worker_tokens_per_s: tokens per second of one worker according to the profile.
        gpu_tokens_per_s: tokens per second of one GPU.
        workers: workers that the stage keeps busy, a fraction.
        attainable: whether a request alone meets the target.
    """

    stage: Literal["prefill", "decode"]
    requests_per_s: float
    tokens: float
    length: float
    tokens_per_s: float
    correction: float
    latency_ms: float
    target_ms: float
    concurrency_max: float | None = None
    worker_tokens_per_s: float
    gpu_tokens_per_s: float
    workers: float
    attainable: bool
    covered: bool


class SimulatedBasis(Fact, frozen=True, kw_only=True):
    """Simulations of the forecast.

    Attributes:
        target: share of requests that must meet both targets.
        attained: share of requests that met both targets, by size.
    """

    target: float
    attained: dict[str, float]


class ProposalFacts(Fact, frozen=True, kw_only=True):
    """Proposal of a method.

    Attributes:
        method: `throughput`, `load` or `simulate`.
        reason: what is noteworthy about it; null for an ordinary proposal.
        stages: numbers of method `throughput`.
        signals: numbers of method `load`.
        simulated: numbers of method `simulate`; null for other methods.
    """

    method: str
    size: int
    reason: Reason | None
    stages: list[StageBasis]
    signals: list[LoadSignal]
    simulated: SimulatedBasis | None


class PoolExplanation(Fact, frozen=True, kw_only=True):
    """How the size of one pool was decided.

    Attributes:
        observed: the pool in the newest observation; null if it is not in it.
        demand: forecast for the pool that knows this observation; null if there is none.
        proposals: proposals of the methods; empty if the pool kept its size, or an operator had set it.
        limited: proposed size within the largest change and the limits of the size; null without a proposal.
        guarded: size and reason before the GPU budget.
        meaning: reason of the recorded decision in words.
    """

    group: str
    pool: str
    observed: PoolObserved | None
    demand: PoolDemand | None
    proposals: list[ProposalFacts]
    limited: int | None
    guarded: PoolDecision | None
    gpus: int | None
    decided: PoolDecision
    meaning: str


class ScalingExplanation(Fact, frozen=True, kw_only=True):
    """Explanation of a decision.

    Attributes:
        settings: settings of the planner; null if its claim is unknown.
        observed_us: wall clock of the newest observation; null without one.
        interval_s: length of the observed interval in seconds; null without an observation.
        forecast_by: predictor of the newest forecast; empty without one.
        gpus: GPUs of all pools before the GPU budget; null if the decision was not derived again.
        pools: how the size of each pool was decided.
        differs: recorded and derived value of each field that differs; empty if the decision was derived equal.
    """

    decision: DecisionEntry
    meaning: str
    settings: PlannerSettings | None
    observed_us: int | None
    interval_s: float | None
    forecast_by: str
    gpus: int | None
    pools: list[PoolExplanation]
    differs: dict[str, dict[str, Any]]


async def explain_decision(
    log: Log, offset: int | None, window_us: tuple[int, int] | None = None, on_progress: OnProgress | None = None
) -> ScalingExplanation:
    """Explain one decision.

    Args:
        offset: offset of the decision; None for the newest one, or for the one in the window.
        window_us: first time of the decision and the time after its last one, in microseconds since 1970.
        on_progress: called regularly with the offset of the reader and the end of the topic.

    Raises:
        UnknownDecision: there is no such decision, or more than one in the window.
        LogError: there is no planner, or the log is unreadable.
    """
    journal = ScalingJournal(log, on_progress)
    if offset is not None:
        found = await _at_offset(journal, offset)
    elif window_us is not None:
        found = await _at_time(journal, window_us)
    else:
        async for _ in journal.read():
            pass
        if journal.newest is None:
            raise UnknownDecision("the planner has made no decision with an effect yet")
        found = journal.newest
    return _explanation(found, journal)


async def _at_offset(journal: ScalingJournal, offset: int) -> RecordedDecision:
    before: list[RecordedDecision] = []
    after: list[RecordedDecision] = []
    found = None
    async for decision in journal.read():
        if decision.offset == offset:
            found = decision
        elif decision.offset < offset:
            before = [*before, decision][-NEAR_MAX // 2 :]
        elif len(after) < NEAR_MAX // 2:
            after.append(decision)
    if found is None:
        raise UnknownDecision(f"no decision at offset {offset}; {_nearest([*before, *after])}")
    return found


async def _at_time(journal: ScalingJournal, window_us: tuple[int, int]) -> RecordedDecision:
    before: list[RecordedDecision] = []
    after: list[RecordedDecision] = []
    found: list[RecordedDecision] = []
    async for decision in journal.read():
        at_us = decision.decided.at_us
        if at_us < window_us[0]:
            before = [*before, decision][-NEAR_MAX // 2 :]
        elif at_us < window_us[1]:
            found = [*found, decision][:NEAR_MAX]
        elif len(after) < NEAR_MAX // 2:
            after.append(decision)
    if not found:
        raise UnknownDecision(f"no decision at {utc(window_us[0])}; {_nearest([*before, *after])}")
    if len(found) > 1:
        raise UnknownDecision(f"several decisions at {utc(window_us[0])}; give the offset: {_offsets(found)}")
    return found[0]


def _nearest(decisions: list[RecordedDecision]) -> str:
    return f"the nearest are {_offsets(decisions)}" if decisions else "the topic has no decision"


def _offsets(decisions: list[RecordedDecision]) -> str:
    return ", ".join(f"{one.offset} ({utc(one.decided.at_us)})" for one in decisions)


def _explanation(found: RecordedDecision, journal: ScalingJournal) -> ScalingExplanation:
    entry = entry_of(found, journal.state.open)
    # The steps of a stale decision are those of the state that its planner did not know.
    sizings = found.derivation.sizings if found.derivation is not None and found.outcome == "applied" else ()
    by_pool = {(one.pool.group, one.pool.pool): one for one in sizings}
    settings = found.claim.settings if found.claim is not None else None
    return ScalingExplanation(
        decision=entry,
        meaning=OUTCOMES[entry.outcome],
        settings=settings,
        observed_us=found.observed.at_us if found.observed is not None else None,
        interval_s=found.observed.interval_s if found.observed is not None else None,
        forecast_by=found.forecast.predictor if found.forecast is not None else "",
        gpus=sum(map(gpus_before_budget, sizings)) if sizings else None,
        pools=[_pool(one, found, settings, by_pool.get((one.group, one.pool))) for one in found.decided.pools],
        differs=differences_of(found),
    )


def _pool(
    decided: PoolDecision, found: RecordedDecision, settings: PlannerSettings | None, sizing: PoolSizing | None
) -> PoolExplanation:
    key = (decided.group, decided.pool)
    observed = found.observed.pools if found.observed is not None else ()
    proposals = []
    if sizing is not None and settings is not None:
        proposals = [_proposal(one.method, one.proposal, sizing, settings) for one in sizing.proposals]
    return PoolExplanation(
        group=decided.group,
        pool=decided.pool,
        observed=next((one for one in observed if (one.group, one.pool) == key), None),
        demand=sizing.demand if sizing is not None else None,
        proposals=proposals,
        limited=sizing.limited if sizing is not None else None,
        guarded=sizing.guarded if sizing is not None else None,
        gpus=gpus_before_budget(sizing) if sizing is not None else None,
        decided=decided,
        meaning=REASONS[decided.reason],
    )


def _proposal(method: str, proposal: Proposal, sizing: PoolSizing, settings: PlannerSettings) -> ProposalFacts:
    stages, signals, simulated = [], [], None
    for one in proposal.basis:
        match one:
            case PrefillNeed() | DecodeNeed():
                assert sizing.demand is not None, "method throughput needs a forecast"
                stages.append(_stage(one, sizing.pool, sizing.demand, settings))
            case LoadSignal():
                signals.append(one)
            case SimulatedAttainment():
                attained = {str(size): share for size, share in one.sizes}
                simulated = SimulatedBasis(target=one.target, attained=attained)
            case _ as never:
                assert_never(never)
    return ProposalFacts(
        method=method, size=proposal.size, reason=proposal.reason, stages=stages, signals=signals, simulated=simulated
    )


def _stage(
    need: PrefillNeed | DecodeNeed, pool: PoolScaling, demand: PoolDemand, settings: PlannerSettings
) -> StageBasis:
    stage: Literal["prefill", "decode"]
    if isinstance(need, PrefillNeed):
        stage, tokens, length, concurrency_max = "prefill", need.isl, need.isl, None
        latency_ms, target_ms = need.ttft_ms, settings.ttft_ms
    else:
        stage, tokens, length, concurrency_max = "decode", demand.osl, need.context, need.concurrency_max
        latency_ms, target_ms = need.itl_ms, settings.itl_ms
    return StageBasis(
        stage=stage,
        requests_per_s=demand.requests_per_s,
        tokens=tokens,
        length=length,
        tokens_per_s=need.tokens_per_s,
        correction=need.correction,
        latency_ms=latency_ms,
        target_ms=target_ms,
        concurrency_max=concurrency_max,
        worker_tokens_per_s=need.worker_tokens_per_s,
        gpu_tokens_per_s=need.worker_tokens_per_s / pool.gpus_per_worker,
        workers=need.workers,
        attainable=need.attainable,
        covered=need.covered,
    )
