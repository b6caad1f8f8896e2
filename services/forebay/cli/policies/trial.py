"""A policy on trial, in a process of its own: `python -m forebay.cli.policies.trial module.Class [backwards]`.

It decides every case twice: by an instance for each, as the router does, and then, in the other order, by one
instance for all. What came of it goes to stdout; what the policy itself prints goes nowhere.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from forebay.cli.policies.cases import CASES, case
from forebay.cli.policies.guard import Forbidden, Guard
from forebay.core.routing.policies import Policy, PolicyUnusable, policy_class

FAULT_CHARS_MAX = 500  # a policy's own words may be of any length, and several lines
MADE_ANEW = "it is made anew for every decision, and what it may know is in its world and its request"


class Trial(msgspec.Struct, kw_only=True):
    """The positions chosen, by case number; or the fault that ended the trial."""

    chosen: list[int] = []
    fault: str = ""


class Fault(Exception):
    """Something no policy may do; the text says what."""


def hold_trial(path: str, *, backwards: bool) -> Trial:
    """Try a policy on all cases."""
    guard = Guard(path.partition(".")[0])
    order = range(CASES)[::-1] if backwards else range(CASES)
    try:
        with guard.watching():
            policy = policy_class(path)
        _require_nothing_found(guard)
        chosen = {number: _decided(guard, path, number, policy) for number in order}
        kept: list[Policy] = []
        for number in reversed(order):
            again = _decided(guard, path, number, lambda: _only(kept, policy))
            if again != chosen[number]:
                first = chosen[number]
                raise Fault(f"keeps state between decisions: case {number} chose {first}, later {again}; {MADE_ANEW}")
    except (Fault, Forbidden) as error:
        return Trial(fault=_line(f"{path} {guard.found or error}"))
    except PolicyUnusable as error:
        return Trial(fault=_line(f"{path} {guard.found}" if guard.found else str(error)))
    return Trial(chosen=[chosen[number] for number in range(CASES)])


def _only(kept: list[Policy], policy: type[Policy]) -> Policy:
    """The one instance, made at the first call."""
    if not kept:
        kept.append(policy())
    return kept[0]


def _decided(guard: Guard, path: str, number: int, make: Callable[[], Policy]) -> int:
    world, request = case(number, path)
    try:
        with guard.watching():
            at: object = make().decide(world, request)
    except Forbidden:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit and all: a policy must answer
        raise Fault(f"raised {type(error).__name__} in case {number}: {_shown(str, error)}") from None
    _require_nothing_found(guard)
    count = len(world.candidates)
    if type(at) is not int:
        raise Fault(
            f"returned {_shown(repr, at)} in case {number}: not an int, the position of one of {count} candidates"
        )
    if not 0 <= at < count:
        raise Fault(
            f"returned {_shown(repr, at)} of {count} candidates in case {number}: positions are 0 to {count - 1}"
        )
    as_given, asked = case(number, path)
    if (list(world.candidates), world.costs, request) != (list(as_given.candidates), as_given.costs, asked):
        raise Fault(f"changes what it was given in case {number}")
    return at


def _shown(words: Callable[[object], str], value: object) -> str:
    """A value that a policy made, which may not be able to say what it is: Python prints no number of 5,000 digits."""
    try:
        return words(value)
    except Exception:  # noqa: BLE001 - the policy's own code
        return f"something of type {type(value).__name__}"


def _line(text: str) -> str:
    """One line that a terminal can show."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return shown if len(shown) <= FAULT_CHARS_MAX else f"{shown[:FAULT_CHARS_MAX]}…"


def _require_nothing_found(guard: Guard) -> None:
    """Refuse calls that the policy itself caught."""
    if guard.found is not None:
        raise guard.found


def main() -> None:
    """Hold the trial that the arguments name."""
    path, *rest = sys.argv[1:]
    result = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    with Path(os.devnull).open("w") as nowhere, result:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
        result.write(msgspec.json.encode(hold_trial(path, backwards=bool(rest))))


if __name__ == "__main__":
    main()
