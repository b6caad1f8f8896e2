"""The check of free disk space before the engines are installed."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.harness import free_disk

SCRIPT = Path(free_disk.__file__)


def test_a_shortage_is_reported_once_per_file_system(tmp_path: Path) -> None:
    needed_gb = shutil.disk_usage(tmp_path).total / 1e9 + 1
    (fault,) = free_disk.short([tmp_path / "venv", tmp_path / "cache"], needed_gb)
    assert fault.startswith(f"{tmp_path / 'venv'}: ")
    assert f"{needed_gb:g} GB are needed" in fault


def test_the_script_fails_with_a_message_on_a_full_disk(tmp_path: Path) -> None:
    total_gb = shutil.disk_usage(tmp_path).total / 1e9
    script = SCRIPT.read_text().replace(f"NEEDED_GB = {free_disk.NEEDED_GB}", f"NEEDED_GB = {total_gb + 1}")
    ran = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith(f"setup: too little disk at {tmp_path}: ")
