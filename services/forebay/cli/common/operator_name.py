"""Name of the operator, which the events of an operator contain."""

import getpass
from typing import Annotated

from forebay.cli.common.errors import fail
from forebay.cli.common.options import Option
from forebay.events.names import NAME_CHARS_MAX

OperatorOption = Annotated[str, Option(help="Name of the operator in the record. Default: name of the user.")]


def operator_name(operator: str) -> str:
    """Return the value of `--operator`, or the name of the user if it is empty. Exits if the name is invalid."""
    if not operator:
        try:
            operator = getpass.getuser()
        except (OSError, KeyError):  # a container without an entry for the user
            operator = "unknown"
    if len(operator) > NAME_CHARS_MAX or not operator.isprintable():
        fail(f"--operator: expected at most {NAME_CHARS_MAX} printable characters, got {operator[:64]!r}")
    return operator
