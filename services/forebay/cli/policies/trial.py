"""One determinism test of a policy, run as a process: `python -m forebay.cli.policies.trial module.Class [backwards]`.

The policy decides every case twice: first with a new instance per case, as in the router, then in the opposite order
with one instance for all cases. The process writes a `Trial` as JSON to stdout, and discards what the policy prints.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from forebay.cli.policies.cases import CASES, case
from forebay.core.routing.policies import Policy
from forebay.replay.load_policies import PolicyUnusable, load_policy

FAULT_CHARS_MAX = 500  # the text of an exception raised by a policy may have any length and several lines
RULE = "a policy may use only its world and its request: no state, clock, randomness or file"


class Trial(msgspec.Struct, kw_only=True):
    """Result of one determinism test.

    Attributes:
        chosen: Position of the selected candidate for each case, by case number. Empty if the test failed.
        fault: Reason of the failure. Empty if the test passed.
    """

    chosen: list[int] = []
    fault: str = ""


class Fault(Exception):
    """A policy violated a rule. The message names the rule and the case."""


def run_trial(path: str, *, backwards: bool) -> Trial:
    """Run the determinism test of a policy on all cases.

    Args:
        path: Dotted path of the policy class.
        backwards: Run the cases in descending order.
    """
    order = range(CASES)[::-1] if backwards else range(CASES)
    try:
        policy = load_policy(path)
        chosen = {number: _decide(path, number, policy) for number in order}
        instances: list[Policy] = []
        for number in reversed(order):
            again = _decide(path, number, lambda: _reused(instances, policy))
            if again != chosen[number]:
                raise Fault(f"is not deterministic: case {number} chose {chosen[number]}, then {again}; {RULE}")
    except Fault as error:
        return Trial(fault=_one_line(f"{path} {error}"))
    except PolicyUnusable as error:
        return Trial(fault=_one_line(str(error)))
    return Trial(chosen=[chosen[number] for number in range(CASES)])


def _reused(instances: list[Policy], policy: type[Policy]) -> Policy:
    """Return the instance in `instances`; create it at the first call."""
    if not instances:
        instances.append(policy())
    return instances[0]


def _decide(path: str, number: int, make: Callable[[], Policy]) -> int:
    """Return the position that a policy selects in one case.

    Raises:
        Fault: The policy raised an exception, returned something other than a position, or changed its arguments.
    """
    world, request = case(number, path)
    try:
        position: object = make().decide(world, request)
    except BaseException as error:  # noqa: BLE001 - a policy that raises SystemExit makes no decision either
        raise Fault(f"raised {type(error).__name__} in case {number}: {_shown(str, error)}") from None
    count = len(world.candidates)
    if type(position) is not int:
        value = _shown(repr, position)
        raise Fault(f"returned {value} in case {number}; expected an int, the position of one of {count} candidates")
    if not 0 <= position < count:
        value = _shown(repr, position)
        raise Fault(f"returned {value} in case {number}; expected a position from 0 to {count - 1}")
    fresh_world, fresh_request = case(number, path)
    before = (list(fresh_world.candidates), fresh_world.costs, fresh_request)
    if (list(world.candidates), world.costs, request) != before:
        raise Fault(f"changed its world or its request in case {number}; a policy must not change its arguments")
    return position


def _shown(convert: Callable[[object], str], value: object) -> str:
    """Return a policy's value as text, or its type if the conversion fails (Python prints no int of 5,000 digits)."""
    try:
        return convert(value)
    except Exception:  # noqa: BLE001 - `convert` runs code of the policy
        return f"a value of type {type(value).__name__}"


def _one_line(text: str) -> str:
    """Replace characters that a terminal cannot print, and cut the text at FAULT_CHARS_MAX."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return shown if len(shown) <= FAULT_CHARS_MAX else f"{shown[:FAULT_CHARS_MAX]}…"


def main() -> None:
    """Run the test that the command-line arguments name."""
    path, *rest = sys.argv[1:]
    result = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    with Path(os.devnull).open("w") as devnull, result:
        os.dup2(devnull.fileno(), sys.stdout.fileno())
        os.dup2(devnull.fileno(), sys.stderr.fileno())
        result.write(msgspec.json.encode(run_trial(path, backwards=bool(rest))))


if __name__ == "__main__":
    main()
