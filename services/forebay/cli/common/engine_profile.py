"""Output of an engine profile that was fitted to a recording or to measured points."""

from pathlib import Path

import click

from forebay.cli.common.errors import fail
from forebay.processes.notices import complain
from forebay.simulate.profiles.profile import Profile, write_linear


def write_fitted_profile(profile: Profile, notes: str, out: Path | None) -> None:
    """Write a profile with notes to a file, or to stdout if `out` is None. The notes also go to stderr."""
    complain(notes)
    text = write_linear(profile, notes)
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{out}: {error.strerror}")
