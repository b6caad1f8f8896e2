"""Custom policies that a command may run: only policies that its options name, because a log is untrusted."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.common.terminal import own_stdout
from forebay.ingress.errors import Unusable

if TYPE_CHECKING:
    from forebay.core.routing.policies import CustomPolicies

ALLOW_POLICY = "--allow-policy"

AllowPolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        ALLOW_POLICY,
        metavar="MODULE.CLASS",
        help="Import and run this policy class if the log names it. Repeatable.",
    ),
]


def allowed_policies(allowed: Iterable[str] | None, modes: Iterable[str] = ()) -> "CustomPolicies":
    """Check and import the custom policies that the options of a command name.

    Args:
        allowed: values of `--allow-policy`.
        modes: router modes that other options name. The parsers of these options have checked them.

    Raises:
        Unusable: A value names no policy class, or its class is not deterministic.
    """
    # Imported here, because --help should not wait for the router.
    from forebay.cli.policies.check import require_policy  # noqa: PLC0415
    from forebay.core.routing.policies import BUILT_IN  # noqa: PLC0415
    from forebay.replay.load_policies import PolicyUnusable, load_policies  # noqa: PLC0415

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
