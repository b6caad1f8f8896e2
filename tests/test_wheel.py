"""The wheel: its metadata, and an installation without the repository."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from readme_renderer.markdown import render

from forebay.runtime.errors import install_command
from tests.certificates import original_environment
from tests.cli.up import Up

ROOT = Path(__file__).parents[1]
OPTIONAL = {"faust-streaming", "kubernetes", "numpy", "scipy", "torch"}  # packages of extras


def ran(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    inherited = original_environment().items()
    environment = {name: value for name, value in inherited if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def output(*command: str | Path, cwd: Path = ROOT) -> str:
    run = ran(*command, cwd=cwd)
    assert run.returncode == 0, run.stderr
    return run.stdout


def installed(tmp_path: Path) -> Path:
    """Build the wheel and install it without extras. Return the folder of the new environment's programs."""
    uv = shutil.which("uv") or ROOT / ".tools/bin/uv"
    output(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    output(uv, "venv", "--python", sys.executable, tmp_path / "clean")
    programs = tmp_path / "clean/bin"
    install = ("pip", "install", "--python", programs / "python", "--constraints", "requirements/base.txt", wheel)
    if ran(uv, "--offline", *install).returncode != 0:  # `make setup` has cached the packages, if it ran here
        output(uv, *install)
    packages = json.loads(output(uv, "pip", "list", "--format", "json", "--python", programs / "python"))
    assert OPTIONAL.isdisjoint(package["name"] for package in packages)
    return programs


def test_metadata_is_complete_and_the_description_has_no_relative_links() -> None:
    metadata = json.loads(output(sys.executable, "-m", "hatchling", "metadata"))
    assert metadata["authors"]
    assert {"Homepage", "Documentation", "Changelog"} <= metadata["urls"].keys()
    description = metadata["readme"]
    assert description["content-type"] == "text/markdown"
    page = render(description["text"])
    assert page is not None
    targets = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_installed_wheel_serves_from_another_folder_and_names_missing_extras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = installed(tmp_path)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    assert "forebay control drain" in output(programs / "forebay", "control", "drain", "--help", cwd=folder)
    row = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [0]}
    (folder / "load.jsonl").write_text(json.dumps(row) + "\n")
    for extra, package, arguments in (("indexer", "faust", ["indexer"]), ("fit", "numpy", ["fit", "run.db"])):
        run = ran(programs / "forebay", *arguments, cwd=folder)
        remedy = f"requires the package {package}; install it with: {install_command(extra)}\n"
        assert (run.returncode, run.stderr.endswith(remedy), run.stderr.count("\n")) == (2, True, 1), run.stderr
    without_kafka = ran(programs / "forebay", "worker", "--kafka", "127.0.0.1:9", cwd=folder)
    assert "Kafka at 127.0.0.1:9 cannot be used" in without_kafka.stderr, "a worker with a mock engine needs no extra"
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    up = Up(program=[str(programs / "forebay")])
    try:
        up.wait_ready()
        completion = up.client().chat.completions.create(
            model="forebay-default", max_tokens=4, messages=[{"role": "user", "content": "Hello"}]
        )
        assert completion.usage is not None
        assert (completion.usage.completion_tokens, completion.choices[0].finish_reason) == (4, "length")
    finally:
        code = up.end(signal.SIGTERM)
    assert code == 0
