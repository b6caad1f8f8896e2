"""Conversion of settings that users write to structs, with errors that name the field and the values that it allows."""

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect

from forebay.events.names import unknown_name
from forebay.runtime.errors import ConfigError

StructT = TypeVar("StructT")

INT_MAX = (1 << 63) - 1  # the integer limit of the wire format; not worth showing to users


def converted(raw: Any, kind: type[StructT], noun: str, *, strict: bool = True) -> StructT:
    """Return decoded data as a struct. Raises ConfigError for an unknown field (in the text a `noun`) or a bad value.

    A conversion that is not `strict` may convert text to numbers.
    """
    # Conversion to a struct may ignore unknown fields, but in a file they are typing errors.
    for problem in _unusable_fields(raw, inspect.type_info(kind), noun, ""):
        raise ConfigError(problem)
    try:
        return msgspec.convert(raw, kind, strict=strict)
    except msgspec.ValidationError:
        raise ConfigError(_invalid_field(raw, kind, "", strict=strict)) from None


def field_types(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and type of every field of `kind`. For a nested struct, yield its fields instead."""
    for name, field in get_type_hints(kind, include_extras=True).items():
        if _is_struct(field):
            yield from field_types(field, f"{prefix}{name}.")
        elif name in kind.__struct_fields__:
            yield f"{prefix}{name}", field


def with_field(part: Any, path: str, value: Any) -> Any:
    """Return a struct with another value of the field at a path, as in `queue.depth`."""
    name, _, inner = path.partition(".")
    return msgspec.structs.replace(part, **{name: with_field(getattr(part, name), inner, value) if inner else value})


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
        case inspect.FloatType(gt=float() | int() as above, le=most):
            return f"a number above {above:.15g}" + ("" if most is None else f" and at most {most:.15g}")
        case inspect.FloatType(ge=least, le=most):
            return "a number" + _range(least, most)
        case inspect.StrType():
            return "a name"
        case inspect.StructType() | inspect.DictType():
            return "a table of fields"
        case _:
            return "a list"


def _invalid_field(raw: Any, kind: Any, where: str, *, strict: bool) -> str:
    """Return the path of the first invalid value in `raw`, and why it is invalid. Empty if all are valid."""
    try:
        msgspec.convert(raw, kind, strict=strict)
    except msgspec.ValidationError as error:
        reason = str(error).partition(" - at `$")[0]
    else:
        return ""
    structs = [one for one in (get_args(kind) or [kind]) if _is_struct(one)]
    if isinstance(raw, Mapping) and structs:
        tag_field, tags = structs[0].__struct_config__.tag_field, [one.__struct_config__.tag for one in structs]
        if (tag := raw.get(tag_field)) not in tags:
            return f"{where}.{tag_field}: must be one of {', '.join(tags)}".removeprefix(".")
        fields = get_type_hints(structs[tags.index(tag)], include_extras=True)
        within = [(f"{where}.{name}", raw[name], field) for name, field in fields.items() if name in raw]
        if missing := re.fullmatch(r"Object missing required field `(.*)`", reason):
            where, reason = f"{where}.{missing[1]}", "missing key"
    elif isinstance(raw, list | tuple) and get_origin(kind) is tuple:
        within = [(f"{where}[{at}]", one, get_args(kind)[0]) for at, one in enumerate(raw)]
    else:
        within, reason = [], f"must be {allowed_values(inspect.type_info(kind))}"
    found = (_invalid_field(value, field, place, strict=strict) for place, value, field in within)
    return next(filter(None, found), f"{where}: {reason}").removeprefix(".").removeprefix(": ")


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _unusable_fields(raw: Any, kind: inspect.Type, noun: str, where: str) -> Iterator[str]:
    """Yield an error text for each unknown field of `raw`, with similar or all known fields, and infinite number."""
    match kind:
        case inspect.StructType(fields=fields, tag=tag, tag_field=tag_field) if isinstance(raw, dict):
            if tag_field is not None and raw.get(tag_field) != tag:
                return  # another type of a union, or an error of the conversion
            known = {field.encode_name: field.type for field in fields}
            names = [*known, *([tag_field] if tag_field is not None else [])]
            for key, value in raw.items():
                if key in known:
                    yield from _unusable_fields(value, known[key], noun, f"{where}.{key}".removeprefix("."))
                elif key != tag_field:
                    yield f"{where}: {unknown_name(noun, str(key), names)}".removeprefix(": ")
        case inspect.VarTupleType(item_type=item) if isinstance(raw, list):
            for at, value in enumerate(raw):
                yield from _unusable_fields(value, item, noun, f"{where}[{at}]")
        case inspect.UnionType(types=kinds):
            for one in kinds:
                yield from _unusable_fields(raw, one, noun, where)
        case inspect.FloatType() if isinstance(raw, float) and not isfinite(raw):
            yield f"{where}: must be a finite number, got {raw}"


def _range(least: float | None, most: float | None) -> str:
    if most is None:
        return "" if least is None else f" of at least {least:.15g}"
    return f" from {least or 0:.15g} to {most:.15g}"
