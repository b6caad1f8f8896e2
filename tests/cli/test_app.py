"""The root command lists every command with its own help and loads only the command that runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.common.command_class import CliCommand
from tests.command_line import commands, options

runner = CliRunner()
# Modules that take long to import, and that no help text needs. `rich` also draws the tables of results.
HEAVY = {
    *("aiokafka", "duckdb", "fakeredis", "fastapi", "faust", "httpx", "huggingface_hub", "jinja2", "kubernetes"),
    *("numpy", "prometheus_client", "pydantic", "redis", "rich", "scipy", "sqlite3", "starlette"),
    *("tokenizers", "torch", "uvicorn", "uvloop", "yaml"),
}
# A process prints the help of every command, all from the same state, and then the modules that it has imported.
HELP_OF_ALL = """
import sys
from forebay.cli.app import app
from tests.command_line import commands

app(["--help"], standalone_mode=False)
for path, _ in commands():
    app([*path, "--help"], standalone_mode=False)
print(*sys.modules, file=sys.stderr)
"""


def test_every_command_is_listed_with_the_first_line_of_its_help() -> None:
    lines = {" ".join(path): (command.help or "").partition("\n")[0] for path, command in commands()}
    for group in {path.rpartition(" ")[0] for path in lines}:
        shown = " ".join(runner.invoke(app, [*group.split(), "--help"]).output.split())
        for path, line in lines.items():
            if path.rpartition(" ")[0] == group:
                assert f"{path.rpartition(' ')[2]} {line}" in shown.replace("- ", "-"), path


def test_every_command_shows_all_of_its_options() -> None:
    for path, command in commands():
        wanted = "--help-all" if isinstance(command, CliCommand) and command.basic else "--help"
        shown = runner.invoke(app, [*path, wanted]).output
        for option in options(command):
            assert option.hidden or re.search(rf"(^|\s){option.opts[-1]}\b", shown), (path, option.opts)


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
    assert HEAVY & set(ran.stderr.split()) == set()
    assert ran.stdout.count("Usage: ") == 1 + len(list(commands()))


def test_help_of_a_service_lists_options_in_sections() -> None:
    shown = runner.invoke(app, ["up", "--help-all"]).output
    headings = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[0] == "Options:"
    assert {"HTTP API:", "Log:", "Snapshots:", "Engine:", "Router:"} <= set(headings)


@pytest.mark.parametrize(
    ("command", "usage", "option"),
    [
        ("record", "[LOG] OUT", "--last DURATION"),
        ("restore", "RECORDING", "--replication N"),
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
    variables = {"_FOREBAY_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    assert runner.invoke(app, [], env=variables, prog_name="forebay").output.splitlines() == [f"plain,{expected}"]


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
