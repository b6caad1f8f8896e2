"""Checks that the disk has room for `.venv-engines`: exit code 1 and what is short, where it has not."""

import shutil
import sys
from pathlib import Path

NEEDED_GB = 8.0  # building it took 6.4 GB, cache included; the tests want room for logs, too


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there already."""
    return path if path.exists() else existing(path.parent)


def short(paths: list[Path], needed_gb: float = NEEDED_GB) -> list[str]:
    """What each file system under one of these paths has too little of, in words; nothing where all have enough.

    The cache and the environment share their files where they lie on one file system, and are copies otherwise.
    """
    systems = {existing(path).stat().st_dev: path for path in reversed(paths)}
    return [
        f"{path.absolute()}: {free_gb:.1f} GB are free, and {needed_gb:g} GB are needed"
        for path in systems.values()
        if (free_gb := shutil.disk_usage(existing(path)).free / 1e9) < needed_gb
    ]


if __name__ == "__main__":
    faults = short([Path(argument) for argument in sys.argv[1:]])
    for fault in faults:
        sys.stderr.write(f"setup-engines: too little disk at {fault}\n")
    sys.exit(bool(faults))
