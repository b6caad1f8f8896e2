"""Decisions of the planner: their history with what became of them, and the explanation of one.

`REASONS` and `OUTCOMES` word them.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from forebay.core.scaling.decide import MethodProposal, PoolSizing, gpus_before_budget
from forebay.core.scaling.rederive import RecordedDecision, Verification
from forebay.core.scaling.state import OpenChange, PoolKey, changed_pools
from forebay.events.names import unknown_name
from forebay.events.scaling import (
    PlannerSettings,
    PoolDecision,
    PoolDemand,
    PoolObserved,
    Reason,
    ScalingApplied,
    ScalingRefused,
)
from forebay.replay.moment import Fact
from forebay.replay.scaling.reader import (
    OnProgress,
    ScalingReader,
    ScalingVerification,
    VerificationTally,
    differences_of,
    pool_text,
)
from forebay.transport.base import Log, LogError
from forebay.transport.sqlite.recording import utc

DecisionOutcome = Literal["applied", "partly_applied", "refused", "open", "no_reply", "advisory", "stale", "unchanged"]

OUTCOMES: Mapping[DecisionOutcome, str] = {
    "applied": "All pools reached the sizes of the decision.",
    "partly_applied": "Some pools did not reach the sizes of the decision.",
    "refused": "Nothing was changed.",
    "open": "At least one pool has no reply of its actuator yet.",
    "no_reply": "At least one pool had no reply of an actuator in time, so the planner decided again.",
    "advisory": "The planner only records its decisions.",
    "stale": "A record that the planner did not know came before the decision, so it has no effect.",
    "unchanged": "The decision keeps all sizes.",
}

REASONS: Mapping[Reason, str] = {
    "scale_up": "The method proposes more workers.",
    "scale_down": "The method proposes fewer workers.",
    "hold": "The method proposes the present size.",
    "manual": "An operator has set the size.",
    "paused": "An operator has paused the planner.",
    "no_observation": "The newest observation does not have the pool.",
    "no_demand": "There is no forecast that knows the newest observation, or it has no usable numbers.",
    "no_profile": "The pool has no profile of the stage that it computes.",
    "profile_exceeded": "The forecast lies outside of the profile, so the nearest measured point was used.",
    "target_unattainable": "One request alone misses a target, or too many requests do with each simulated size.",
    "insufficient_data": "The workers have not reported enough load and latency yet.",
    "in_progress": "The last change of the pool has no reply yet.",
    "starting": "Workers of the previous decision still start.",
    "cooldown": "The size would change in the opposite direction too soon after the last change.",
    "consolidation_refused": "With one worker less, the estimated latency or KV would miss its limit.",
    "limited": "The proposal exceeds the largest change, or the smallest or largest size.",
    "gpu_budget": "The sizes of all pools together exceed or fall short of the GPU budget.",
    "budget_below_minimum": "The GPU budget does not suffice for the smallest sizes of all pools.",
}


class PoolEntry(Fact, frozen=True, kw_only=True):
    group: str
    pool: str
    from_size: int
    to_size: int
    proposed: int
    reason: Reason
    reached: int | None = None


class ReplyEntry(Fact, frozen=True, kw_only=True):
    actuator: str
    at_us: int
    message: str = ""


class DecisionEntry(Fact, frozen=True, kw_only=True):
    offset: int
    at_us: int
    planner_id: str
    pools: list[PoolEntry]
    outcome: DecisionOutcome
    replies: list[ReplyEntry]
    verification: Verification


def entry_of(decision: RecordedDecision, open_changes: Mapping[PoolKey, OpenChange]) -> DecisionEntry:
    """Return a decision with what became of it. `open_changes` are those at the end of the topic."""
    reached = _reached(decision)
    return DecisionEntry(
        offset=decision.offset,
        at_us=decision.decided.at_us,
        planner_id=decision.claim.planner_id if decision.claim is not None else "",
        pools=[
            PoolEntry(**msgspec.structs.asdict(pool), reached=reached.get((pool.group, pool.pool)))
            for pool in decision.decided.pools
        ],
        outcome=_outcome(decision, reached, open_changes),
        replies=[_reply(one) for one in decision.replies],
        verification=decision.verification,
    )


def _reply(reply: ScalingApplied | ScalingRefused) -> ReplyEntry:
    reason = [reply.reason] if isinstance(reply, ScalingRefused) else []
    message = ": ".join([*reason, *([reply.message] if reply.message else [])])
    return ReplyEntry(actuator=reply.actuator, at_us=reply.at_us, message=message)


def _outcome(
    decision: RecordedDecision, reached: Mapping[PoolKey, int], open_changes: Mapping[PoolKey, OpenChange]
) -> DecisionOutcome:
    if decision.outcome == "stale":
        return "stale"
    changed = changed_pools(decision.decided)
    if not changed:
        return "unchanged"
    if decision.decided.advisory:
        return "advisory"
    if any(one.decision == decision.offset for one in open_changes.values()):
        return "open"
    replied = {(pool.group, pool.pool) for reply in decision.replies for pool in reply.pools}
    if not changed.keys() <= replied:
        return "no_reply"
    if all(isinstance(reply, ScalingRefused) for reply in decision.replies):
        return "refused"
    return "applied" if all(reached.get(key) == one.to_size for key, one in changed.items()) else "partly_applied"


def _reached(decision: RecordedDecision) -> dict[PoolKey, int]:
    applied = [reply for reply in decision.replies if isinstance(reply, ScalingApplied)]
    return {(pool.group, pool.pool): pool.size for reply in applied for pool in reply.pools}


class UnknownPool(LogError):
    pass


class ScalingDecisions(Fact, frozen=True, kw_only=True):
    """Newest of the `selected` decisions, oldest first, and the verification of all decisions."""

    decisions: list[DecisionEntry]
    selected: int
    verification: ScalingVerification


async def read_decisions(
    log: Log,
    limit: int,
    pool: str = "",
    since_us: int | None = None,
    *,
    is_change: bool = False,
    on_progress: OnProgress | None = None,
) -> ScalingDecisions:
    """Return the newest decisions at or after `since_us`, in microseconds since 1970.

    `pool`, as `GROUP/POOL`, selects only its part of the decisions about it. `is_change` selects only decisions that
    change a selected pool.
    """
    reader, tally = ScalingReader(log, on_progress), VerificationTally()
    newest: deque[RecordedDecision] = deque(maxlen=limit)
    selected = 0
    async for decision in reader.read():
        tally.add(decision)
        is_late = since_us is None or decision.decided.at_us >= since_us
        if is_late and _is_selected(decision, pool, is_change=is_change):
            newest.append(decision)
            selected += 1
    if pool:
        known_pool(pool, reader)
    entries = [_entry(one, reader.state.open, pool) for one in newest]
    return ScalingDecisions(decisions=entries, selected=selected, verification=tally.report(reader.undecodable))


def known_pool(name: str, reader: ScalingReader) -> PoolKey:
    """Return the pool with the name `GROUP/POOL`. Raises UnknownPool if no claim that was read has it."""
    known = {pool_text(pool): pool for pool in reader.pools}
    if name not in known:
        raise UnknownPool(unknown_name("pool", name, known))
    return known[name]


def _is_selected(decision: RecordedDecision, pool: str, *, is_change: bool) -> bool:
    pools = [one for one in decision.decided.pools if not pool or pool_text((one.group, one.pool)) == pool]
    return bool(pools) and (not is_change or any(one.to_size != one.from_size for one in pools))


def _entry(decision: RecordedDecision, open_changes: Mapping[PoolKey, OpenChange], pool: str) -> DecisionEntry:
    entry = entry_of(decision, open_changes)
    pools = [one for one in entry.pools if not pool or pool_text((one.group, one.pool)) == pool]
    return msgspec.structs.replace(entry, pools=pools)


NEAR_MAX = 4  # decisions that an error suggests


class UnknownDecision(LogError):
    """The topic has no such decision, or several."""


class PoolExplanation(Fact, frozen=True, kw_only=True):
    """How the size of one pool was decided.

    Attributes:
        proposals: proposals of the methods; empty if the pool kept its size, or an operator had set it.
        limited: proposed size within the largest change and the limits of the size; null without a proposal.
        guarded: size and reason before the GPU budget.
    """

    group: str
    pool: str
    observed: PoolObserved | None
    demand: PoolDemand | None
    proposals: list[MethodProposal]
    limited: int | None
    guarded: PoolDecision | None
    gpus: int | None
    decided: PoolDecision
    meaning: str


class ScalingExplanation(Fact, frozen=True, kw_only=True):
    """Explanation of a decision. `gpus` are those of all pools before the GPU budget; null if it was not derived again.

    `differs` has the recorded and derived value of each field that differs; empty if the decision was derived equal.
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
    """Explain the decision at `offset`, by default the newest one, or the one in the window.

    `window_us` has the first time of the decision and the time after its last one, in microseconds since 1970.
    """
    reader = ScalingReader(log, on_progress)
    if offset is not None:
        decisions, near = await _between(reader, lambda one: one.offset, (offset, offset + 1))
        if not decisions:
            raise UnknownDecision(f"no decision at offset {offset}; {near}")
        found = decisions[0]
    elif window_us is not None:
        decisions, near = await _between(reader, lambda one: one.decided.at_us, window_us)
        if not decisions:
            raise UnknownDecision(f"no decision at {utc(window_us[0])}; {near}")
        if len(decisions) > 1:
            text = f"several decisions at {utc(window_us[0])}; give the offset: {_offsets(decisions)}"
            raise UnknownDecision(text)
        found = decisions[0]
    else:
        async for _ in reader.read():
            pass
        if reader.newest is None:
            raise UnknownDecision("the planner has made no decision with an effect yet")
        found = reader.newest
    return _explanation(found, reader)


async def _between(
    reader: ScalingReader, key: Callable[[RecordedDecision], int], window: tuple[int, int]
) -> tuple[list[RecordedDecision], str]:
    """Return the decisions with a key in a window, at most `NEAR_MAX`, and the nearest other ones as text."""
    before: list[RecordedDecision] = []
    found: list[RecordedDecision] = []
    after: list[RecordedDecision] = []
    async for decision in reader.read():
        if key(decision) < window[0]:
            before = [*before, decision][-NEAR_MAX // 2 :]
        elif key(decision) < window[1]:
            found = [*found, decision][:NEAR_MAX]
        elif len(after) < NEAR_MAX // 2:
            after.append(decision)
    near = [*before, *after]
    return found, f"the nearest are {_offsets(near)}" if near else "the topic has no decision"


def _offsets(decisions: list[RecordedDecision]) -> str:
    return ", ".join(f"{one.offset} ({utc(one.decided.at_us)})" for one in decisions)


def _explanation(found: RecordedDecision, reader: ScalingReader) -> ScalingExplanation:
    entry = entry_of(found, reader.state.open)
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
        pools=[_pool(one, found, by_pool.get((one.group, one.pool))) for one in found.decided.pools],
        differs=differences_of(found),
    )


def _pool(decided: PoolDecision, found: RecordedDecision, sizing: PoolSizing | None) -> PoolExplanation:
    key = (decided.group, decided.pool)
    observed = found.observed.pools if found.observed is not None else ()
    return PoolExplanation(
        group=decided.group,
        pool=decided.pool,
        observed=next((one for one in observed if (one.group, one.pool) == key), None),
        demand=sizing.demand if sizing is not None else None,
        proposals=[] if sizing is None else list(sizing.proposals),
        limited=sizing.limited if sizing is not None else None,
        guarded=sizing.guarded if sizing is not None else None,
        gpus=gpus_before_budget(sizing) if sizing is not None else None,
        decided=decided,
        meaning=REASONS[decided.reason],
    )
