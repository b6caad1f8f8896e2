"""Reader of YAML and JSON files that users write."""

from pathlib import Path
from typing import Any

import msgspec

from forebay.runtime.errors import ConfigError
from forebay.runtime.files import read_file

DEPTH_MAX = 16  # a policy file has four levels, engine arguments hardly more


def read_plain_file(path: Path, what: str) -> Any:
    """Decode a file (JSON if its name ends in .json, else YAML) of kind `what`. Raises ConfigError if this fails."""
    import yaml  # noqa: PLC0415 - takes 40 ms, which most commands would wait for in vain

    content = read_file(path, what)
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(content)
        _require_plain(path, content, what)
        return msgspec.yaml.decode(content)
    except (msgspec.DecodeError, yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or number
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: {_too_deep(what)}") from None


def _require_plain(path: Path, content: bytes, what: str) -> None:
    """Reject aliases, which can expand to gigabytes, and nesting that would overflow the parser's stack."""
    import yaml  # noqa: PLC0415 - as above

    depth = 0
    for event in yaml.parse(content, Loader=yaml.CSafeLoader):
        match event:
            case yaml.AliasEvent():
                raise ConfigError(f"{path}: YAML aliases are not supported, got *{event.anchor}; repeat the value")
            case yaml.CollectionStartEvent():
                depth += 1
            case yaml.CollectionEndEvent():
                depth -= 1
        if depth > DEPTH_MAX:
            raise ConfigError(f"{path}: {_too_deep(what)}")


def _too_deep(what: str) -> str:
    return f"the {what} has more than {DEPTH_MAX} levels"


def kind_of(raw: Any) -> str:
    """Return the name of the type of decoded data, for error messages."""
    return {None: "nothing", list: "a list", dict: "a mapping"}.get(None if raw is None else type(raw), "one value")
