"""The root command lists every command with its own help and loads only the command that runs."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from forebay.cli.app import COMMANDS, app, load

runner = CliRunner()
# Modules that take long to import, and that no help text needs. `rich` also draws the tables of results.
HEAVY = {
    *("aiokafka", "duckdb", "fakeredis", "fastapi", "faust", "httpx", "huggingface_hub", "jinja2", "kubernetes"),
    *("numpy", "prometheus_client", "pydantic", "redis", "rich", "scipy", "sqlite3", "starlette"),
    *("tokenizers", "torch", "uvicorn", "uvloop", "yaml"),
}
# A process per command, forked to save most of its start, prints its name and the modules that it has imported.
HELP_OF_ALL = """
import os, sys
from forebay.cli.app import COMMANDS, app, load

def show(path, command):
    app([*path, "--help"], standalone_mode=False)
    for name, sub in getattr(command, "commands", {}).items():
        show([*path, name], sub)

for name in ("", *COMMANDS):
    if not os.fork():
        show([name] if name else [], load(name) if name else None)
        print(name or "forebay", *sys.modules, file=sys.stderr)
        sys.exit()
    assert os.wait()[1] == 0, name
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_listed_with_its_own_help(name: str) -> None:
    command = load(name)
    assert command.name == name
    assert command.get_short_help_str(1_000) == COMMANDS[name].help
    shown = runner.invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert COMMANDS[name].help.split()[0] in shown.output


def test_help_lists_all_commands_in_order() -> None:
    lines = runner.invoke(app, ["--help"]).output.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    begins = [line for line in lines if line[2] != " "]  # a long sentence continues on an indented line
    assert [line.split()[0] for line in begins] == list(COMMANDS)


def test_error_for_an_unknown_command_suggests_the_nearest() -> None:
    refused = runner.invoke(app, ["simulat"])
    assert refused.exit_code == 2
    assert "did you mean simulate?" in refused.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_full_output_device_is_reported_in_one_line(more: list[str]) -> None:
    command = [sys.executable, "-m", "forebay.cli", "workload", "show", "synthetic:requests=3", *more]
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr == "forebay: cannot write results: No space left on device\n"


def test_help_imports_no_client_and_no_server() -> None:
    ran = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    imported = {name: set(modules) for name, *modules in map(str.split, ran.stderr.splitlines())}
    assert {name: HEAVY & modules for name, modules in imported.items() if HEAVY & modules} == {}
    assert imported.keys() == {"forebay", *COMMANDS}
    assert ran.stdout.count("Usage: ") > len(COMMANDS)


def test_commands_are_functions_or_applications() -> None:
    assert {name for name in COMMANDS if isinstance(load(name), typer.core.TyperGroup)} == {
        "control",
        "model",
        "planner",
        "profile",
        "workload",
        "replay",
        "topics",
        "dead-letters",
        "tiers",
    }


def test_help_of_a_service_lists_options_in_sections() -> None:
    shown = runner.invoke(app, ["up", "--help"]).output
    headings = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[0] == "Options:"
    assert {"HTTP API:", "Log:", "Snapshots:", "Engine:", "Router:"} <= set(headings)


@pytest.mark.parametrize(
    ("command", "usage", "option"),
    [
        ("record", "[LOG] OUT", "--last DURATION"),
        ("worker", "", "--drain-s SECONDS"),
        ("simulate", "[WORKLOAD]", "--workers N"),
        ("status", "[LOG]", "--kafka HOST:PORT"),
    ],
)
def test_help_names_values_by_their_meaning(command: str, usage: str, option: str) -> None:
    shown = runner.invoke(app, [command, "--help"]).output
    assert shown.splitlines()[0] == f"Usage: forebay {command} [OPTIONS] {usage}".rstrip()
    assert f"  {option}  " in shown
    assert "range>" not in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [("forebay sim", "simulate"), ("forebay up --router-mo", "--router-mode"), ("forebay topics ta", "tail")],
)
def test_shell_completion_completes_commands_and_options(words: str, expected: str) -> None:
    count = len(words.split()) - 1
    variables = {"_FOREBAY_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    assert runner.invoke(app, [], env=variables, prog_name="forebay").output.splitlines() == [expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["up", "--prot", "1"], "unknown option '--prot'; did you mean --port?"),
        (["--helpx"], "unknown option '--helpx'; did you mean --help?"),
        (["control", "adaptors"], "unknown command 'adaptors'; did you mean adapters?"),
        (["topics", "lst"], "unknown command 'lst'; did you mean list?"),
        (["topics", "x"], "unknown command 'x'; commands are: create, list, tail"),
        (["topics", "list", "-x"], "unknown option '-x'; options are: --kafka, "),
        (["up", "--log-format", "jsn"], "unknown value 'jsn'; did you mean json?"),
    ],
)
def test_error_for_an_unknown_name_suggests_similar_names(arguments: list[str], expected: str) -> None:
    refused = runner.invoke(app, arguments)
    assert refused.exit_code == 2
    assert expected in refused.output
