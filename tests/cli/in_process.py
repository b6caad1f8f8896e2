"""`forebay …` in the process of the tests, which spares a start and all its imports.

For what a command says and how it ends. Each command is run as a process of its own at least once elsewhere.
"""

import subprocess

from typer.testing import CliRunner

from forebay.cli.app import app


def forebay(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As `tests.cli.up.forebay`; an exception that the command does not handle is raised."""
    run = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return subprocess.CompletedProcess(arguments, run.exit_code, run.stdout, run.stderr)
