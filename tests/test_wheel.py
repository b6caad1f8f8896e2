"""The sdist and the wheel: metadata, files, and an installation without the repository."""

import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from readme_renderer.markdown import render

from forebay.runtime.errors import install_command
from tests.certificates import original_environment
from tests.cli.up import Up

ROOT = Path(__file__).parents[1]
OPTIONAL = {"faust-streaming", "kubernetes", "scipy", "torch"}  # packages of extras


def ran(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    inherited = original_environment().items()
    environment = {name: value for name, value in inherited if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def output(*command: str | Path, cwd: Path = ROOT) -> str:
    run = ran(*command, cwd=cwd)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    output(sys.executable, "-m", "hatchling", "build", "-d", folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def installed(wheel: Path, tmp_path: Path) -> Path:
    """Install the wheel without extras. Return the folder of the new environment's programs."""
    uv = shutil.which("uv") or ROOT / ".tools/bin/uv"
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
    assert all(metadata[key] for key in ("authors", "description", "keywords", "license", "requires-python"))
    assert {"Programming Language :: Python :: 3.11", "Typing :: Typed"} <= set(metadata["classifiers"])
    assert "urls" not in metadata, "nothing is published yet"
    description = metadata["readme"]
    assert description["content-type"] == "text/markdown"
    page = render(description["text"])
    assert page is not None
    targets = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert targets
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


@pytest.mark.slow  # builds the sdist, with all pictures
@pytest.mark.timeout(300)
def test_indexes_accept_sdist_and_wheel_and_their_files_are_complete(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    assert output(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *built).count("PASSED") == 2
    roots = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["dev-mode-dirs"]
    files = {
        path.relative_to(ROOT / root).as_posix()
        for root in roots
        for path in (ROOT / root / "forebay").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == files
    assert {"forebay/console/static/index.html", "forebay/events/py.typed"} < packed
    assert any(re.fullmatch(r"forebay/events/registry/.*\.json", name) for name in packed)
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert {*roots, "pyproject.toml", "README.md", "LICENSE"} < tops
    assert not [name for name in tops if name.startswith((".venv", ".tools", ".site"))]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_installed_wheel_serves_from_another_folder_and_names_missing_extras(
    built: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = installed(built[1], tmp_path)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    assert "forebay control drain" in output(programs / "forebay", "control", "drain", "--help", cwd=folder)
    row = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [0]}
    (folder / "load.jsonl").write_text(json.dumps(row) + "\n")
    for extra, package, arguments in (("indexer", "faust", ["indexer"]), ("fit", "scipy", ["fit", "run.db"])):
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
