"""Chat templates that Python packages contain: those of vLLM, TRL, Axolotl and llama.cpp.

The packages are downloaded once. Only their templates are kept, in `.tools`, which git ignores.
"""

import importlib.util
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.certificates import original_environment

ROOT = Path(__file__).parents[2]
PACKAGES = ("axolotl==0.19.0", "llama-cpp-python==0.3.36", "trl==1.16.0")
FOLDER = ROOT / ".tools" / "chat-templates"
DOWNLOAD_S = 240  # 80 MB


def templates() -> dict[str, str]:
    """Return the templates by package and name. Without a network, skip the test or let it fail as CI demands."""
    folder = FOLDER / "_".join(PACKAGES)
    if not folder.is_dir():
        try:
            _download(folder)
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or b""
            reason = f"cannot download {', '.join(PACKAGES)}: {error} {output.decode(errors='replace')}"
            if os.environ.get("FOREBAY_REQUIRE_PARTS"):
                pytest.fail(reason)
            pytest.skip(reason)
    found = {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.jinja"))}
    vllm = importlib.util.find_spec("vllm")
    for path in sorted(Path(vllm.submodule_search_locations[0]).rglob("*.jinja")) if vllm else ():  # type: ignore[index]
        found[f"vllm/{path.name}"] = path.read_text()
    return found


def _download(folder: Path) -> None:
    uv = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=FOLDER) as scratch:
        options = ["--quiet", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", scratch]
        command = [uv, "tool", "run", "--quiet", "pip", "download", *options, *PACKAGES]
        subprocess.run(command, check=True, timeout=DOWNLOAD_S, capture_output=True, env=original_environment())
        kept = Path(scratch) / "kept"
        for archive in sorted(Path(scratch).iterdir()):
            for name, content in _members(archive):
                path = kept / archive.name.partition("-")[0] / Path(name).name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        kept.rename(folder)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each template of a wheel or a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if name.endswith(".jinja"))
        return
    with tarfile.open(archive) as source:
        for member in source:
            if member.isfile() and member.name.endswith(".jinja") and (content := source.extractfile(member)):
                yield member.name, content.read()
