"""Parts of the TOML files of `forebay planner`: the file itself, its keys, and its tables `[[pools]]`."""

import tomllib
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from forebay.cli.common.plain_file import kind_of
from forebay.events.names import NameInvalid, require_name, unknown_name
from forebay.ingress.errors import Unusable
from forebay.simulate.field_descriptions import in_terms_of_keys, invalid_field

FILE_BYTES_MAX = 1 << 20


StructT = TypeVar("StructT", bound=msgspec.Struct)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file. Raises Unusable if it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise Unusable(f"the file is larger than {FILE_BYTES_MAX >> 20} MiB")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise Unusable(f"cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise Unusable(f"not TOML: {error}") from None


def pool_tables(raw: Mapping[str, Any], kind: type[StructT]) -> list[StructT]:
    """Return the tables `[[pools]]` as structs of a kind with the fields `group` and `pool`: at least one.

    Raises Unusable if there is no table, a table is invalid, or two tables have the same pool.
    """
    found = raw.get("pools")
    if not isinstance(found, list) or not found:
        raise Unusable("expected at least one table [[pools]]")
    tables: dict[tuple[str, str], StructT] = {}
    for number, table in enumerate(found):
        try:
            if not isinstance(table, dict):
                raise Unusable(f"expected a table, got {kind_of(table)}")
            made = convert(table, kind)
            names = require_name("model", table["group"]), require_name("pool", table["pool"])
        except (NameInvalid, Unusable) as error:
            raise Unusable(f"pools[{number}]: {error}") from None
        if names in tables:
            first = list(tables).index(names)
            raise Unusable(f"pools[{number}]: {'/'.join(names)} is also pools[{first}]; use each pool once")
        tables[names] = made
    return list(tables.values())


def convert(raw: Mapping[str, Any], kind: type[StructT]) -> StructT:
    """Return a table as a struct. Raises Unusable, with the key, if a key or a value is invalid."""
    require_known(raw, kind.__struct_fields__)
    try:
        made = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise Unusable(in_terms_of_keys(invalid_field(raw, kind, error))) from None
    for key in kind.__struct_fields__:
        value = getattr(made, key)
        if isinstance(value, float) and not isfinite(value):
            raise Unusable(f"{key}: must be a finite number, got {value}")
    return made


def require_known(raw: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise Unusable if a key is not one of `keys`."""
    for key in raw:
        if key not in keys:
            raise Unusable(unknown_name("key", key, keys))
