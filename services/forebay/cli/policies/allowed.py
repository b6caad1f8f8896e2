"""Custom policies that a command may run: only policies that its options name, because a log is untrusted."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from forebay.cli.common.options import Option
from forebay.cli.common.terminal import own_stdout
from forebay.events.names import unknown_name
from forebay.runtime.errors import ConfigError, prefixed

if TYPE_CHECKING:
    from forebay.core.routing.policies import CustomPolicies

ALLOW_POLICY = "--allow-policy"
PATH_CHARS_MAX = 256  # the maximum length of a router mode in an event

AllowPolicyOption = Annotated[
    list[str] | None,
    Option(
        ALLOW_POLICY, metavar="MODULE.CLASS", help="Import and run this policy class if the log names it. Repeatable."
    ),
]


def allowed_policies(allowed: Iterable[str] | None, modes: Iterable[str] = ()) -> "CustomPolicies":
    """Check and import the custom policies that `--allow-policy` and other options name.

    The parsers of the other options have checked `modes`. Raises ConfigError if a value names no policy class.
    """
    # Imported here, because --help should not wait for the router.
    from forebay.core.routing.policies import BUILT_IN  # noqa: PLC0415
    from forebay.replay.policies import load_policies  # noqa: PLC0415

    wanted = sorted(set(allowed or ()))
    for mode in wanted:
        if mode in BUILT_IN:
            raise ConfigError(f"{ALLOW_POLICY} {mode}: the policy is built in and always allowed; omit the option")
        with prefixed(f"{ALLOW_POLICY} {mode}"):
            require_policy(mode)
    with own_stdout():  # what the imported modules print is no result of the command
        return load_policies([*wanted, *modes])


def require_policy(mode: str) -> None:
    """Raise ConfigError unless a router mode is built in, or names a policy class that can be imported."""
    # Imported here, because --help should not wait for the router.
    from forebay.core.routing.policies import BUILT_IN  # noqa: PLC0415
    from forebay.replay.policies import load_policy  # noqa: PLC0415

    if mode in BUILT_IN:
        return
    if not all(part.isidentifier() for part in mode.split(".")) or "." not in mode:
        raise ConfigError(unknown_name("router mode", mode, (*BUILT_IN, "module.Class")))
    if len(mode) > PATH_CHARS_MAX:
        raise ConfigError(f"the path of a policy class has {len(mode)} characters; maximum {PATH_CHARS_MAX}")
    add_current_directory()
    with own_stdout():
        load_policy(mode)


def add_current_directory() -> None:
    """Append the current directory to `sys.path`, so that it hides neither installed modules nor PYTHONPATH."""
    current = str(Path.cwd())
    if current not in sys.path and "" not in sys.path:
        sys.path.append(current)
