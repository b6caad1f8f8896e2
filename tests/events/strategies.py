"""Hypothesis strategies derived from the event types: any value that a type allows."""

import functools
from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

from forebay.events.base import U32_BYTES
from forebay.events.control import QueueClass, QueueConfig
from forebay.events.pools import GridPool, PoolGrid, PoolRouting, PriorityOverride
from forebay.events.work import WorkItem

I64_MIN = -(2**63)
U64_MAX = 2**64 - 1
PACKED_BYTES = 8  # a multiple of the sizes of u32 and u64


@st.composite
def pool_grids(draw: st.DrawFn, names: tuple[str, ...] = ("a", "b", "c")) -> PoolGrid:
    """Draw a grid of some of the pools `names`. The fields of this type constrain each other."""
    used = draw(st.lists(st.sampled_from(names), min_size=1, max_size=len(names), unique=True))
    priorities = st.integers(-3, 3)
    width = draw(st.integers(1, 3))
    row = st.lists(st.sampled_from(used), min_size=width, max_size=width).map(tuple)
    low, isl_low = draw(st.floats(0, 1e3)), draw(st.integers(0, 100))
    overrides = st.builds(
        PriorityOverride, min_priority=priorities, max_priority=priorities, pool=st.sampled_from(used)
    )
    return PoolGrid(
        role=draw(st.sampled_from(["aggregated", "prefill", "decode"])),
        target=draw(st.sampled_from(["ttft", "itl"])),
        isl_min=isl_low,
        isl_max=isl_low + draw(st.integers(1, 100)),
        target_min_ms=low,
        target_max_ms=low + draw(st.floats(0.01, 1e4)),
        default_target_ms=draw(st.none() | st.floats(0, 1e4)),
        pools=tuple(GridPool(pool=name, priority=draw(priorities)) for name in used),
        cells=tuple(draw(st.lists(row, min_size=1, max_size=3))),
        overrides=tuple(draw(st.lists(overrides, max_size=2))),
    )


@functools.cache  # building a strategy takes longer than drawing from it
def instances(cls: type) -> st.SearchStrategy[Any]:
    """Return a strategy for every instance of a struct type that the wire can carry."""
    return _values(inspect.type_info(cls))


def _made(cls: type, fields: dict[str, Any]) -> Any:
    if cls is WorkItem and "output_tokens" in fields:
        fields["output_tokens"] %= len(fields["token_ids"]) // U32_BYTES + 1  # at most the number of tokens
    return cls(**fields)


def _values(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.Metadata():
            return _values(info.type)
        case inspect.StructType(cls=cls) if cls is QueueConfig:
            # The fields of this type constrain each other.
            names = st.lists(st.text(min_size=1, max_size=9), max_size=3, unique=True)
            classes = names.map(lambda drawn: (QueueClass(), *(QueueClass(name=f"-{name}") for name in drawn)))
            threshold = st.none() | st.floats(min_value=0, max_value=1e6)
            return st.builds(
                QueueConfig, threshold=threshold, policy=st.sampled_from(["fcfs", "wspt", "lcfs"]), classes=classes
            )
        case inspect.StructType(cls=cls) if cls is PoolGrid:
            return pool_grids()
        case inspect.StructType(cls=cls) if cls is PoolRouting:
            grids = st.lists(pool_grids(), max_size=3, unique_by=lambda grid: grid.role).map(tuple)
            return st.builds(PoolRouting, grids=grids, retry=st.booleans())
        case inspect.StructType():
            required = {f.name: _values(f.type) for f in info.fields if f.required}
            optional = {f.name: _values(f.type) for f in info.fields if not f.required}
            return st.fixed_dictionaries(required, optional=optional).map(lambda fields: _made(info.cls, fields))
        case inspect.UnionType():
            return st.one_of([_values(alternative) for alternative in info.types])
        case inspect.VarTupleType():
            return st.lists(_values(info.item_type), max_size=3).map(tuple)
        case inspect.LiteralType():
            return st.sampled_from(info.values)
        case inspect.IntType():
            return st.integers(I64_MIN if info.ge is None else info.ge, U64_MAX if info.le is None else info.le)
        case inspect.FloatType():
            low = info.ge if info.gt is None else info.gt
            return st.floats(low, info.le, exclude_min=info.gt is not None, allow_nan=False, allow_infinity=False)
        case inspect.StrType(pattern=None):
            return st.text(st.characters(codec="utf-8"), min_size=info.min_length or 0, max_size=info.max_length)
        case inspect.StrType():
            return st.from_regex(info.pattern or "", fullmatch=True).map(str.strip)
        case inspect.BytesType():
            return st.binary(max_size=4 * PACKED_BYTES).map(
                lambda drawn: drawn[: len(drawn) // PACKED_BYTES * PACKED_BYTES]
            )
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
    raise TypeError(f"no strategy for {info}")
