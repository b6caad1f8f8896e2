"""Choose a pool for a request: by grid, priority, canary, speed and availability. These functions read no state.

Source: Dynamo's global router (grids, clamping, priority overrides, retry order). Canaries and the check of load and
health are forebay's.

The pool that the rules name comes first. If it cannot take the request, the owner tries the pools that are faster,
slowest first. All other pools are only used if none of these can ever take the request, for example because they have
no workers. A pool that is only full is not left for a slower one: the request waits in its queue.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_BYTES
from forebay.events.pools import (
    ChoiceReason,
    GridPool,
    GridRole,
    PoolCanarySet,
    PoolChoice,
    PoolGrid,
    SkippedPool,
    SkipReason,
)
from forebay.events.requests import RoutingHints

CANARY_SEED = 0x6361_6E61_7279  # the draw must not depend on the draws of policies, which use the same seed
DRAW_BITS = 53  # a share is a double, which has 53 bits
REFUSING: frozenset[SkipReason] = frozenset(("no_workers", "no_eligible_worker", "busy"))

Availability = Callable[[str], SkipReason | None]


@dataclass(frozen=True, slots=True)
class PoolPreference:
    """Order in which pools are tried for a request, and why.

    Attributes:
        names: the preferred pools in order, at least one.
        others: pools to try if no preferred pool can take the request, in order.
        row: row of the request's cell; None, like `column` and `target_ms`, if no cell was read.
        target_ms: latency target by which the cell was found.
        base: pool whose requests the first pool gets as a canary; None if it is no canary.
        failed: pool of the failed attempt; None if none failed.
    """

    reason: ChoiceReason
    names: tuple[str, ...]
    others: tuple[str, ...] = ()
    row: int | None = None
    column: int | None = None
    target_ms: float | None = None
    base: str | None = None
    failed: str | None = None


def cell_index(value: float, low: float, high: float, count: int) -> int:
    """Return which of `count` equal parts of the range from `low` to `high` has a value; the nearest if none has it."""
    step = (high - low) / count
    return max(0, min(int((value - low) / step), count - 1))


def target_of(grid: PoolGrid, hints: RoutingHints) -> float:
    """Return the latency target in ms: of the request, else the default of the grid, else the middle of its axis."""
    named = hints.ttft_target_ms if grid.target == "ttft" else hints.itl_target_ms
    if named is not None:
        return named
    if grid.default_target_ms is not None:
        return grid.default_target_ms
    return (grid.target_min_ms + grid.target_max_ms) / 2


def retry_order(selected: str, pools: Sequence[GridPool]) -> list[str]:
    """Return the selected pool and all faster ones, slowest first. Pools of equal speed keep their order in `pools`."""
    limit = next((one.priority for one in pools if one.pool == selected), None)
    faster = [] if limit is None else [one for one in pools if one.priority < limit]
    return [selected, *(one.pool for one in sorted(faster, key=lambda one: -one.priority))]


def prefer(
    grid: PoolGrid | None,
    names: Sequence[str],
    canaries: Sequence[PoolCanarySet],
    prompt_tokens: int,
    tie_seed: int,
    hints: RoutingHints,
) -> PoolPreference:
    """Return the order of pools for a new request, whatever their load.

    `names` has all pools that serve the model in this role, in order of their names.
    """
    shared = {canary.pool for canary in canaries}
    if grid is None:
        # Without a grid no pool is known to be slower than another one.
        regular = [name for name in names if name not in shared] or list(names)
        found = PoolPreference("first", tuple(regular))
    else:
        found = _by_grid(grid, prompt_tokens, hints)
    first = found.names[0]
    drawn = draw_canary(first, canaries, tie_seed)
    if drawn is not None:
        names_after = (name for name in found.names if name != drawn)
        found = replace(found, reason="canary", names=(drawn, *names_after), base=first)
    return _with_others(found, grid, names)


def prefer_faster(pool: str, grid: PoolGrid | None, names: Sequence[str]) -> PoolPreference | None:
    """Return the order of pools after an attempt in `pool` failed, or None if no pool is faster."""
    faster = retry_order(pool, grid.pools)[1:] if grid is not None else []
    return _with_others(PoolPreference("retry", tuple(faster), failed=pool), grid, names) if faster else None


def prefer_current(pool: str, grid: PoolGrid | None, names: Sequence[str]) -> PoolPreference:
    """Return the order of pools for an accepted request of `pool`, which may have no worker for it any more."""
    preferred = retry_order(pool, grid.pools) if grid is not None else [pool]
    return _with_others(PoolPreference("moved", tuple(preferred)), grid, names)


def draw_canary(base: str, canaries: Sequence[PoolCanarySet], tie_seed: int) -> str | None:
    """Return the canary that gets a request for the pool `base`; None if the pool itself gets it.

    Each canary gets its share of the requests, by a hash of their seeds.
    """
    drawn = xxh3_64_intdigest(tie_seed.to_bytes(U64_BYTES, "little"), CANARY_SEED) >> (64 - DRAW_BITS)
    end = 0
    for canary in canaries:
        if canary.base == base:
            end += int(canary.share * (1 << DRAW_BITS))
            if drawn < end:
                return canary.pool
    return None


def choose(
    preference: PoolPreference, role: GridRole, availability: Availability, *, allow_refusal: bool = False
) -> PoolChoice | None:
    """Return the first pool that can take a request, with the pools skipped before it; None if there is no such pool.

    `availability` returns why a pool cannot take the request now; None if it can. If no pool can take it, neither now
    nor from its queue, `allow_refusal` returns the first pool that could take other requests. Its refusal explains to
    the client what is wrong.
    """
    skipped: dict[str, SkipReason] = {}
    selected = None
    if preference.failed is not None:
        skipped[preference.failed] = "failed"
    for names in (preference.names, preference.others):
        full = None
        for name in names:
            reason = availability(name)
            if reason is None:
                selected = name
                break
            full = name if full is None and reason == "full" else full
            skipped.setdefault(name, reason)
        selected = selected or full
        if selected is not None:
            break
    if selected is None and allow_refusal:
        selected = next((name for name, reason in skipped.items() if reason in REFUSING), None)
    if selected is None:
        return None
    return PoolChoice(
        pool=selected,
        role=role,
        reason=preference.reason,
        wanted=preference.names[0],
        row=preference.row,
        column=preference.column,
        target_ms=preference.target_ms,
        base=preference.base,
        skipped=tuple(SkippedPool(pool=name, reason=reason) for name, reason in skipped.items() if name != selected),
    )


def _by_grid(grid: PoolGrid, prompt_tokens: int, hints: RoutingHints) -> PoolPreference:
    for rule in grid.overrides:
        if rule.min_priority <= hints.priority <= rule.max_priority:
            return PoolPreference("override", tuple(retry_order(rule.pool, grid.pools)))
    target_ms = target_of(grid, hints)
    row = cell_index(prompt_tokens, grid.isl_min, grid.isl_max, len(grid.cells))
    column = cell_index(target_ms, grid.target_min_ms, grid.target_max_ms, len(grid.cells[0]))
    names = tuple(retry_order(grid.cells[row][column], grid.pools))
    return PoolPreference("grid", names, row=row, column=column, target_ms=target_ms)


def _with_others(found: PoolPreference, grid: PoolGrid | None, names: Sequence[str]) -> PoolPreference:
    """Return a preference with all pools that it lacks as `others`: those of the grid by speed, then all by name."""
    slower = [] if grid is None else [one.pool for one in sorted(grid.pools, key=lambda one: one.priority)]
    others = dict.fromkeys(name for name in (*slower, *names) if name not in found.names)
    return replace(found, others=tuple(others))
