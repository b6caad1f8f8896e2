"""docs/extending.md names modules, files and members that exist, and its policy is accepted."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from forebay.cli.policies.allowed import require_policy

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
DOTTED = sorted(set(re.findall(r"`(forebay(?:\.\w+)+)`", PAGE)))
FILES = sorted(set(re.findall(r"`((?:docs|schemas|services|streams|tests)/[\w./-]+)`", PAGE)))


@pytest.mark.parametrize("name", DOTTED)
def test_a_named_module_or_member_exists(name: str) -> None:
    try:
        import_module(name)
    except ModuleNotFoundError:
        module, _, member = name.rpartition(".")
        assert hasattr(import_module(module), member)


@pytest.mark.parametrize("path", FILES)
def test_a_named_file_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(
    "member",
    [
        "forebay.core.routing.policies.BUILT_IN",
        "forebay.replay.explain.explanation.SelectionReason",
        "forebay.replay.explain.decisions.BY_LOAD_OR_TURN",
        "forebay.cli.simulate.sweep_axes.BLIND_MODES",
        "forebay.simulate.rank.needs_reports",
        "forebay.cli.processes.engine_options.ADAPTERS",
        "forebay.events.progress.RequestProgress",
        "forebay.core.state.transitions.REPORTED",
        "forebay.core.state.transitions.TRANSITIONS",
        "forebay.core.state.transitions.RequestTransition",
        "forebay.workers.engine.EngineBatch",
        "forebay.workers.runtime.outbox.Outbox",
        "forebay.events.topics.FIXED_TOPICS",
        "forebay.events.topics.INPUTS",
        "forebay.core.step.InputEvent",
        "forebay.transport.kafka.topics.RETENTION_MS",
    ],
)
def test_a_member_that_the_page_tells_to_extend_exists(member: str) -> None:
    module, _, name = member.rpartition(".")
    assert f"`{name}`" in PAGE or f"`{name}." in PAGE
    assert hasattr(import_module(module), name)


def test_the_policy_of_the_page_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"```python\n(.*?class Spread.*?)```", PAGE, re.DOTALL)
    (tmp_path / "spread.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    require_policy("spread.Spread")
