"""Commands that need an extra of forebay name it if its packages are missing."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from forebay.cli.common import extras
from tests.cli.in_process import forebay


@pytest.mark.parametrize(
    ("extra", "package", "arguments"),
    [
        ("router", "faust", ["router"]),
        ("fit", "numpy", ["fit", "run.db"]),
    ],
)
def test_a_missing_extra_is_named_in_one_line(
    extra: str, package: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [0]}
    (tmp_path / "load.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    run = forebay(*arguments)
    remedy = f"requires the package {package}; install it with: pip install 'forebay[{extra}]'\n"
    assert (run.returncode, run.stderr.endswith(remedy), run.stderr.count("\n")) == (2, True, 1), run.stderr


def test_a_package_that_replaced_itself_when_imported_is_not_missing() -> None:
    import_module("faust")
    extras.require_extra("router", "forebay router", "faust")
