"""`python -m tests.faults.planted [TEXT]`: check that the simulator finds each bug of planted.toml.

It has 1,000 seeds and 15 minutes per bug (on a quiet machine, 1,000 seeds take five). Each bug is put into a copy of
the repository, in which seeds are simulated from 0 on until one fails. With TEXT, only bugs whose name contains it.
Exits 1 if a bug is not found.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from tests.mutations.mutation import copy_sources, sources_of

LIST = Path(__file__).with_name("planted.toml")
SEEDS = 1_000
SECONDS = 900  # per bug


def main(text: str) -> int:
    """Search for the selected bugs and return the exit code."""
    missed = 0
    for bug in tomllib.loads(LIST.read_text())["bug"]:
        if text not in bug["name"]:
            continue
        began_s = time.monotonic()
        found = _search(bug)
        missed += not found
        print(
            f"{time.monotonic() - began_s:5.0f} s  {bug['name']} ({bug['origin']}): {found or 'NOT FOUND'}", flush=True
        )
    return 1 if missed else 0


def _search(bug: dict[str, str]) -> str:
    """Return the first failing seed and its violation; empty if no seed fails."""
    with tempfile.TemporaryDirectory(prefix="forebay-planted-") as folder:
        copy = copy_sources(Path(folder))
        path = copy / bug["file"]
        source = path.read_text()
        assert source.count(bug["old"]) == 1, f"{bug['name']}: its text must occur once in {bug['file']}"
        path.write_text(source.replace(bug["old"], bug["new"]))
        options = ["--first", "0", "--seeds", str(SEEDS), "--until-failed", "--seconds", str(SECONDS)]
        if depth := bug.get("depth", "log"):
            options += ["--depth", depth]
        done = subprocess.run(
            [sys.executable, "-m", "tests.faults", *options],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": sources_of(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    found = re.search(r"fuzz: (seed \d+: (?!no violation).*)", done.stdout)
    assert found is not None or done.returncode == 0, f"{done.returncode} {done.stdout[-300:]} {done.stderr}"
    return "" if found is None else found[1][:160]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
