"""The commands of docs/tutorial.md, run in order in one shell as a reader runs them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.local import free_ports

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorial.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TIMEOUT_S = 900  # less than a minute on an idle machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 30)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield an empty folder, and kill a server that a failed run left in it."""
    yield tmp_path
    pid = tmp_path / "up.pid"
    if pid.exists():
        subprocess.run(["kill", "-9", pid.read_text().strip()], check=False, capture_output=True)


def test_the_commands_of_the_tutorial_print_the_documented_output(folder: Path) -> None:
    port = free_ports(1)
    blocks = [block.replace("8000", str(port)) for block in BLOCK.findall(PAGE.read_text())]
    script = "\n".join(f"echo '== {number}'\n{block}" for number, block in enumerate(blocks))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    shown = dict(enumerate(re.split(r"^== \d+\n", done.stdout, flags=re.MULTILINE)[1:]))
    assert "60 requests completed, 0 failed" in shown[1]
    assert '"cached_tokens":896' in shown[2]
    assert "14 less to prefill" in " ".join(shown[3].split())
    assert "attempt 2" in shown[6]
    assert "400 output tokens" in shown[6]
    assert re.search(r"decisions\s+64, verified 64", shown[7]), "60 of the trace, 3 by curl, one of them twice"
    assert "request.routed tutorial-2" in shown[8]
    assert shown[9].count("verified 64") == 3
    assert "round-robin" in shown[10]
    reuse = dict(re.findall(r"^\s+(kv|round-robin)\s+\d+\s+([\d.]+)", shown[11], re.MULTILINE))
    assert float(reuse["kv"]) > float(reuse["round-robin"])
