"""Names and sentences that the console's page repeats from the Python code."""

import json
import re
from pathlib import Path

from forebay.console.app import STATIC
from forebay.replay.scaling.decisions import OUTCOMES, REASONS


def texts(path: Path, constant: str) -> list[str]:
    """Return the keys and strings of a constant of a JavaScript module, in order."""
    found = re.search(rf"const {constant} = [\[{{](.*?)\n[\]}}];", path.read_text(), re.DOTALL)
    assert found is not None, f"{path.name} has no constant {constant}"
    parts = re.findall(r'^  (\w+):|"((?:[^"\\]|\\.)*)"', found[1], re.MULTILINE)
    return [key or json.loads(f'"{text}"') for key, text in parts]


def test_reasons_of_the_planner_have_the_same_sentences() -> None:
    shown = texts(STATIC / "js/views/scaling.js", "REASONS")
    assert dict(zip(shown[::2], shown[1::2], strict=True)) == REASONS


def test_outcomes_of_the_planner_have_the_same_sentences() -> None:
    shown = texts(STATIC / "js/views/scaling.js", "OUTCOMES")
    assert dict(zip(shown[::4], shown[3::4], strict=True)) == OUTCOMES
