"""Options of `forebay fit`. The code is imported when a command runs, so that --help does not wait for it."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.extras import require_extra
from forebay.cli.common.recording import GroupOption
from forebay.cli.policies.allowed import AllowPolicyOption
from forebay.cli.simulate.profile import OutOption


def fit(
    log: Annotated[Path, typer.Argument(help="A recording, or a log file of `forebay up`, which may be in use.")],
    out: OutOption = None,
    pool: Annotated[str, typer.Option(help="Fit the engines of this pool. Required if there are several pools.")] = "",
    group: GroupOption = "",
    allow_policy: AllowPolicyOption = None,
) -> None:
    """Fit an engine profile to the recorded times of engines.

    The profile is a file for `--engine-profile`. Errors of the fit are printed on stderr and written to the file.
    """
    require_extra("fit", "forebay fit", "numpy", "scipy")
    from forebay.cli.simulate.fit import run_fit  # noqa: PLC0415

    run_fit(log=log, out=out, pool=pool, group=group, allow_policy=allow_policy)
