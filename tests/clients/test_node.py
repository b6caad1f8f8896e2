"""Official clients for Node, which Deno runs. Each script is a test that uses `node:assert`."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
SCRIPTS = sorted(FOLDER.glob("*.test.ts"))
OPTIONS = [
    *("--config", str(FOLDER / "deno.json"), "--frozen", "--cached-only", "--no-check"),
    *("--allow-env", "--allow-net=127.0.0.1", "--allow-sys=hostname"),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_script_passes(url: str, script: Path) -> None:
    command = [str(ROOT / ".venv" / "bin" / "deno"), "test", *OPTIONS, str(script)]
    environment = {**os.environ, "DENO_DIR": str(ROOT / ".tools" / "deno"), "NO_COLOR": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
