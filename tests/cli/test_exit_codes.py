"""Every kind of bad input ends a command with exit code 2, an error on stderr and no output."""

from pathlib import Path

import pytest

from tests.cli.in_process import forebay

RECORDING = "tests/logs/kv.rec"
TRAFFIC = "synthetic:requests=2"
BAD = [
    "up --port 0",
    "up --log nowhere/x.db",
    "up --log README.md",
    "up --engine nope",
    "up --engine nope.py:X",
    "up --model ./nowhere",
    "up --router-mode nope",
    "up --allow-policy nope.Nope",
    "up --taint mock-9:x",
    "up --config nowhere.toml",
    "ingress --kafka-config nowhere",
    "ingress --model nope",
    "router --allow-policy nope.Nope",
    "worker --role nope",
    "serve nope.py:X",
    "control power pause --url nonsense",
    "planner supervise nowhere",
    "produce nowhere",
    "trace nowhere",
    "shadow",
    "shadow nowhere --policy random",
    "simulate nowhere",
    "simulate synthetic:x=1",
    f"simulate {TRAFFIC} --policy nope",
    f"simulate {TRAFFIC} --slo x",
    f"simulate {TRAFFIC} --fleet nowhere",
    f"sweep {TRAFFIC} --set x=1",
    "fit nowhere --out profile.toml",
    "profile aiconfigurator some/model --engine nope",
    "record nowhere out.rec",
    "workload show nowhere",
    "workload convert nowhere --out out.jsonl",
    f"explain {RECORDING} nobody",
    f"replay at {RECORDING} --offset 999999",
    f"replay at {RECORDING} --time nope",
    "replay export nowhere out",
    f"replay diff {RECORDING}",
    f"replay diff {RECORDING} --policy nope",
    "verify README.md",
    f"verify {RECORDING} --group nope",
    "topics list README.md",
    f"topics tail {RECORDING} nope",
    "topics create --partitions groups=0",
    "model publish nowhere --kafka 127.0.0.1:1",
    "model alias prod --kafka 127.0.0.1:1",
    "model alias prod m --remove --kafka 127.0.0.1:1",
    "model alias prod m=0 --kafka 127.0.0.1:1",
    "model alias prod m=nan n --kafka 127.0.0.1:1",
    f"index {RECORDING} --worker nope",
    "config nope",
]


@pytest.mark.parametrize("line", BAD)
def test_bad_input_exits_2(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").symlink_to(Path("tests").absolute())
    (tmp_path / "README.md").write_text("# A page\n")
    monkeypatch.chdir(tmp_path)
    run = forebay(*line.split())
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.strip()
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "tests"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("up --engine vlm", "did you mean vllm?"),
        ("worker --role encoder", "did you mean encode or decode?"),
        ("up --router-mode round-robbin", "did you mean round-robin?"),
        ("profile aiconfigurator some/model --engine tensorrt", "did you mean tensorrt-llm?"),
        (f"topics tail {RECORDING} decision", "did you mean decisions?"),
    ],
)
def test_error_for_an_unknown_value_suggests_similar_values(line: str, expected: str) -> None:
    assert expected in forebay(*line.split()).stderr


def test_topics_are_listed_as_json() -> None:
    first = forebay("topics", "list", RECORDING, "--json").stdout.splitlines()[0]
    assert first == '{"topic":"control","partition":0,"first":0,"end":1}'
