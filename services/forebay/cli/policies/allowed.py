"""Custom policies that a command may run: only policies that its options name, because a log is untrusted."""

from collections.abc import Iterable
from typing import Annotated

import typer

from forebay.cli.common.terminal import own_stdout
from forebay.cli.policies.check import require_policy
from forebay.core.routing.policies import BUILT_IN, CustomPolicies
from forebay.ingress.errors import Unusable
from forebay.replay.load_policies import PolicyUnusable, load_policies

ALLOW_POLICY = "--allow-policy"

AllowPolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        ALLOW_POLICY,
        metavar="MODULE.CLASS",
        help="Import and run this policy class if the log names it. Repeatable.",
    ),
]


def allowed_policies(allowed: Iterable[str] | None, modes: Iterable[str] = ()) -> CustomPolicies:
    """Check and import the custom policies that the options of a command name.

    Args:
        allowed: values of `--allow-policy`.
        modes: router modes that other options name. The parsers of these options have checked them.

    Raises:
        Unusable: A value names no policy class, or its class is not deterministic.
    """
    wanted = sorted(set(allowed or ()))
    for mode in wanted:
        if mode in BUILT_IN:
            raise Unusable(f"{ALLOW_POLICY} {mode}: the policy is built in and always allowed; omit the option")
        try:
            require_policy(mode)
        except Unusable as error:
            raise Unusable(f"{ALLOW_POLICY} {mode}: {error}") from None
    try:
        with own_stdout():  # what the imported module prints is no result of the command
            return load_policies([*wanted, *modes])
    except PolicyUnusable as error:
        raise Unusable(str(error)) from None
