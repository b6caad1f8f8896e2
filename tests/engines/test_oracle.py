"""The oracle: unchanged weights, and equal output of transformers. Tests of the engines compare vLLM's output."""

import subprocess
import sys
from pathlib import Path

from tests.engines.oracle import GREEDY, LORA_SHA256, MODEL_SHA256, Transformers

ROOT = Path(__file__).parents[2]


def sha256_lines(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "tests.harness.models.make_tiny_model", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def test_oracle_weights_are_unchanged(tmp_path: Path) -> None:
    generated = sha256_lines(str(tmp_path / "model"), "--lora", str(tmp_path / "lora"))
    assert [line.split()[0] for line in generated] == [MODEL_SHA256, LORA_SHA256]


def test_transformers_generates_the_tokens_of_the_oracle(oracle: Transformers) -> None:
    assert [oracle.greedy(prompt, len(generated)) for prompt, generated in GREEDY] == [
        generated for _, generated in GREEDY
    ]
