"""The choice of a pool as a function: grid, priority, canaries, speed and availability."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.routing.pool_choice import choose, draw_canary, prefer
from forebay.events.pools import (
    GridPool,
    PoolCanarySet,
    PoolChoice,
    PoolGrid,
    PoolRouting,
    PriorityOverride,
    SkippedPool,
    SkipReason,
)
from forebay.events.requests import RoutingHints
from tests.core.worlds import one_cell
from tests.events.strategies import pool_grids

NAMES = ("a", "b", "c", "d")
GRID = PoolGrid(
    isl_max=32_000,
    target_min_ms=0.0,
    target_max_ms=1_000.0,
    pools=tuple(GridPool(pool=name, priority=at) for at, name in enumerate("abc")),
    cells=(("a", "b"), ("b", "c")),
    overrides=(
        PriorityOverride(min_priority=5, max_priority=9, pool="c"),
        PriorityOverride(min_priority=5, max_priority=99, pool="a"),
    ),
)
hints = st.builds(
    RoutingHints,
    priority=st.integers(-3, 9),
    ttft_target_ms=st.none() | st.floats(0, 1e4),
    itl_target_ms=st.none() | st.floats(0, 1e4),
)
canaries = st.lists(
    st.builds(
        PoolCanarySet,
        model=st.just("m"),
        pool=st.sampled_from(NAMES[2:]),
        base=st.sampled_from(NAMES[:2]),
        share=st.floats(0, 1),
    ),
    max_size=2,
    unique_by=lambda one: one.pool,
)
reasons: Sequence[SkipReason | None] = (None, "full", "busy", "no_workers", "drained", "unknown")
availabilities = st.fixed_dictionaries({name: st.sampled_from(reasons) for name in NAMES})


def canary(pool: str, base: str, share: float) -> PoolCanarySet:
    return PoolCanarySet(model="m", pool=pool, base=base, share=share)


def chosen(tokens: int = 0, **fields: Any) -> PoolChoice:
    found = chosen_if_any(tokens, **fields)
    assert found is not None
    return found


def chosen_if_any(
    tokens: int = 0, found: dict[str, SkipReason] | None = None, refuse: bool = False, **fields: Any
) -> PoolChoice | None:
    """Choose among a, b and c of `GRID`, where `found` has the reasons of pools that cannot take the request."""
    rules: dict[str, Any] = {"grid": GRID, "names": ("a", "b", "c"), "canaries": (), "hints": RoutingHints(), **fields}
    preference = prefer(rules["grid"], rules["names"], rules["canaries"], tokens, 7, rules["hints"])
    return choose(preference, "aggregated", (found or {}).get, allow_refusal=refuse)


def skips(**found: SkipReason) -> tuple[SkippedPool, ...]:
    return tuple(SkippedPool(pool=pool, reason=reason) for pool, reason in found.items())


@pytest.mark.parametrize(
    ("tokens", "target_ms", "pool", "cell"),
    [
        (100, 100.0, "a", (0, 0)),
        (100, None, "b", (0, 1)),
        (100, 500.0, "b", (0, 1)),
        (16_000, 499.0, "b", (1, 0)),
        (1 << 30, 1e9, "c", (1, 1)),
    ],
)
def test_the_cell_names_the_pool(tokens: int, target_ms: float | None, pool: str, cell: tuple[int, int]) -> None:
    found = chosen(tokens, hints=RoutingHints(ttft_target_ms=target_ms))
    assert (found.pool, found.wanted, found.reason, found.skipped) == (pool, pool, "grid", ())
    assert (found.row, found.column) == cell
    assert found.target_ms == (500.0 if target_ms is None else target_ms)


@pytest.mark.parametrize(("priority", "pool"), [(5, "c"), (9, "c"), (10, "a"), (99, "a"), (4, "b"), (100, "b")])
def test_the_first_override_of_a_priority_wins(priority: int, pool: str) -> None:
    found = chosen(hints=RoutingHints(priority=priority))
    assert (found.pool, found.reason == "override", found.row is None) == (pool, pool != "b", pool != "b")


@pytest.mark.parametrize(
    ("found", "pool", "skipped"),
    [
        ({"b": "no_workers"}, "a", {"b": "no_workers"}),
        ({"b": "full"}, "a", {"b": "full"}),
        ({"b": "full", "a": "full"}, "b", {"a": "full"}),  # waits in the queue of its pool, not in a slower pool
        ({"b": "busy", "a": "full"}, "a", {"b": "busy"}),
        ({"b": "drained", "a": "busy"}, "c", {"b": "drained", "a": "busy"}),
        ({"b": "drained", "a": "busy", "c": "full"}, "c", {"b": "drained", "a": "busy"}),
    ],
)
def test_pools_that_cannot_take_a_request_are_skipped(
    found: dict[str, SkipReason], pool: str, skipped: dict[str, SkipReason]
) -> None:
    made = chosen(found=found)
    assert (made.pool, made.wanted, made.skipped) == (pool, "b", skips(**skipped))


def test_if_every_pool_refuses_the_first_that_is_not_drained_may_say_why() -> None:
    found: dict[str, SkipReason] = {"a": "busy", "b": "drained", "c": "no_workers"}
    assert chosen_if_any(found=found) is None
    made = chosen(found=found, refuse=True)
    assert (made.pool, made.skipped) == ("a", skips(b="drained", c="no_workers"))
    assert chosen_if_any(found=dict.fromkeys("abc", "drained"), refuse=True) is None


def test_without_a_grid_the_first_by_name_is_preferred_and_no_pool_is_slower() -> None:
    made = chosen(grid=None, found={"a": "full"})
    assert (made.pool, made.reason, made.wanted, made.row, made.target_ms) == ("b", "first", "a", None, None)


def test_a_canary_is_only_used_for_its_share_and_if_no_other_pool_is_left() -> None:
    with_canary: dict[str, Any] = {"grid": None, "canaries": (canary("a", "b", 0.0),)}
    made = chosen(**with_canary)
    assert (made.pool, made.reason) == ("b", "first")
    made = chosen(**with_canary, found={"b": "full", "c": "no_workers"})
    assert made.pool == "b"
    made = chosen(**with_canary, found={"b": "drained", "c": "no_workers"})
    assert made.pool == "a"
    made = chosen(grid=None, names=("a",), canaries=(canary("a", "b", 0.0),))
    assert made.pool == "a", "the only pool"


def test_a_request_of_a_canary_falls_back_to_its_base_then_to_faster_pools() -> None:
    rules: dict[str, Any] = {"canaries": (canary("d", "b", 1.0),), "names": NAMES}
    made = chosen(**rules)
    assert (made.pool, made.reason, made.base, made.row) == ("d", "canary", "b", 0)
    made = chosen(**rules, found={"d": "full", "b": "busy"})
    assert (made.pool, made.skipped) == ("a", skips(d="full", b="busy"))
    made = chosen(canaries=(canary("a", "b", 1.0),), found={"a": "full"})
    assert (made.pool, made.skipped) == ("b", skips(a="full")), "a faster pool may be the canary"


def test_canaries_share_the_requests_of_their_base() -> None:
    rules = [canary("c", "b", 0.2), canary("d", "b", 0.3), canary("e", "x", 1.0)]
    drawn = [draw_canary("b", rules, seed) for seed in range(4_000)]
    shares = {name: drawn.count(name) / len(drawn) for name in ("c", "d", None)}
    assert shares == pytest.approx({"c": 0.2, "d": 0.3, None: 0.5}, abs=0.03)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, (1 << 64) - 1_001))
def test_shares_converge_and_a_larger_share_keeps_the_requests_of_a_smaller_one(
    one: float, other: float, start: int
) -> None:
    small, large = sorted((one, other))
    seeds = range(start, start + 1_000)
    few = {seed for seed in seeds if draw_canary("b", [canary("c", "b", small)], seed)}
    many = {seed for seed in seeds if draw_canary("b", [canary("c", "b", large)], seed)}
    assert few <= many
    assert len(few) / len(seeds) == pytest.approx(small, abs=0.1)


@given(pool_grids(NAMES[:3]) | st.none(), canaries, availabilities, hints, st.integers(0, 200), st.integers(0, 99))
def test_a_pool_that_can_take_a_request_is_always_found(
    grid: PoolGrid | None,
    rules: list[PoolCanarySet],
    found: dict[str, SkipReason | None],
    asked: RoutingHints,
    tokens: int,
    seed: int,
) -> None:
    preference = prefer(grid, NAMES, rules, tokens, seed, asked)
    tried = [*preference.names, *preference.others]
    assert sorted(tried) == sorted(NAMES), "each pool is tried once"
    assert prefer(grid, NAMES, rules, tokens, seed, asked) == preference
    made = choose(preference, "aggregated", found.__getitem__)
    can = [name for name in tried if found[name] in (None, "full")]
    assert (made is None) == (not can)
    if made is None:
        return
    assert made.pool in can
    assert all(found[one.pool] == one.reason for one in made.skipped)
    before = [name for name in preference.names if name in can]
    free = [name for name in before if found[name] is None]
    after = [name for name in preference.others if found[name] is None]
    assert made.pool == next(iter([*free, *before, *after, *can]))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"isl_min": 5, "isl_max": 5}, "isl_max is 5; it must be above isl_min, 5"),
        ({"target_max_ms": 0.0}, "target_max_ms is 0; it must be at least 0.001 above target_min_ms, 0"),
        ({"target_max_ms": float("nan")}, "target_max_ms must be a number"),
        ({"cells": ()}, "cells has 0 rows with no cells"),
        ({"cells": ((), ())}, "cells has 2 rows with 0 cells"),
        ({"cells": (("a",), ("a", "a"))}, "cells has 2 rows with 1 or 2 cells; expected 1 to 64 rows"),
        ({"cells": (("a",),) * 65}, "cells has 65 rows"),
        ({"cells": (("x",),)}, "the pool 'x' of a cell or override is missing in pools: a, b"),
        ({"pools": (GridPool(pool="a", priority=0),) * 2}, "pools must be at most 64 different pools, got 2"),
        ({"overrides": (PriorityOverride(min_priority=0, max_priority=1, pool="z"),)}, "the pool 'z' of a cell"),
        ({"overrides": (PriorityOverride(min_priority=0, max_priority=1, pool="a"),) * 65}, "too many overrides: 65"),
    ],
)
def test_an_invalid_grid_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="^" + text.replace("(", "\\(")):
        msgspec.structs.replace(one_cell("a", "b"), **fields)


def test_a_model_has_one_grid_per_role_and_a_share_is_at_most_one() -> None:
    grids = (one_cell("a"), one_cell("a", role="decode"))
    assert PoolRouting(grids=grids).grids == grids
    with pytest.raises(ValueError, match="duplicate grid for the role decode"):
        PoolRouting(grids=(*grids, one_cell("b", role="decode")))
    with pytest.raises(ValueError, match=r"share must be a number from 0 to 1, not 1\.5"):
        canary("a", "b", 1.5)
