"""Read the file of `--router-policy-config` and `--policy-config`: fields of `RouterConfig` as YAML or JSON."""

from collections.abc import Iterator
from pathlib import Path

from forebay.cli.common.plain_file import kind_of, read_plain_file
from forebay.events.control import RouterConfig
from forebay.runtime.errors import ConfigError, prefixed
from forebay.simulate.field_descriptions import converted


def read_policy_file(path: Path) -> RouterConfig:
    """Read a router configuration from a policy file. Raises ConfigError, with file and field, if it is invalid."""
    raw = read_plain_file(path, "policy file")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected fields of the router configuration, got {kind_of(raw)}")
    with prefixed(path):
        return converted(raw, RouterConfig, "field")


def named_fields(path: Path) -> Iterator[str]:
    """Yield the path of each field in a valid policy file. Raises ConfigError for an unreadable file."""
    parts = [("", read_plain_file(path, "policy file"))]
    for where, part in parts:
        for key, value in part.items():
            if isinstance(value, dict):
                parts.append((f"{where}{key}.", value))
            else:
                yield f"{where}{key}"
