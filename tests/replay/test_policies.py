"""Importing the custom policies that a user allowed."""

from pathlib import Path

import pytest

from forebay.replay.policies import ERROR_CHARS_MAX, load_policies
from forebay.runtime.errors import ConfigError

SOURCE = """
class Last:
    def decide(self, world, request):
        return len(world.candidates) - 1

class Nothing:
    pass

value = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"mine_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / f"broken_{name}.py").write_text("1 / 0\n")
    (tmp_path / f"leaving_{name}.py").write_text("raise SystemExit('x' * 10_000)\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_only_custom_policies_are_imported(mine: str) -> None:
    found = load_policies(["kv", f"{mine}.Last", "direct"])
    assert [(path, found[path].__name__) for path in found] == [(f"{mine}.Last", "Last")]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("broken_{}.Any", "ZeroDivisionError"),
        ("leaving_{}.Any", "SystemExit"),
        ("nowhere.Any", "No module named 'nowhere'"),
        ("fastest", "neither a router mode (kv, round-robin"),
        ("{}.Nothing", "not a class with a method `decide"),
        ("{}.value", "not a class with a method `decide"),
        ("{}.absent", "not a class with a method `decide"),
    ],
)
def test_an_unusable_policy_is_named(mine: str, path: str, problem: str) -> None:
    with pytest.raises(ConfigError) as unusable:
        load_policies([path.format(mine)])
    assert problem in str(unusable.value)
    assert len(str(unusable.value)) <= ERROR_CHARS_MAX
