"""Decisions of the planner in order, and their verification."""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import msgspec

from forebay.core.scaling.rederive import RecordedDecision, Verification
from forebay.core.scaling.state import OpenChange, PoolKey
from forebay.events.names import unknown_name
from forebay.events.topics import SCALING
from forebay.replay.moment import Fact
from forebay.replay.scaling.decisions import DecisionEntry, entry_of
from forebay.replay.scaling.journal import PARTITION, NoPlanner, OnProgress, ScalingJournal, has_scaling, pool_text
from forebay.transport.base import Log, LogError

DIFFERENT_MAX = 8  # differences in a report; the count is complete


class UnknownPool(LogError):
    pass


class DifferentDecision(Fact, frozen=True, kw_only=True):
    """A recorded decision that does not follow from the records before it.

    Attributes:
        differs: recorded and derived value of each field that differs. Fields of a pool begin with `GROUP/POOL `.
    """

    offset: int
    differs: dict[str, dict[str, Any]]


class ScalingVerification(Fact, frozen=True, kw_only=True):
    """Result of deriving the decisions of a topic `scaling` again.

    Attributes:
        equal: number of decisions that were derived again with every field equal.
        stale: number of decisions without an effect, because the planner did not know a record before them.
        other_rules: number of decisions by the rules of another version, which were not derived again.
        undecodable: number of records that do not decode. They have no effect.
        different: number of decisions that do not follow from the records before them.
    """

    decisions: int
    equal: int
    stale: int
    other_rules: int
    undecodable: int
    different: int
    first: list[DifferentDecision]


class ScalingHistory(Fact, frozen=True, kw_only=True):
    """Newest decisions, oldest first, and the verification of all decisions.

    Attributes:
        decisions: the newest decisions that were selected, oldest first.
        selected: number of selected decisions, of which `decisions` has the newest.
        verification: result for all decisions of the topic.
    """

    decisions: list[DecisionEntry]
    selected: int
    verification: ScalingVerification


class VerificationTally:
    """Counts the results of derivations, and keeps the first differences."""

    def __init__(self) -> None:
        self._counts: Counter[Verification] = Counter()
        self._first: list[DifferentDecision] = []

    def add(self, decision: RecordedDecision) -> None:
        self._counts[decision.verification] += 1
        if decision.verification == "different" and len(self._first) < DIFFERENT_MAX:
            self._first.append(DifferentDecision(offset=decision.offset, differs=differences_of(decision)))

    def report(self, undecodable: int) -> ScalingVerification:
        return ScalingVerification(
            decisions=self._counts.total(),
            equal=self._counts["equal"],
            stale=self._counts["stale"],
            other_rules=self._counts["other_rules"],
            undecodable=undecodable,
            different=self._counts["different"],
            first=self._first,
        )


async def read_history(
    log: Log,
    limit: int,
    pool: str = "",
    since_us: int | None = None,
    *,
    is_change: bool = False,
    on_progress: OnProgress | None = None,
) -> ScalingHistory:
    """Return the newest decisions.

    Args:
        pool: select only decisions about this pool, as `GROUP/POOL`, and only its part of them.
        since_us: select only decisions at or after this time, in microseconds since 1970.
        is_change: select only decisions that change a selected pool.
        on_progress: called regularly with the offset of the reader and the end of the topic.

    Raises:
        UnknownPool: no planner has claimed to scale `pool`.
        LogError: there is no planner, or the log is unreadable.
    """
    journal, tally = ScalingJournal(log, on_progress), VerificationTally()
    newest: deque[RecordedDecision] = deque(maxlen=limit)
    selected = 0
    async for decision in journal.read():
        tally.add(decision)
        is_late = since_us is None or decision.decided.at_us >= since_us
        if is_late and _is_selected(decision, pool, is_change=is_change):
            newest.append(decision)
            selected += 1
    if pool:
        known_pool(pool, journal)
    entries = [_entry(one, journal.state.open, pool) for one in newest]
    return ScalingHistory(decisions=entries, selected=selected, verification=tally.report(journal.undecodable))


async def verify_scaling(log: Log, on_progress: OnProgress | None = None) -> ScalingVerification | None:
    """Derive all decisions of the topic `scaling` again. None if the log has no record of this topic.

    Raises:
        LogError: the log is damaged, or retention removed records of the topic.
    """
    if not await has_scaling(log) or await log.end(SCALING.name, PARTITION) == 0:
        return None
    journal, tally = ScalingJournal(log, on_progress), VerificationTally()
    try:
        async for decision in journal.read():
            tally.add(decision)
    except NoPlanner:  # an operator has written to the topic before the first planner
        pass
    return tally.report(journal.undecodable)


def known_pool(name: str, journal: ScalingJournal) -> PoolKey:
    """Return the pool with the name `GROUP/POOL`. Raises UnknownPool if no claim that was read has it."""
    known = {pool_text(pool): pool for pool in journal.pools}
    if name not in known:
        raise UnknownPool(unknown_name("pool", name, known))
    return known[name]


def differences_of(decision: RecordedDecision) -> dict[str, dict[str, Any]]:
    """Return the recorded and the derived value of each field that differs, empty if none does."""
    derived = decision.derived
    if derived is None:
        return {}
    found = {}
    for name in ("planner_epoch", "after", "advisory"):
        values = getattr(decision.decided, name), getattr(derived, name)
        if values[0] != values[1]:
            found[name] = {"recorded": values[0], "derived": values[1]}
    pools = [{pool_text((one.group, one.pool)): one for one in made.pools} for made in (decision.decided, derived)]
    for pool in pools[0] | pools[1]:
        parts = [msgspec.to_builtins(made[pool]) if pool in made else {} for made in pools]
        for name in parts[0] | parts[1]:
            recorded, again = parts[0].get(name), parts[1].get(name)
            if recorded != again:
                found[f"{pool} {name}"] = {"recorded": recorded, "derived": again}
    return found


def _is_selected(decision: RecordedDecision, pool: str, *, is_change: bool) -> bool:
    pools = [one for one in decision.decided.pools if not pool or pool_text((one.group, one.pool)) == pool]
    return bool(pools) and (not is_change or any(one.to_size != one.from_size for one in pools))


def _entry(decision: RecordedDecision, open_changes: Mapping[PoolKey, OpenChange], pool: str) -> DecisionEntry:
    entry = entry_of(decision, open_changes)
    pools = [one for one in entry.pools if not pool or pool_text((one.group, one.pool)) == pool]
    return msgspec.structs.replace(entry, pools=pools)
