"""Commands import only the policies named by `--allow-policy`, whatever the log names."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.policies.allowed import require_policy
from forebay.cli.policies.router_options import RouterOptions
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.ingress.errors import Unusable
from tests.cli.in_process import forebay
from tests.core.worlds import PROMPTS, request
from tests.replay.recorder import Recorder

MODE = "marked.Last"
SOURCE = """
from pathlib import Path
Path("imported").touch()

class Last:
    def decide(self, world, request):
        return len(world.candidates) - 1
"""
READING = [
    ("verify", "LOG"),
    ("explain", "LOG", "r0"),
    ("replay", "at", "LOG"),
    ("replay", "diff", "LOG", "--policy", "kv"),
    ("record", "LOG", "out.rec"),
    ("record", "LOG", "out.rec", "--anonymize"),
    ("index", "LOG"),
    ("simulate", "--against", "LOG"),
    ("fit", "LOG"),
    ("shadow", "LOG", "--policy", "kv"),
]


class Last:
    """Policy of the recorded owner: selects the last candidate."""

    def decide(self, world: Any, request: Any) -> int:
        return len(world.candidates) - 1


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a log whose owner ran a custom policy, in a directory with a module of the same name."""
    (tmp_path / "marked.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(Recorder({MODE: Last}))
    return "log.db"


def write(made: Recorder) -> None:
    made.fleet("a", "b", mode=MODE)
    for number in range(3):
        made("requests", request(f"r{number}", PROMPTS[number]))
        if made.world.requests.get(f"r{number}") is not None:
            made.progress(f"r{number}", FirstTokenEmitted)
            made.progress(f"r{number}", RequestFinished, finish_reason="stop", output_tokens=2)

    async def written() -> None:
        (await made.log(Path("log.db"))).close()

    asyncio.run(written())


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_a_policy_named_only_by_the_log_is_not_imported(log: str, command: tuple[str, ...]) -> None:
    run = forebay(*(log if argument == "LOG" else argument for argument in command))
    assert run.returncode == 2
    assert f"policy {MODE}" in run.stderr
    assert f"pass --allow-policy {MODE}" in run.stderr
    assert not Path("imported").exists()
    assert not Path("out.rec").exists() or "--anonymize" not in command


@pytest.mark.parametrize("command", READING[:7], ids=" ".join)
def test_an_allowed_policy_is_run(log: str, command: tuple[str, ...]) -> None:
    arguments = [log if argument == "LOG" else argument for argument in command]
    run = forebay(*arguments, "--allow-policy", MODE)
    assert (run.returncode, run.stderr) == (0, "")
    assert Path("imported").exists()


def test_every_decision_of_an_allowed_policy_is_verified(log: str) -> None:
    report = json.loads(forebay("verify", log, "--allow-policy", MODE, "--json").stdout)
    assert (report["decisions"], report["verified"], report["divergence"]) == (3, 3, None)


def test_rejections_by_an_owner_without_the_policy_need_no_option(log: str) -> None:
    Path(log).unlink()
    write(Recorder())
    report = json.loads(forebay("verify", log, "--json").stdout)
    assert (report["decisions"], report["verified"]) == (3, 3)
    assert f"the policy {MODE} is not allowed on this router" in forebay("explain", log, "r0").stdout
    allowed = json.loads(forebay("verify", log, "--allow-policy", MODE, "--json").stdout)
    assert allowed["verified"] == 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("kv", "--allow-policy kv: the policy is built in and always allowed"),
        ("nowhere.Policy", "--allow-policy nowhere.Policy: the policy nowhere.Policy cannot be imported"),
        ("fastest", "--allow-policy fastest: unknown router mode 'fastest'"),
    ],
)
def test_an_unusable_policy_is_rejected(log: str, path: str, message: str) -> None:
    run = forebay("verify", log, "--allow-policy", path)
    assert run.returncode == 2
    assert message in run.stderr


CUSTOM = """
import queue

queue.Queue  # of the standard library, although the folder has a module of this name

class Policy:
    def decide(self, world, request):
        return 0
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder from which policies are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "custom", raising=False)
    (tmp_path / "custom.py").write_text(CUSTOM)
    (tmp_path / "queue.py").write_text("raise RuntimeError('the wrong one')")
    (tmp_path / "broken.py").write_text("class Policy")
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("mode", ["kv", "power-of-two", "custom.Policy"])
def test_a_built_in_mode_and_a_class_of_the_folder_are_accepted(mode: str) -> None:
    require_policy(mode)
    assert RouterOptions(router_mode=mode).config().mode == mode


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("custom.Other", "custom.Other is not a class with a method `decide(world, request)`"),
        ("custom.queue", "custom.queue is not a class"),
        ("broken.Policy", "cannot be imported: SyntaxError"),
        (f"mine.{'P' * 300}", "has 305 characters; maximum 256"),
    ],
)
def test_an_unusable_class_is_rejected_before_the_command_starts(path: str, message: str) -> None:
    with pytest.raises(Unusable) as refusal:
        require_policy(path)
    assert message in str(refusal.value)
    for command in (["up"], ["router", "--kafka", "127.0.0.1:1"]):
        run = forebay(*command, "--router-mode", path)
        assert (run.returncode, run.stdout) == (2, "")
        assert run.stderr == f"forebay: --router-mode: {refusal.value}\n"
