"""Check that the disk has room for an environment with an engine; exit with code 1 and the missing space otherwise."""

import shutil
import sys
from pathlib import Path

NEEDED_GB = 8.0  # builds took up to 6.4 GB including the cache; the tests need room for logs too


def existing(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    return path if path.exists() else existing(path.parent)


def short(paths: list[Path], needed_gb: float = NEEDED_GB) -> list[str]:
    """Return a line for each file system of these paths with too little free space.

    The cache and the environment share files on one file system, and are copies on different ones.
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
        sys.stderr.write(f"setup: too little disk at {fault}\n")
    sys.exit(bool(faults))
