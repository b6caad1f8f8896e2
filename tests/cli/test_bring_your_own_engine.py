"""The engine example of docs/extending.md, served by `forebay up` and streamed through the OpenAI API."""

import ast
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.harness import fork_server
from tests.harness.local import free_ports

PAGE = Path(__file__).parents[2] / "docs/extending.md"
PATIENCE_S = 60.0
LINES_MAX = 30
PROMPT = "the log is the truth and the log is"
CONTENT_TYPE = {"content-type": "application/json"}

pytestmark = pytest.mark.timeout(180)


def blocks() -> tuple[str, str]:
    """Return the example and its commands from docs/extending.md."""
    section = PAGE.read_text().partition("### A service\n")[2].partition("\n### ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (commands,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return code, commands


@contextmanager
def up(*options: str) -> Iterator[str]:
    """Run `forebay up` and yield its address."""
    port = free_ports(1)
    process = fork_server.start("up", "--port", str(port), *options)
    url = f"http://127.0.0.1:{port}"
    try:
        ends_s = time.monotonic() + PATIENCE_S
        while True:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < ends_s, "not ready"
            try:
                if httpx.get(f"{url}/ready", timeout=5).status_code == httpx.codes.OK:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        yield url
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=PATIENCE_S)[0]
        assert process.returncode == 0, output
        assert "Traceback" not in output
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a system that serves the example and yield its address."""
    code, commands = blocks()
    folder = tmp_path_factory.mktemp("example")
    named = re.search(r"forebay up --engine (\w+\.py):(\w+)", commands)
    assert named is not None
    (folder / named[1]).write_text(code)
    with up("--engine", f"{folder / named[1]}:{named[2]}") as url:
        yield url


def test_the_example_is_short_and_named_by_its_commands() -> None:
    code, _ = blocks()
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= LINES_MAX
    ast.parse(code)


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


def test_requests_rejected_by_the_example_are_client_errors(example: str) -> None:
    answer = httpx.post(
        f"{example}/v1/completions", json={"model": "forebay-default", "prompt": " ", "max_tokens": 4}, timeout=30
    )
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert answer.json()["error"]["message"] == "say something, so that there is a word to go on with"


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        ("x = 1", 2, "engine.py has no class Engine"),
        ("raise RuntimeError('no GPU here')", 2, "engine.py: RuntimeError: no GPU here"),
        (
            "from forebay.workers.service import *\n@service(namespace='t')\nclass Engine:\n"
            "    async def start(self):\n        raise OSError('the weights are damaged')\n"
            "    @endpoint()\n    async def generate(self, request):\n        yield 1\n",
            1,
            "t.engine failed to start: OSError: the weights are damaged",
        ),
    ],
)
def test_an_engine_that_fails_to_start_ends_the_command_with_one_line(
    tmp_path: Path, text: str, code: int, why: str
) -> None:
    file = tmp_path / "engine.py"
    file.write_text(text)
    command = ["up", "--port", str(free_ports(1)), "--engine", f"{file}:Engine"]
    run = fork_server.run(*command, timeout_s=PATIENCE_S)
    assert run.returncode == code
    assert run.stderr.startswith("forebay: ")
    assert run.stderr.count("\n") == 1
    assert why in run.stderr
