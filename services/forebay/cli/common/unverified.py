"""Option `--allow`, and exit codes of commands whose replay had to skip checks of the recorded decisions."""

from collections.abc import Collection, Mapping
from typing import Any

import click

from forebay.cli.common.errors import USAGE, fail
from forebay.cli.common.options import Option
from forebay.events.names import unknown_name
from forebay.journal.checks import UNKNOWN_EVENTS, UNVERIFIED
from forebay.processes.notices import complain

DIVERGED = 1  # also the exit code if the replayed events contradict the journal


def allow_option(names: Collection[str]) -> Any:
    """Return the option `--allow`. Its values are `names`: keys of `UNVERIFIED`, whose checks may be skipped."""
    return Option(help=f"Check to skip: {', '.join(names)}. Repeatable.", metavar="NAME")


def allowed_of(given: Collection[str] | None, names: Collection[str]) -> frozenset[str]:
    """Return the values given for `--allow` as a set. A value that is not in `names` ends the command."""
    allowed = frozenset(given or ())
    if unknown := sorted(allowed.difference(names)):
        fail(f"--allow: {unknown_name('check', unknown[0], names)}")
    return allowed


def complaint(failed: Mapping[str, int], unknown_event: str = "") -> str:
    """Return the error of a verification that found no divergence but skipped checks.

    `failed` counts the skipped checks per name, for the names that --allow does not contain.
    """
    first = f" (the first: {unknown_event})" if unknown_event else ""
    parts = [f"{count} {name}{first if name == UNKNOWN_EVENTS else ''}" for name, count in failed.items()]
    ways = " ".join(f"--allow {name}" for name in failed)
    newer = "use the version that wrote it, or " if UNKNOWN_EVENTS in failed else ""
    return f"not verified: {', '.join(parts)}; {newer}accept it with {ways}"


def exit_code(failed: Mapping[str, int]) -> int:
    """Return the exit code of a verification that skipped checks: 2 if events were unknown (bad input), otherwise 1."""
    return USAGE if UNKNOWN_EVENTS in failed else DIVERGED


def tell_unverified(unverified: Mapping[str, int]) -> None:
    """Report skipped checks on stderr. If events were unknown, end the command, because the result may be wrong."""
    for name, count in unverified.items():
        complain(f"not verified: {count} {UNVERIFIED[name]}")
    if UNKNOWN_EVENTS in unverified:
        raise click.exceptions.Exit(USAGE)
