"""`forebay up --engine transformers`: real text over HTTP, and a one-line error for a failed start."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.oracle import Transformers
from tests.harness.hub_stub import hub_stub
from tests.harness.local import free_ports

FOREBAY = str(Path(sys.executable).with_name("forebay"))
PATIENCE_S = 120.0
BLOCK = 16
TOKENS = 24
MESSAGES = [{"role": "user", "content": "tell me a story about a cache of blocks. " * 3}]


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a system in one process with one worker, which must exit cleanly on SIGTERM.

    The model comes from a stand-in for the Hugging Face Hub.
    """
    port, folder = free_ports(2), tmp_path_factory.mktemp("up")
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    with hub_stub("org/tiny", files, port + 1) as hub:
        yield from serving(port, folder, {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0"})


def serving(port: int, folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Serve the model org/tiny until the generator ends."""
    arguments = folder / "arguments.yaml"
    arguments.write_text("dtype: float32\nthreads: 1\n")
    command = [FOREBAY, "up", "--port", str(port), "--engine", "transformers", "--model", "org/tiny"]
    options = ["--model-name", "tiny", "--block-size", str(BLOCK), "--engine-args", str(arguments)]
    options += ["--log-level", "warning"]
    process = subprocess.Popen(
        [*command, *options],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until_ready(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, output
        assert output.splitlines() == [
            "forebay: model tiny, 1 transformers worker, kv router",
            "forebay: log in memory (lost at exit; use --log FILE to keep it)",
            f"forebay: OpenAI API on http://127.0.0.1:{port}/v1, stop with Ctrl-C",
            "forebay: shutting down: no requests in flight",
        ]
    finally:
        process.kill()
        process.wait()


def until_ready(process: "subprocess.Popen[str]", url: str) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_s:
        assert process.poll() is None, process.communicate()[0]
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("not ready")


def chat(url: str, **changes: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the content deltas of a streamed response and its last chunk, which holds the usage."""
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, **changes}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]", lines
    chunks = [json.loads(line) for line in lines[:-1]]
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    return [piece for piece in pieces if piece], chunks[-1]


def text_of(model: Path, tokens: list[int]) -> str:
    from forebay.ingress.model import Model  # noqa: PLC0415 - beside the engines' imports

    decoder = Model(model).decoder()
    return "".join(decoder.push([token]) for token in tokens)


def test_chat_streams_the_greedy_tokens_of_the_oracle(url: str, model: Path, oracle: Transformers) -> None:
    prompt = oracle.prompt(MESSAGES)
    pieces, last = chat(url)
    assert "".join(pieces) == text_of(model, oracle.greedy(prompt, TOKENS))
    assert len(pieces) > 1, "the response was not streamed"
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (len(prompt), TOKENS)


def test_sampled_responses_repeat_with_their_seed(url: str) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
    first, second, other = ("".join(chat(url, seed=seed, **sampling)[0]) for seed in (3, 3, 4))
    assert first == second
    assert first != other


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        ("directory", 2, "no such directory"),
        ("weights", 1, "transformers cannot load the model"),
        ("lora", 1, "does not support LoRA adapters"),
    ],
)
def test_a_failed_start_ends_with_one_line(tmp_path: Path, model: Path, damage: str, code: int, message: str) -> None:
    for file in model.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(
            content[:500] if damage == "weights" and file.suffix == ".safetensors" else content
        )
    directory = tmp_path / "nowhere" if damage == "directory" else tmp_path
    options = ["--port", str(free_ports(1)), "--engine", "transformers", "--model", str(directory)]
    options += ["--lora", f"legal={tmp_path}"] if damage == "lora" else []
    run = subprocess.run([FOREBAY, "up", *options], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert run.returncode == code, run.stderr
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1, run.stderr
