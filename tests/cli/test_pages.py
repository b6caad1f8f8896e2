"""Commands and examples of the documentation, run as a reader runs them."""

import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.cli.pages import COOKBOOK, PAGES, REASONS, ROOT, Block, blocks, folder_of, recipes, run
from tests.cli.up import running
from tests.command_line import commands, options

pytestmark = pytest.mark.timeout(600)
FOUND = {page.name: blocks(page.read_text()) for page in PAGES}
RUN = {
    name: [block for block in page if block.runs or block.is_file]
    for name, page in FOUND.items()
    if name not in {COOKBOOK.name, "tutorial.md"} and any(block.runs for block in page)
}
NOT_RUN = {"gpu": 13, "hosts": 5, "network": 12, "tool": 10, "checks": 9}
SHELL = re.compile(r"^ *```(?:sh|bash|console|shell)\b.*$", re.MULTILINE)


@pytest.mark.slow  # a minute of servers and simulations; other tests cover each command
@pytest.mark.parametrize("name", RUN)
def test_the_blocks_of_a_page_run_as_they_stand(tmp_path: Path, name: str) -> None:
    with folder_of(tmp_path) as folder:
        run(RUN[name], folder)


def test_each_block_of_commands_runs_or_says_why_not() -> None:
    fences = SHELL.findall("".join(page.read_text() for page in PAGES))
    words = Counter(
        block.word for page in FOUND.values() for block in page if block.language == "sh" and block.is_shown
    )
    assert len(fences) == words.total(), "a fence of commands begins at the line's start with ```sh"
    assert set(words) - {None, "server", "kafka"} == set(REASONS)
    assert {reason: words[reason] for reason in REASONS} == NOT_RUN
    assert sum(words[word] for word in (None, "server", "kafka")) > 100


FIRST, *OTHERS = RECIPES = recipes(COOKBOOK.read_text())


@pytest.fixture(scope="module")
def shared_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with folder_of(tmp_path_factory.mktemp("cookbook")) as folder:
        prints_documented_output(RECIPES[FIRST], folder)
        yield folder


@pytest.mark.slow  # a minute of simulations; other tests cover the output of each command
@pytest.mark.parametrize("title", OTHERS)
def test_a_recipe_prints_the_output_on_the_page(shared_files: Path, tmp_path: Path, title: str) -> None:
    with folder_of(tmp_path, shared_files) as folder:
        prints_documented_output(RECIPES[title], folder)


def prints_documented_output(recipe: list[Block], folder: Path) -> None:
    for block, printed in zip(recipe, run(recipe, folder), strict=True):
        if block.output is not None:
            assert printed == block.output, f"{block.text}\npython -m tests.cli.pages writes the page anew"


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
    lines = "\n".join(re.findall(r"^```sh.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines()
    lines += re.findall(r"`(forebay\s[^`]+)`", text)
    found = [line for one in lines if (line := re.match(r"(?:\.venv/bin/)?forebay\s+([a-z][^#;&>|]*)", one))]
    assert len(found) > 300
    for words in (one[1].split() for one in found):
        if words[0] == "bill" and words[1:2] not in (["verify"], ["head"]):
            words.insert(1, "show")  # the subcommand that `bill` runs without a name
        path = tuple(words[: 1 if (words[0],) in COMMANDS else 2])
        assert path == PLANNED or any(path == one[: len(path)] for one in COMMANDS), words
        named = {word for word in words if re.match("--[a-z]", word)}
        assert named <= {"--help", "--help-all", *COMMANDS.get(path, ())}, words


@pytest.mark.parametrize("path", FILES)
def test_a_named_file_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.slow
def test_the_commands_of_the_tutorial_print_the_documented_output(tmp_path: Path) -> None:
    with folder_of(tmp_path) as folder:
        shown = run(FOUND["tutorial.md"], folder)
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


def test_the_example_of_a_service_streams_a_response(tmp_path: Path) -> None:
    (code,) = (block.text for block in FOUND["extending.md"] if block.word == "bigrams.py")
    (tmp_path / "bigrams.py").write_text(code)
    with running("--engine", f"{tmp_path}/bigrams.py:Bigrams") as up:
        stream = up.client().completions.create(
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
