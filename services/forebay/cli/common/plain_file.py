"""Plain data out of the YAML and JSON files that people write for a command."""

from pathlib import Path
from typing import Any

import msgspec
import yaml

from forebay.ingress.errors import Unusable

FILE_BYTES_MAX = 1 << 20  # a thousand queue classes fit many times over; what is larger is another file
DEPTH_MAX = 16  # a policy is four deep, an engine's arguments hardly more


def read_plain_file(path: Path, what: str) -> Any:
    """Plain data from JSON, or from YAML where the name does not end in .json; `what` is such a file, for people.

    Raises Unusable, naming the file.
    """
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise Unusable(f"{path}: larger than {FILE_BYTES_MAX} bytes, which no {what} is")
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(content)
        _require_plain(path, content, what)
        return msgspec.yaml.decode(content)
    except (msgspec.DecodeError, yaml.YAMLError, ValueError) as error:  # of dates and numbers that there are not
        raise Unusable(f"{path}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise Unusable(f"{path}: {_too_deep(what)}") from None


def _require_plain(path: Path, content: bytes, what: str) -> None:
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
            raise Unusable(f"{path}: {_too_deep(what)}")


def _too_deep(what: str) -> str:
    return f"nested deeper than any {what} is"


def kind_of(raw: Any) -> str:
    """What plain data is, for people."""
    return {None: "nothing", list: "a list", dict: "a mapping"}.get(None if raw is None else type(raw), "one value")
