"""The file of `--router-policy-config`: the fields of `RouterConfig` as YAML or JSON, nothing else in it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from forebay.events.control import RouterConfig
from forebay.ingress.errors import Unusable

FILE_BYTES_MAX = 1 << 20  # a thousand queue classes fit many times over; what is larger is another file
DEPTH_MAX = 16  # the configuration is four deep
TOO_DEEP = "nested deeper than any policy file is"
AT = re.compile(r"(?P<what>.*) - at `\$\.?(?P<where>.*)`", re.DOTALL)


def read_policy_file(path: Path) -> RouterConfig:
    """The configuration that a file describes. Raises Unusable, naming the file and the field."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise Unusable(f"{path}: larger than {FILE_BYTES_MAX} bytes, which no policy file is")
    raw = _decoded(path, content)
    if not isinstance(raw, dict):
        raise Unusable(f"{path}: must hold fields of the router's configuration, not {_kind(raw)}")
    unknown = next(unknown_field(raw, msgspec.inspect.type_info(RouterConfig)), None)
    if unknown is not None:
        where, fields = unknown
        raise Unusable(f"{path}: unknown field {where}; there are {', '.join(fields)}")
    try:
        return msgspec.convert(raw, RouterConfig)
    except msgspec.ValidationError as error:
        found = AT.fullmatch(str(error))
        text = f"{found['where']}: {found['what']}" if found else str(error)
        raise Unusable(f"{path}: {text}") from None


def _decoded(path: Path, content: bytes) -> Any:
    """Plain data from JSON, or from YAML where the name does not end in .json."""
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(content)
        _require_plain(path, content)
        return msgspec.yaml.decode(content)
    except (msgspec.DecodeError, yaml.YAMLError, ValueError) as error:  # of dates and numbers that there are not
        raise Unusable(f"{path}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise Unusable(f"{path}: {TOO_DEEP}") from None


def _require_plain(path: Path, content: bytes) -> None:
    """Refuse what a few lines do to a YAML parser: aliases unfold to gigabytes, and nesting ends its stack."""
    depth = 0
    for event in yaml.parse(content, Loader=yaml.CSafeLoader):
        match event:
            case yaml.AliasEvent():
                raise Unusable(f"{path}: aliases (*{event.anchor}) are not taken; write it out")
            case yaml.CollectionStartEvent():
                depth += 1
            case yaml.CollectionEndEvent():
                depth -= 1
        if depth > DEPTH_MAX:
            raise Unusable(f"{path}: {TOO_DEEP}")


def unknown_field(raw: Any, info: msgspec.inspect.Type, where: str = "") -> Iterator[tuple[str, list[str]]]:
    """Keys in plain data that no field has, with the fields that there are; `where` is the path of the data.

    The wire ignores them; a person mistyped them.
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


def _kind(raw: Any) -> str:
    return {None: "nothing", list: "a list"}.get(None if raw is None else type(raw), "one value")
