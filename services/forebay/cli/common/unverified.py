"""What a derivation passed over: what of it a user allows, and how a command ends that may not pass over the rest."""

from collections.abc import Collection, Mapping
from typing import Any

import typer

from forebay.cli.common.errors import USAGE, complain, fail
from forebay.replay.verify.verify import UNVERIFIED
from forebay.replay.walk import UNKNOWN_EVENTS

DIVERGED = 1  # the exit code where the events do not lead to what the journal says, too


def allow_option(names: Collection[str]) -> Any:
    """The option `--allow` for these names of `UNVERIFIED`."""
    return typer.Option(help=f"What may stay unverified, several times: {', '.join(names)}.", metavar="NAME")


def allowed_of(given: Collection[str] | None, names: Collection[str]) -> frozenset[str]:
    """What was given to `--allow`. Ends the command for a name that there is not."""
    allowed = frozenset(given or ())
    if unknown := sorted(allowed.difference(names)):
        fail(f"--allow {unknown[0]}: there is no such name; there are {', '.join(names)}")
    return allowed


def complaint(failed: Mapping[str, int], unknown_event: str = "") -> str:
    """Why a verification failed that found no divergence, and what to do; `unknown_event` is the first of its kind."""
    first = f" (the first: {unknown_event})" if unknown_event else ""
    parts = [f"{count} {name}{first if name == UNKNOWN_EVENTS else ''}" for name, count in failed.items()]
    ways = " ".join(f"--allow {name}" for name in failed)
    newer = "use the version that wrote it, or " if UNKNOWN_EVENTS in failed else ""
    return f"not verified: {', '.join(parts)}; {newer}accept that by {ways}"


def exit_code(failed: Mapping[str, int]) -> int:
    """Of a verification that failed without a divergence: what this version cannot read is bad input."""
    return USAGE if UNKNOWN_EVENTS in failed else DIVERGED


def tell_unverified(unverified: Mapping[str, int]) -> None:
    """Say on stderr what was passed over on the way to what is shown. Ends the command if that may have mattered."""
    for name, count in unverified.items():
        complain(f"not verified: {count} {UNVERIFIED[name]}")
    if UNKNOWN_EVENTS in unverified:
        raise typer.Exit(USAGE)
