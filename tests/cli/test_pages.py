"""Commands and examples of the documentation, run as a reader runs them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import httpx
import openai
import pytest

from forebay.cli.policies.allowed import require_policy
from tests.cli.cookbook import PAGE, Recipe, folder_of, recipes, run
from tests.cli.up import running
from tests.command_line import commands, options
from tests.harness.local import free_ports

pytestmark = pytest.mark.timeout(600)
FIRST, *OTHERS = recipes(PAGE.read_text())


@pytest.fixture(scope="module")
def shared_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with folder_of(tmp_path_factory.mktemp("cookbook")) as folder:
        prints_documented_output(FIRST, folder)
        yield folder


@pytest.mark.slow  # a minute of simulations; other tests cover the output of each command
@pytest.mark.parametrize("recipe", OTHERS, ids=[recipe.title for recipe in OTHERS])
def test_a_recipe_prints_the_output_on_the_page(shared_files: Path, tmp_path: Path, recipe: Recipe) -> None:
    with folder_of(tmp_path, shared_files) as folder:
        prints_documented_output(recipe, folder)


def prints_documented_output(recipe: Recipe, folder: Path) -> None:
    for step, printed in zip(recipe.steps, run(recipe, folder), strict=True):
        if step.output is not None:
            assert printed == step.output, f"{step.command}\npython -m tests.cli.cookbook writes the page anew"


ROOT = Path(__file__).resolve().parents[2]
EXTENDING = (ROOT / "docs" / "extending.md").read_text()
DOTTED = sorted(set(re.findall(r"`(forebay(?:\.\w+)+)`", EXTENDING)))
FILES = sorted(set(re.findall(r"`((?:docs|schemas|services|streams|tests)/[\w./-]+)`", EXTENDING)))


@pytest.mark.parametrize("name", DOTTED)
def test_a_named_module_or_member_exists(name: str) -> None:
    try:
        import_module(name)
    except ModuleNotFoundError:
        module, _, member = name.rpartition(".")
        assert hasattr(import_module(module), member)


COMMANDS = {
    path: {name for one in options(command) for name in (*one.opts, *one.secondary_opts)}
    for path, command in commands()
}
PLANNED = ("topics", "sizes")  # the example of docs/extending.md


def test_every_command_and_option_in_the_docs_exists() -> None:
    pages = [page.read_text() for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if page.stem != "CHANGELOG"]
    text = re.sub(r"\\\n *", " ", "\n".join(pages))
    lines = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines()
    lines += re.findall(r"`(forebay\s[^`]+)`", text)
    found = [line for one in lines if (line := re.match(r"(?:\.venv/bin/)?forebay\s+([a-z][^#;&>|]*)", one))]
    assert len(found) > 300
    for words in (one[1].split() for one in found):
        path = tuple(words[: 1 if (words[0],) in COMMANDS else 2])
        assert path == PLANNED or any(path == one[: len(path)] for one in COMMANDS), words
        named = {word for word in words if re.match("--[a-z]", word)}
        assert named <= {"--help", "--help-all", *COMMANDS.get(path, ())}, words


@pytest.mark.parametrize("path", FILES)
def test_a_named_file_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_policy_of_the_page_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"```python\n(.*?class Spread.*?)```", EXTENDING, re.DOTALL)
    (tmp_path / "spread.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    require_policy("spread.Spread")


SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TIMEOUT_S = 900  # less than a minute on an idle machine


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield an empty folder, and kill a server that a failed run left in it."""
    yield tmp_path
    pid = tmp_path / "up.pid"
    if pid.exists():
        subprocess.run(["kill", "-9", pid.read_text().strip()], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_the_commands_of_the_tutorial_print_the_documented_output(folder: Path) -> None:
    port = free_ports(1)
    blocks = [
        block.replace("8000", str(port)) for block in SHELL_BLOCK.findall((ROOT / "docs/tutorial.md").read_text())
    ]
    script = "\n".join(f"echo '== {number}'\n{block}" for number, block in enumerate(blocks))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    shown = dict(enumerate(re.split(r"^== \d+\n", done.stdout, flags=re.MULTILINE)[1:]))
    assert "60 requests completed, 0 failed" in shown[1]
    assert '"cached_tokens":896' in shown[2]
    assert "14 less to prefill" in " ".join(shown[3].split())
    assert "attempt 2" in shown[6]
    assert "400 output tokens" in shown[6]
    assert re.search(r"decisions\s+64, verified 64", shown[7]), "60 of the trace, 3 by curl, one of them twice"
    assert "request.routed tutorial-2" in shown[8]
    assert shown[9].count("verified 64") == 3
    assert "round-robin" in shown[10]
    reuse = dict(re.findall(r"^\s+(kv|round-robin)\s+\d+\s+([\d.]+)", shown[11], re.MULTILINE))
    assert float(reuse["kv"]) > float(reuse["round-robin"])


PROMPT = "the log is the truth and the log is"
CONTENT_TYPE = {"content-type": "application/json"}


def blocks() -> tuple[str, str]:
    """Return the example and its commands from docs/extending.md."""
    section = EXTENDING.partition("### A service\n")[2].partition("\n### ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (commands,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return code, commands


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a system that serves the example and yield its address."""
    code, commands = blocks()
    folder = tmp_path_factory.mktemp("example")
    named = re.search(r"forebay up --engine (\w+\.py):(\w+)", commands)
    assert named is not None
    (folder / named[1]).write_text(code)
    with running("--engine", f"{folder / named[1]}:{named[2]}") as up:
        yield up.url


def test_the_example_streams_a_response(example: str) -> None:
    client = openai.OpenAI(base_url=f"{example}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model="forebay-default", prompt=PROMPT, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert len([piece for piece in pieces if piece]) > 5
    assert {chunk.choices[0].finish_reason for chunk in chunks if chunk.choices} == {None, "length"}
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40
    # Only words of the prompt. The last word may be cut by `max_tokens`.
    assert set("".join(pieces).split()[:-1]) <= set(PROMPT.split())


def test_the_command_of_the_example_runs_unchanged(example: str) -> None:
    _, commands = blocks()
    body = re.search(r"-d '(\{.*\})'", commands)
    assert body is not None
    answer = httpx.post(f"{example}/v1/completions", content=body[1], headers=CONTENT_TYPE, timeout=30)
    assert answer.status_code == httpx.codes.OK
    assert answer.text.count("data: ") > 5
    assert answer.text.rstrip().endswith("data: [DONE]")
    shown = httpx.get(f"{example}/metrics", timeout=30).text
    assert re.search(r'^forebay_endpoint_requests_total\{endpoint=".*",outcome="ok"\} [1-9]', shown, re.MULTILINE), (
        shown
    )
