"""Error texts for unknown and invalid fields of configuration: similar names, and the values that a field allows."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from forebay.events.names import unknown_name
from forebay.runtime.errors import ConfigError

KindT = TypeVar("KindT", bound=msgspec.Struct)

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
        case inspect.FloatType(gt=float() | int() as above):
            return f"a number above {above:.15g}"
        case inspect.FloatType(ge=least, le=most):
            return "a number" + _range(least, most)
        case inspect.StrType():
            return "a name"
        case _:
            return "a JSON list of objects, as in a policy file"


def invalid_field(raw: Mapping[str, Any], kind: type[msgspec.Struct], error: Exception, *, strict: bool = True) -> str:
    """Return an error text with the name of the first invalid field of `raw`, and its allowed values.

    If no single field is invalid, the text is that of `error`. A conversion that is not `strict` may convert text to
    numbers.
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


def unknown_field(raw: Any, kind: Any, noun: str, where: str = "") -> str | None:
    """Return an error text for the first unknown field of `raw`, with similar or all known fields. None without one.

    Conversion to a struct may ignore unknown fields, but in a file they are typing errors. The text calls a field
    `noun`, for example `key`. `where` is the path of the data in the file, empty for all of it.
    """
    return next(_unknown_fields(raw, inspect.type_info(kind), noun, where), None)


def in_terms_of_keys(error: str, above: str = "") -> str:
    """Return the text of a `msgspec.ValidationError` as the dotted key of the invalid value, and the reason.

    `above` is the path of the converted data, with a dot at its end; empty for all of a file.
    """
    text, _, place = error.partition(" - at `$")
    place = above + place.rstrip("`").removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        return f"{place.rstrip('.')}.{missing[1]}: missing key".removeprefix(".")
    text = text.replace("`object`", "a table").replace("`array`", "a list").replace("`", "")
    return f"{place.rstrip('.')}: {text[:1].lower()}{text[1:]}".removeprefix(": ")


def converted(raw: Mapping[str, Any], kind: type[KindT], noun: str) -> KindT:
    """Return decoded data as a struct. Raises ConfigError for an unknown key (in the text a `noun`) or a bad value."""
    if unknown := unknown_field(raw, kind, noun):
        raise ConfigError(unknown)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(in_terms_of_keys(str(error))) from error


def _unknown_fields(raw: Any, kind: inspect.Type, noun: str, where: str) -> Iterator[str]:
    match kind:
        case inspect.StructType(fields=fields, tag=tag, tag_field=tag_field) if isinstance(raw, dict):
            if tag_field is not None and raw.get(tag_field) != tag:
                return  # another type of a union, or an error of the conversion
            known = {field.encode_name: field.type for field in fields}
            names = [*known, *([tag_field] if tag_field is not None else [])]
            for key, value in raw.items():
                if key in known:
                    yield from _unknown_fields(value, known[key], noun, f"{where}.{key}".removeprefix("."))
                elif key != tag_field:
                    yield f"{where}: {unknown_name(noun, str(key), names)}".removeprefix(": ")
        case inspect.VarTupleType(item_type=item) if isinstance(raw, list):
            for at, value in enumerate(raw):
                yield from _unknown_fields(value, item, noun, f"{where}[{at}]")
        case inspect.UnionType(types=kinds):
            for one in kinds:
                yield from _unknown_fields(raw, one, noun, where)


def _range(least: float | None, most: float | None) -> str:
    if most is None:
        return "" if least is None else f" of at least {least:.15g}"
    return f" from {least or 0:.15g} to {most:.15g}"
