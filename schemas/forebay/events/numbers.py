"""Types of numbers in events, and the check of structs that a process creates itself."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated

import msgspec

Weight = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]  # finite, so that every cost is finite
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=31_536_000.0)]  # a year
PIN_S_MAX = 3600  # a request that is repeated extends its pin
PinSeconds = Annotated[int, msgspec.Meta(ge=0, le=PIN_S_MAX)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]  # 11 days


@lru_cache
def _limits(kind: type[msgspec.Struct]) -> Mapping[str, float]:
    """Return the maximum of each number of a struct whose type declares one."""
    limits: dict[str, float] = {}
    for field in msgspec.structs.fields(kind):
        info = msgspec.inspect.type_info(field.type)
        for one in info.types if isinstance(info, msgspec.inspect.UnionType) else (info,):
            if isinstance(one, msgspec.inspect.IntType | msgspec.inspect.FloatType) and one.le is not None:
                limits[field.name] = one.le
    return limits


def require_numbers(part: msgspec.Struct) -> None:
    """Check that each number is None or between 0 and the maximum that its type declares.

    The decoder checks the ranges of events from the log. This function checks structs that a process creates itself.

    Raises:
        ValueError: a number is out of range or NaN.
    """
    for name, most in _limits(type(part)).items():
        value = getattr(part, name)
        if value is not None and not 0 <= value <= most:  # also false for NaN
            raise ValueError(f"{name} must be a number from 0 to {most:g}, not {value}")
