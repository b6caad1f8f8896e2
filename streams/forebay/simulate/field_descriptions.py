"""What a field of a configuration may be, in words for people who mistyped one."""

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

INT_MAX = (1 << 63) - 1  # the end of the wire's integers, and no limit that says anything


def allowed(kind: inspect.Type) -> str:
    """What a field may be."""
    match kind:
        case inspect.UnionType(types=kinds):
            return " or ".join(allowed(one) for one in kinds)
        case inspect.NoneType():
            return "null"
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(map(str, values))
        case inspect.IntType(ge=least, le=most):
            return "a whole number" + _range(least, None if most == INT_MAX else most)
        case inspect.FloatType(ge=least, le=most):
            return "a number" + _range(least, most)
        case inspect.StrType():
            return "a name"
        case _:
            return "a JSON list of objects, as in a policy file"


def refused(raw: Mapping[str, Any], kind: type[msgspec.Struct], error: Exception, *, strict: bool = True) -> str:
    """Which field of `raw` the conversion to `kind` failed at, and what it may be; else what the error says."""
    for name, field in get_type_hints(kind, include_extras=True).items():
        if name not in raw:
            continue
        try:
            msgspec.convert(raw[name], field, strict=strict)
        except msgspec.ValidationError as inner:
            if isinstance(field, type) and issubclass(field, msgspec.Struct):
                within = raw[name]
                if isinstance(within, Mapping):
                    return f"{name}.{refused(within, field, inner, strict=strict)}"
                return f"{name}: must hold fields"
            return f"{name}: must be {allowed(inspect.type_info(field))}"
    return str(error).partition(" - at `$")[0]


def _range(least: float | None, most: float | None) -> str:
    if most is None:
        return "" if least is None else f" of at least {least:.15g}"
    return f" from {least or 0:.15g} to {most:.15g}"
