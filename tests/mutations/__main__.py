"""`python -m tests.mutations [TEXT]`: apply each mutation of mutations.toml and report which ones the tests kill.

A mutation brings a past or plausible bug back into the sources. It is applied to a copy of the repository, and its
tests run there; there are as many copies as cores. Exits 1 if a mutation survives, which means that a test is missing.
With TEXT, only mutations whose name or file contains it.
"""

import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations.mutation import Mutation, copy_sources, load, sources_of

PYTEST = ("-m", "pytest", "-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider")
TIMEOUT_S = 900
NOTHING_RAN = (2, 3, 4, 5)  # pytest's exit codes for no result
BROKER = threading.Lock()  # one broker at a time: each takes a gigabyte


def main(text: str) -> int:
    """Run the selected mutations and return the exit code."""
    # Those that need a broker begin, because they take longest.
    selected = sorted((one for one in load() if text in one.name or text in one.file), key=_needs_no_broker)
    jobs = min(os.cpu_count() or 1, len(selected)) or 1
    survivors = []
    with tempfile.TemporaryDirectory(prefix="forebay-mutations-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(copy_sources(Path(folder) / str(number)))
        verdicts = pool.map(lambda mutation: _verdict(mutation, copies), selected)
        for number, (mutation, (verdict, seconds)) in enumerate(zip(selected, verdicts, strict=True), 1):
            print(f"{number:3}/{len(selected)} {verdict:9} {seconds:5.0f} s  {mutation.name}", flush=True)
            if verdict != "killed":
                survivors.append(mutation)
    print(f"{len(selected)} mutations, {len(selected) - len(survivors)} killed")
    for mutation in survivors:
        print(f"not killed: {mutation.name} ({mutation.file}; {mutation.tests})")
    return 1 if survivors else 0


def _needs_no_broker(mutation: Mutation) -> bool:
    return "tests/integration" not in mutation.tests


def _verdict(mutation: Mutation, copies: "queue.SimpleQueue[Path]") -> tuple[str, float]:
    """Run the tests of a mutation in a free copy. Return the verdict and the seconds that it took."""
    copy = copies.get()
    path = copy / mutation.file
    original = path.read_text()
    path.write_text(original.replace(mutation.old, mutation.new))
    started = time.monotonic()
    try:
        if _needs_no_broker(mutation):
            verdict = _run(mutation, copy)
        else:
            with BROKER:
                verdict = _run(mutation, copy)
        return verdict, time.monotonic() - started
    finally:
        path.write_text(original)
        copies.put(copy)


def _run(mutation: Mutation, copy: Path) -> str:
    environment = os.environ | {
        "PYTHONPATH": sources_of(copy),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / ".hypothesis"),
    }
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
