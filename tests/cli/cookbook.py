"""The commands of docs/cookbook.md and their output. `python -m tests.cli.cookbook` updates the output on the page.

The `sh` blocks of a section are run in order in one folder. A `text` block after an `sh` block is its output. The files
of the first section are available to all sections. `bash` blocks are not run, because they need something outside the
repository, and their output is not updated.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/cookbook.md"
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
BLOCK = re.compile(r"^```sh\n(?P<command>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE)
COLUMNS = "110"  # width of a page without scrolling
COMMAND_TIMEOUT_S = 240  # the longest takes ten seconds on an idle machine


class Step(NamedTuple):
    """One command block. `output` is None if the page shows no output."""

    command: str
    output: str | None


class Recipe(NamedTuple):
    """The command blocks of one section."""

    title: str
    steps: list[Step]


def recipes(page: str) -> list[Recipe]:
    _, *parts = SECTION.split(page)
    found = [
        Recipe(title, [Step(block["command"], block["output"]) for block in BLOCK.finditer(text)])
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    return [recipe for recipe in found if recipe.steps]


@contextmanager
def folder_of(parent: Path, given: Path | None = None) -> Iterator[Path]:
    """Create a folder for a recipe, with the repository's tests and the files of `given`."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        for path in (ROOT / "tests", *(given.iterdir() if given else ())):
            if not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
        yield folder


def run(recipe: Recipe, folder: Path) -> list[str]:
    """Return the stdout of each step, without trailing blanks."""
    return [_printed(step.command, folder) for step in recipe.steps]


def _printed(command: str, folder: Path) -> str:
    bin_folder = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "COLUMNS": COLUMNS, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode} of\n{command}\n{done.stdout}\n{done.stderr}"
    lines = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines.strip("\n") + "\n")


def renewed(page: str) -> str:
    """Return the page with the current output of its commands."""
    first, *others = recipes(page)
    with tempfile.TemporaryDirectory() as name, folder_of(Path(name)) as given:
        for recipe in (first, *others):
            print(recipe.title, file=sys.stderr)
            with folder_of(Path(name), None if recipe is first else given) as folder:
                outputs = run(recipe, given if recipe is first else folder)
            for step, output in zip(recipe.steps, outputs, strict=True):
                if step.output is not None:
                    before = f"```sh\n{step.command}```\n\n```text\n"
                    page = page.replace(f"{before}{step.output}```", f"{before}{output}```")
    return page


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
