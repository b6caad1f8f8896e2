"""Names that a user gives to workers, pools, adapters and labels."""

import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime

from forebay import runtime
from forebay.events.names import Kind, require_adapter, require_name
from forebay.runtime.errors import ConfigError, prefixed

NAME_CHARS_MAX = 256  # the maximum length of a name in an event


def names(flag: str, given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the values of a repeatable option. Raises ConfigError if a value is empty, too long or a duplicate."""
    for name in given or ():
        if not 1 <= len(name) <= NAME_CHARS_MAX:
            raise ConfigError(f"{flag} {name[:32]!r}: a name has 1 to {NAME_CHARS_MAX} characters, got {len(name)}")
    values = tuple(dict.fromkeys(given or ()))
    if len(values) < len(given or ()):
        twice = next(name for name in values if (given or ()).count(name) > 1)
        raise ConfigError(f"{flag} {twice}: the name appears twice; use each name once")
    return values


def named(flag: str, kind: Kind, name: str) -> str:
    """Return `name` if it is a valid name for its kind. Otherwise raise ConfigError with the option `flag`."""
    with prefixed(flag):
        return require_name(kind, name)


def adapters(loras: Sequence[str], model: str) -> tuple[str, ...]:
    """Return the names of the LoRA adapters of `model`. Raises ConfigError if a name is invalid."""
    with prefixed("--lora"):
        return tuple(require_adapter(name, model) for name in loras)


def incarnation() -> str:
    """Return an id that no other process has. It names this process, for the user of another one with the same name."""
    now = datetime.fromtimestamp(runtime.wall_us() // 1_000_000, UTC)
    where = f"process {os.getpid()} on {socket.gethostname()[:64]}"
    return f"{runtime.random_id()} of {where} since {now:%Y-%m-%d %H:%M:%SZ}"


def process_name() -> str:
    """Return the name of a process without an option `--id`: host name and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"
