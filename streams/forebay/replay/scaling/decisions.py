"""Decisions of the planner as rows of a history, with what became of each decision."""

from collections.abc import Mapping
from typing import Literal

from forebay.core.scaling.rederive import RecordedDecision, Verification
from forebay.core.scaling.state import OpenChange, PoolKey, changed_pools
from forebay.events.scaling import PoolDecision, Reason, ScalingApplied, ScalingRefused
from forebay.replay.moment import Fact

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
    """Decision about one pool.

    Attributes:
        reached: size that the actuator reached; null without a reply.
    """

    group: str
    pool: str
    from_size: int
    to_size: int
    proposed: int
    reason: Reason
    reached: int | None = None


class ReplyEntry(Fact, frozen=True, kw_only=True):
    """Reply of an actuator.

    Attributes:
        at_us: the actuator's wall clock in microseconds.
        message: the reason of a refusal, or why a size was not reached; empty if all sizes were.
    """

    actuator: str
    at_us: int
    message: str = ""


class DecisionEntry(Fact, frozen=True, kw_only=True):
    """One decision.

    Attributes:
        at_us: the planner's wall clock in microseconds of Unix time.
        planner_id: name of the planner; empty if its claim is unknown.
        outcome: what became of it, see `OUTCOMES`.
        replies: replies of the actuators. Each replies for its own pools.
        verification: `equal` or `different`: result of the second derivation. `stale`: the decision has no effect.
            `other_rules`: a planner of another version made it, so it was not derived again.
    """

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
        pools=[choice_of(pool, reached.get((pool.group, pool.pool))) for pool in decision.decided.pools],
        outcome=_outcome(decision, reached, open_changes),
        replies=[_reply(one) for one in decision.replies],
        verification=decision.verification,
    )


def choice_of(decided: PoolDecision, reached: int | None = None) -> PoolEntry:
    """Return the decision about one pool, with the size that the actuator reached."""
    return PoolEntry(
        group=decided.group,
        pool=decided.pool,
        from_size=decided.from_size,
        to_size=decided.to_size,
        proposed=decided.proposed,
        reason=decided.reason,
        reached=reached,
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
