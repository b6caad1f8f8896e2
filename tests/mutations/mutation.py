"""The list of mutations: what each one changes, and which tests must fail."""

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
        new: Text that replaces it.
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
