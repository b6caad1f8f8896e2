"""The list of mutations: what each one changes, and which tests must fail."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutations.toml")


class Mutation(NamedTuple):
    """A change of one source file that brings a bug back.

    Attributes:
        name: The bug, in a few words.
        file: Path of the source file, from the repository's root.
        old: Text that occurs exactly once in the file.
        tests: Arguments of pytest; at least one of these tests must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


def load() -> list[Mutation]:
    """Return all mutations of mutations.toml."""
    return [Mutation(**entry) for entry in tomllib.loads(LIST.read_text())["mutation"]]


def copy_sources(target: Path) -> Path:
    """Copy the files that git knows to a folder, and return the folder. Built environments are linked."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in names.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for name in (".venv", ".kafka"):
        if (ROOT / name).exists():
            (target / name).symlink_to(ROOT / name)
    return target


def sources_of(copy: Path) -> str:
    """Return the PYTHONPATH with which the packages of a copy come before the installed ones."""
    return os.pathsep.join(str(copy / name) for name in ("schemas", "streams", "services"))
