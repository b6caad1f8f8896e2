"""`python -m tests.mutations [TEXT]`: apply each mutation of mutations.toml and report which ones the tests kill.

A mutation brings a past or plausible bug back into the sources. It is applied to a copy of the repository, and its
tests run there. Exits 1 if a mutation survives, which means that a test is missing. With TEXT, only mutations whose
name or file contains it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutations.mutation import ROOT, Mutation, load

PYTEST = ("-m", "pytest", "-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider")
TIMEOUT_S = 900
NOTHING_RAN = (2, 3, 4, 5)  # pytest's exit codes for no result


def main(text: str) -> int:
    """Run the selected mutations and return the exit code."""
    selected = [one for one in load() if text in one.name or text in one.file]
    survivors = []
    with tempfile.TemporaryDirectory(prefix="forebay-mutations-") as folder:
        copy = Path(folder) / "forebay"
        _copy(copy)
        for number, mutation in enumerate(selected, 1):
            started = time.monotonic()
            verdict = _verdict(mutation, copy)
            seconds = time.monotonic() - started
            print(f"{number:3}/{len(selected)} {verdict:9} {seconds:5.0f} s  {mutation.name}", flush=True)
            if verdict != "killed":
                survivors.append(mutation)
    print(f"{len(selected)} mutations, {len(selected) - len(survivors)} killed")
    for mutation in survivors:
        print(f"not killed: {mutation.name} ({mutation.file}; {mutation.tests})")
    return 1 if survivors else 0


def _copy(target: Path) -> None:
    """Copy the files that git knows; built environments are linked."""
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


def _verdict(mutation: Mutation, copy: Path) -> str:
    path = copy / mutation.file
    original = path.read_text()
    path.write_text(original.replace(mutation.old, mutation.new))
    try:
        return _run(mutation, copy)
    finally:
        path.write_text(original)


def _run(mutation: Mutation, copy: Path) -> str:
    # The copy's packages come before the installed ones.
    sources = os.pathsep.join(str(copy / name) for name in ("schemas", "streams", "services"))
    environment = os.environ | {"PYTHONPATH": sources, "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / ".hypothesis")}
    arguments = [part.strip("'") for part in re.findall(r"'[^']*'|\S+", mutation.tests)]
    try:
        done = subprocess.run(
            [sys.executable, *PYTEST, *arguments],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "killed"  # a hang is noticed, by pytest-timeout at the latest
    if done.returncode == 0:
        return "SURVIVED"
    if done.returncode in NOTHING_RAN:
        return "NO TEST"
    return "killed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
