"""Read the file of `--router-policy-config`: fields of `RouterConfig` as YAML or JSON."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from forebay.cli.common.plain_file import kind_of, read_plain_file
from forebay.events.control import RouterConfig
from forebay.ingress.errors import Unusable

AT = re.compile(r"(?P<what>.*) - at `\$\.?(?P<where>.*)`", re.DOTALL)


def read_policy_file(path: Path) -> RouterConfig:
    """Read a router configuration from a policy file. Raises Unusable, with file and field, if it is invalid."""
    raw = read_plain_file(path, "policy file")
    if not isinstance(raw, dict):
        raise Unusable(f"{path}: expected fields of the router configuration, got {kind_of(raw)}")
    unknown = next(unknown_field(raw, msgspec.inspect.type_info(RouterConfig)), None)
    if unknown is not None:
        where, fields = unknown
        raise Unusable(f"{path}: unknown field {where}; fields are: {', '.join(fields)}")
    try:
        return msgspec.convert(raw, RouterConfig)
    except msgspec.ValidationError as error:
        found = AT.fullmatch(str(error))
        text = f"{found['where']}: {found['what']}" if found else str(error)
        raise Unusable(f"{path}: {text}") from None


def named_fields(path: Path, prefix: str) -> Iterator[str]:
    """Yield `prefix` plus the path of each field in a valid policy file. Raises Unusable for an unreadable file."""
    parts = [(prefix, read_plain_file(path, "policy file"))]
    for where, part in parts:
        for key, value in part.items():
            if isinstance(value, dict):
                parts.append((f"{where}{key}.", value))
            else:
                yield f"{where}{key}"


def unknown_field(raw: Any, info: msgspec.inspect.Type, where: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield the path of each unknown key in decoded data, and the known keys. `where` is the path of the data.

    Decoding ignores unknown keys, but in a file they are typing errors.
    """
    match info:
        case msgspec.inspect.StructType(fields=fields) if isinstance(raw, dict):
            known = {field.encode_name: field.type for field in fields}
            for key, value in raw.items():
                if key not in known:
                    yield f"{where}{key}", list(known)
                else:
                    yield from unknown_field(value, known[key], f"{where}{key}.")
        case msgspec.inspect.VarTupleType(item_type=item) if isinstance(raw, list):
            for at, value in enumerate(raw):
                yield from unknown_field(value, item, f"{where.removesuffix('.')}[{at}].")
