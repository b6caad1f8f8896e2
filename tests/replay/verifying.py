"""The command that verifies a recording, and its report."""

import subprocess
from pathlib import Path

from tests.cli.in_process import forebay


def verify(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return forebay("verify", str(path), *options)
