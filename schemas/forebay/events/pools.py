"""Events on the topic `control` that set how the owner chooses the pool of a request, and the record of a choice.

Each event is valid until the next one for the same model or pool. `PoolConfigured` does not reset it. An event
that `ends` only removes the earlier one. `NOUN` and `summary` describe an event to operators.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

from forebay.events.base import Count, Event, Name, Part
from forebay.events.numbers import Fraction, Milliseconds, require_numbers
from forebay.events.privacy import KEPT, MODEL, OperatorName, SystemName

Tokens = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
GridRole = Literal["aggregated", "prefill", "decode"]

CELLS_MAX = 64  # per axis; far more classes of requests than pools
GRID_POOLS_MAX = 64  # a choice may check the workers of each of them
OVERRIDES_MAX = 64
TARGET_SPAN_MS_MIN = 0.001  # so that no cell has the width 0


class GridPool(Part, frozen=True, kw_only=True):
    """Pool of a grid.

    Attributes:
        priority: speed of the pool. A pool with a lower number is faster.
    """

    pool: SystemName
    priority: Priority


class PriorityOverride(Part, frozen=True, kw_only=True):
    """Requests whose priority is in this range go to one pool, whatever the cell of the grid.

    Attributes:
        min_priority: lowest priority of the range.
        max_priority: highest priority of the range.
    """

    min_priority: Priority
    max_priority: Priority
    pool: SystemName


class PoolGrid(Part, frozen=True, kw_only=True):
    """Table that maps the length of a prompt and a latency target to a pool.

    Each axis is divided into cells of equal size. Values outside the range of an axis belong to its first or last cell.

    Attributes:
        role: role of the pools.
        target: latency target on the second axis: `ttft` or `itl`.
        isl_min: lower end of the first axis, in prompt tokens.
        isl_max: upper end of the first axis, in prompt tokens.
        target_min_ms: lower end of the second axis, in milliseconds.
        target_max_ms: upper end of the second axis, in milliseconds.
        default_target_ms: target of requests that name none, in milliseconds; null for the middle of the axis.
        pools: the pools and their speed.
        cells: name of the pool of each cell: one row per range of prompt lengths, one column per range of targets.
        overrides: pools of requests with certain priorities. The first that matches counts.
    """

    role: GridRole = "aggregated"
    target: Literal["ttft", "itl"] = "ttft"
    isl_min: Tokens = 0
    isl_max: Tokens
    target_min_ms: Milliseconds = 0.0
    target_max_ms: Milliseconds
    default_target_ms: Milliseconds | None = None
    pools: tuple[GridPool, ...]
    cells: tuple[tuple[SystemName, ...], ...]
    overrides: tuple[PriorityOverride, ...] = ()

    def __post_init__(self) -> None:
        require_numbers(self)
        if self.isl_max <= self.isl_min:
            raise ValueError(f"isl_max is {self.isl_max}; it must be above isl_min, {self.isl_min}")
        if self.target_max_ms - self.target_min_ms < TARGET_SPAN_MS_MIN:
            raise ValueError(
                f"target_max_ms is {self.target_max_ms:g}; it must be at least {TARGET_SPAN_MS_MIN:g} above"
                f" target_min_ms, {self.target_min_ms:g}"
            )
        widths = sorted({len(row) for row in self.cells})
        if not (1 <= len(self.cells) <= CELLS_MAX and len(widths) == 1 and 1 <= widths[0] <= CELLS_MAX):
            text = f"{len(self.cells)} rows with {' or '.join(map(str, widths)) or 'no'} cells"
            raise ValueError(f"cells has {text}; expected 1 to {CELLS_MAX} rows of one length from 1 to {CELLS_MAX}")
        names = [one.pool for one in self.pools]
        if len(names) > GRID_POOLS_MAX or len(set(names)) < len(names):
            raise ValueError(f"pools must be at most {GRID_POOLS_MAX} different pools, got {len(names)}")
        if len(self.overrides) > OVERRIDES_MAX:
            raise ValueError(f"too many overrides: {len(self.overrides)}, the maximum is {OVERRIDES_MAX}")
        used = [*(name for row in self.cells for name in row), *(one.pool for one in self.overrides)]
        if unknown := sorted(set(used) - set(names)):
            raise ValueError(f"the pool {unknown[0]!r} of a cell or override is missing in pools: {', '.join(names)}")


class PoolRouting(Part, frozen=True, kw_only=True):
    """How the owner chooses the pools of a model's requests.

    Attributes:
        grids: at most one grid per role. Without a grid the first pool by name serves every request.
        retry: whether a request that failed before its first output token moves to a faster pool.
    """

    grids: tuple[PoolGrid, ...] = ()
    retry: bool = False

    def __post_init__(self) -> None:
        roles = [grid.role for grid in self.grids]
        for role in roles:
            if roles.count(role) > 1:
                raise ValueError(f"duplicate grid for the role {role}")


class PoolRoutingConfigured(Event, tag="control.pool_routing_configured", frozen=True, kw_only=True):
    """The owner chooses the pools of a model by these rules from now on. They replace all earlier grids of the model.

    Attributes:
        routing: the rules.
        operator: name of the operator; empty if a router applies its own configuration.
    """

    NOUN: ClassVar = "routing rules"
    ends: ClassVar = False

    model: Annotated[Name, MODEL]
    routing: PoolRouting
    at_us: int = 0
    operator: OperatorName = ""

    @property
    def summary(self) -> str:
        """Return the rules as a clause."""
        grids = ", ".join(f"a grid of {len(grid.pools)} {grid.role} pools" for grid in self.routing.grids)
        retry = " and retries in faster pools" if self.routing.retry else ""
        return f"Pools of {self.model} are chosen by {grids or 'name'}{retry}"


class PoolCanarySet(Event, tag="control.pool_canary_set", frozen=True, kw_only=True):
    """A share of the requests for the pool `base` goes to another pool, the canary.

    Attributes:
        pool: name of the canary.
        base: pool that gives requests to the canary; empty to end this.
        share: share of these requests, from 0 to 1.
    """

    NOUN: ClassVar = "canaries"

    model: Annotated[Name, MODEL]
    pool: SystemName
    base: Annotated[str, msgspec.Meta(max_length=256), KEPT] = ""
    share: Fraction = 0.0
    at_us: int = 0
    operator: OperatorName = ""

    def __post_init__(self) -> None:
        require_numbers(self)

    @property
    def ends(self) -> bool:
        """Return whether the event only removes the canary."""
        return not self.base

    @property
    def summary(self) -> str:
        """Return the change of the canary as a clause."""
        if not self.base:
            return f"Pool {self.pool} is no canary any more"
        return f"Pool {self.pool} gets {self.share:.4g} of the requests for pool {self.base}"


class PoolDrainSet(Event, tag="control.pool_drain_set", frozen=True, kw_only=True):
    """A pool gets no new requests, or gets them again. Requests that it already has finish there.

    Attributes:
        drained: whether the pool gets no new requests.
    """

    NOUN: ClassVar = "drains"

    model: Annotated[Name, MODEL]
    pool: SystemName
    drained: bool
    at_us: int = 0
    operator: OperatorName = ""

    @property
    def ends(self) -> bool:
        """Return whether the event only removes the drain."""
        return not self.drained

    @property
    def summary(self) -> str:
        """Return the change of the pool as a clause."""
        return f"Pool {self.pool} gets {'no new requests' if self.drained else 'new requests again'}"


PoolRule = PoolRoutingConfigured | PoolCanarySet | PoolDrainSet
ChoiceReason = Literal["first", "grid", "override", "canary", "worker", "session", "retry", "moved"]
SkipReason = Literal["unknown", "drained", "block_size", "no_workers", "no_eligible_worker", "busy", "full", "failed"]


class SkippedPool(Part, frozen=True, kw_only=True):
    """Pool that the owner preferred to the selected one, but did not use.

    Attributes:
        reason: `unknown`: the model has no pool of this name and role. `drained`: the pool gets no new requests.
            `block_size`: its blocks have another size than those of the model's other pools. `no_workers`: no worker of
            it is ready. `no_eligible_worker`: no ready worker meets the request's conditions. `busy`: all eligible
            workers are busy. `full`: no eligible worker has room. `failed`: the previous attempt failed there.
    """

    pool: SystemName
    reason: SkipReason


class PoolChoice(Part, frozen=True, kw_only=True):
    """How the owner chose a pool for a request.

    Attributes:
        pool: selected pool.
        role: role of the pool.
        reason: why the owner preferred the pool `wanted`. `first`: it is the first by name, because there is no grid.
            `grid`: the cell of the request names it. `override`: the priority of the request selects it. `canary`: it
            gets a share of the requests for `base`. `worker`: it has the worker that the request names. `session`: it
            has the rank that serves the session. `retry`: it is faster than the pool of the failed attempt. `moved`:
            the request leaves its pool, which has no worker for it any more, or is drained while the request is queued.
        wanted: pool that the owner preferred. It is the selected pool unless that is in `skipped`.
        row: row of the request's cell, from 0; null if no cell was read.
        column: column of the request's cell, from 0; null if no cell was read.
        target_ms: latency target by which the cell was found, in milliseconds; null if no cell was read.
        base: pool whose requests the canary `wanted` gets; null if it is no canary.
        skipped: pools that were preferred and not used, in order.
    """

    pool: SystemName
    role: GridRole
    reason: ChoiceReason
    wanted: SystemName
    row: Count | None = None
    column: Count | None = None
    target_ms: Milliseconds | None = None
    base: SystemName | None = None
    skipped: tuple[SkippedPool, ...] = ()
