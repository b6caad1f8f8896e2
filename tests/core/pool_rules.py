"""Rules for the choice of pools, for tests."""

from typing import Any

from forebay.core.state.pool_registry import PoolEvent
from forebay.events.pools import GridPool, PoolCanarySet, PoolDrainSet, PoolGrid, PoolRouting, PoolRoutingConfigured


def one_cell(*names: str, **changes: Any) -> PoolGrid:
    """A grid with one cell, which names the first pool. Each further pool is faster than the one before it."""
    pools = tuple(GridPool(pool=name, priority=-at) for at, name in enumerate(names))
    fields: dict[str, Any] = {
        "isl_max": 100,
        "target_max_ms": 100.0,
        "pools": pools,
        "cells": ((names[0],),),
        **changes,
    }
    return PoolGrid(**fields)


def pool_rule(first: int, depth: int, third: int) -> PoolEvent:
    """A rule for the choice of pools of the model m."""
    names = ("default", "other", "prefillers")
    if first < 4:
        order = ("default", "other") if depth % 2 else ("other", "default")
        prefill = one_cell("prefillers", "more", role="prefill") if depth < 4 else one_cell("more", role="prefill")
        grids = (one_cell(*order), one_cell(*order, role="decode"), prefill)[: 1 + third]
        return PoolRoutingConfigured(model="m", routing=PoolRouting(grids=grids, retry=first % 2 == 0))
    if first < 7:
        base = ("", "default", "other")[third]
        return PoolCanarySet(model="m", pool="other" if base == "default" else "default", base=base, share=depth / 8)
    return PoolDrainSet(model="m", pool=names[third], drained=depth % 2 == 0)
