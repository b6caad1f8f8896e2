"""Invalid names end a command with one line and exit code 2 before it connects. One concept has one option name."""

import re
from pathlib import Path

import pytest

from forebay.cli.common.options import Number
from tests.cli.in_process import forebay
from tests.command_line import commands, options

MODEL = "forebay-default"
OPTIONS = [
    ("worker", "--namespace", "../x"),
    ("worker", "--namespace", "a.work"),
    ("worker", "--id", "a\nb"),
    ("worker", "--id", "a b"),
    ("worker", "--pool", "a/b"),
    ("worker", "--pool", "p" * 250),
    ("worker", "--model-name", "../x"),
    ("worker", "--lora", MODEL),
    ("worker", "--lora", "../x"),
    ("ingress", "--namespace", "a\nb"),
    ("ingress", "--id", "a\nb"),
    ("ingress", "--model-name", " x"),
    ("ingress", "--lora", MODEL),
    ("router", "--namespace", ""),
    ("router", "--id", "a\0b"),
    ("topics", "--namespace", "a b"),
    ("topics", "--pool", "a/b"),
    ("up", "--model-name", "a\0b"),
    ("up", "--lora", MODEL),
]
CONCEPTS = {  # name of an option, and what its help says
    "--enforce-disagg": r"no prefill worker can compute its prompt",
    "--engine": r"^Engine\b[^.]*: .*sglang",
    "--engine-profile": r"^Engine profile",
    "--fleet": r"pools, kinds of workers",
    "--offset": r"\b[Oo]ffset\b",
    "--out": r"\b(to|[Pp]ath of) (this|the) file\b(?!.*HTML)",
    "--policy-config": r"^Policy file",
    "--pool": r"\b[Tt]his pool\b",
    "--report": r"\bHTML\b",
}


OPTIONS_OF_COMMANDS = [(" ".join(path), option) for path, command in commands() for option in options(command)]


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


def test_options_with_the_same_name_take_the_same_kind_of_value() -> None:
    kinds: dict[str, set[str]] = {}
    for command, option in OPTIONS_OF_COMMANDS:
        if not command.startswith("control policy"):  # its values may also be `none`
            kind = option.type.kind.__name__ if isinstance(option.type, Number) else option.type.name
            kinds.setdefault(option.opts[0], set()).add("text" if kind == "choice" else kind)
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}


def test_options_with_the_same_help_have_the_same_name() -> None:
    names: dict[str, set[str]] = {}
    for _, option in OPTIONS_OF_COMMANDS:
        names.setdefault(option.help or "", set()).add(option.opts[0])
    assert {text: found for text, found in names.items() if len(found) > 1} == {}


def test_the_help_of_every_repeatable_option_says_so() -> None:
    repeatable = [option.multiple for _, option in OPTIONS_OF_COMMANDS]
    assert [bool(re.search(r"\bRepeatable\b", option.help or "")) for _, option in OPTIONS_OF_COMMANDS] == repeatable


@pytest.mark.parametrize(("name", "concept"), CONCEPTS.items())
def test_every_option_of_a_concept_has_its_name(name: str, concept: str) -> None:
    found = {
        (command, option.opts[0]) for command, option in OPTIONS_OF_COMMANDS if re.search(concept, option.help or "")
    }
    assert found, "no help text matches"
    assert {one for one in found if one[1] != name} == set()
