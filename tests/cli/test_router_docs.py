"""docs/router-config.md lists every flag, and its example file and policy are valid."""

import re
import sys
from pathlib import Path

import pytest

from forebay.cli.policies.allowed import require_policy
from forebay.cli.policies.file import read_policy_file
from forebay.cli.policies.router_options import ROUTER_OPTIONS
from forebay.events.control import QueueClass

PAGE = (Path(__file__).resolve().parents[2] / "docs/router-config.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_every_flag_is_documented_with_its_default_and_field() -> None:
    rows = re.findall(
        r"^\| `--(\[no-\])?(router-[a-z-]+|active-[a-z-]+|load-aware|enforce-disagg|shared-cache-[a-z-]+|tier-credit)`"
        r" \| (.*?) \| (.*?) \|",
        PAGE,
        re.MULTILINE,
    )
    shown = {f"--{flag}": (default.strip("` "), field.strip("` ")) for _, flag, default, field in rows}
    assert set(shown) == {option.flag(name) for name, option in ROUTER_OPTIONS.items()}
    for name, option in ROUTER_OPTIONS.items():
        default, field = shown[option.flag(name)]
        assert (default.split(",")[0], field) == (option.default_text, option.path)


def test_the_example_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(block("yaml"))
    config = read_policy_file(path)
    assert config.queue.policy == "wspt"
    assert config.queue.classes[1] == QueueClass(uncached_tokens_min=16_384, quantum=4_096)


def test_the_example_policy_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "bounded.py").write_text(block("python"))
    require_policy("bounded.Bounded")
