"""Invalid names end a command with one line and exit code 2 before it connects."""

from pathlib import Path

import pytest

from tests.cli.in_process import forebay

MODEL = "forebay-default"
OPTIONS = [
    ("worker", "--namespace", "../x"),
    ("worker", "--namespace", "a.work"),
    ("worker", "--worker-id", "a\nb"),
    ("worker", "--worker-id", "a b"),
    ("worker", "--pool", "a/b"),
    ("worker", "--pool", "p" * 250),
    ("worker", "--model-name", "../x"),
    ("worker", "--lora", MODEL),
    ("worker", "--lora", "../x"),
    ("ingress", "--namespace", "a\nb"),
    ("ingress", "--ingress-id", "a\nb"),
    ("ingress", "--model-name", " x"),
    ("ingress", "--lora", MODEL),
    ("router", "--namespace", ""),
    ("router", "--router-id", "a\0b"),
    ("topics", "--namespace", "a b"),
    ("topics", "--pool", "a/b"),
    ("up", "--model-name", "a\0b"),
    ("up", "--lora", MODEL),
]


@pytest.mark.parametrize(("command", "option", "name"), OPTIONS)
def test_an_option_rejects_an_invalid_name(command: str, option: str, name: str) -> None:
    nobody = ["--kafka", "127.0.0.1:1"] if command != "up" else []
    arguments = [command, *(["create"] if command == "topics" else []), *nobody, option, name]
    run = forebay(*arguments)
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert option in line
    assert " name " in line
    assert "cannot be used: " in line


def test_a_model_directory_with_an_invalid_model_name_is_rejected(tmp_path: Path) -> None:
    directory = tmp_path / "a\nb"
    directory.mkdir()
    run = forebay("up", "--model", str(directory))
    assert run.returncode == 2
    assert "--model-name" in run.stderr
