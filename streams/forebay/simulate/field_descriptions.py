"""Error texts for invalid configuration fields: the name of the field and the values that it allows."""

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

INT_MAX = (1 << 63) - 1  # the integer limit of the wire format; not worth showing to users


def allowed_values(kind: inspect.Type) -> str:
    """Return a description of the values that a field of this type allows."""
    match kind:
        case inspect.UnionType(types=kinds):
            return " or ".join(allowed_values(one) for one in kinds)
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


def invalid_field(raw: Mapping[str, Any], kind: type[msgspec.Struct], error: Exception, *, strict: bool = True) -> str:
    """Return an error text with the name of the first invalid field of `raw`, and its allowed values.

    Args:
        raw: the fields as read from the file or option.
        kind: struct type to which the fields could not be converted.
        error: error that the conversion raised. Its text is returned if no single field is invalid.
        strict: whether the conversion was strict, that is, did not convert text to numbers.
    """
    for name, field in get_type_hints(kind, include_extras=True).items():
        if name not in raw:
            continue
        try:
            msgspec.convert(raw[name], field, strict=strict)
        except msgspec.ValidationError as inner:
            if isinstance(field, type) and issubclass(field, msgspec.Struct):
                within = raw[name]
                if isinstance(within, Mapping):
                    return f"{name}.{invalid_field(within, field, inner, strict=strict)}"
                return f"{name}: must be a table of fields"
            return f"{name}: must be {allowed_values(inspect.type_info(field))}"
    return str(error).partition(" - at `$")[0]


def _range(least: float | None, most: float | None) -> str:
    if most is None:
        return "" if least is None else f" of at least {least:.15g}"
    return f" from {least or 0:.15g} to {most:.15g}"
