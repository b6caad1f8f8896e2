"""Images of different sizes in `forebay up --engine vllm` with a tiny Qwen2-VL, against vLLM alone."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.ingress.model import Model
from tests.cli.up import FOREBAY, Up
from tests.engines.vllm_alone import STAND_INS, TOKENS, content, picture, vllm_alone
from tests.engines.vllm_settings import ARGUMENTS, BLOCK, KV_BLOCKS

STARTED_WITHIN_S = 240.0

pytestmark = pytest.mark.timeout(600)


def test_tokens_and_cached_prefixes_are_those_of_vllm_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.harness.models import make_tiny_qwen2_vl  # noqa: PLC0415 - imports torch

    monkeypatch.setenv("PYTHONPATH", str(STAND_INS), prepend=os.pathsep)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # what it has about the model depends on the stand-ins
    directory = tmp_path / "qwen2-vl"
    make_tiny_qwen2_vl.write_model(directory)
    model = Model(directory)
    wide, tall, turned = picture(150, 40, 10), picture(60, 130, 80), picture(150, 40, 33, "JPEG", turn=6)
    ink, dot = picture(99, 70, 5, "JPEG", "CMYK"), picture(1, 1, 9, "GIF", "P")
    chats = [[wide], [tall], [wide, tall], [turned], [ink], [dot], [wide]]
    alone = vllm_alone(directory, chats)
    cached, explained = [], dict[str, Any]()
    options = ["--engine", "vllm", "--model", str(directory), "--model-name", "tiny", "--log", str(tmp_path / "run.db")]
    options += ["--block-size", str(BLOCK), "--kv-blocks", str(KV_BLOCKS), "--max-num-seqs", "8"]
    system = Up(*options, "--engine-args", json.dumps(ARGUMENTS), program=[FOREBAY])
    try:
        system.wait_ready(STARTED_WITHIN_S)
        for images, expected in zip(chats, alone, strict=True):
            body = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            body["messages"] = [{"role": "user", "content": content(images)}]
            answer = httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=60).json()
            decoder = model.decoder()
            text = "".join(decoder.push([token]) for token in expected["tokens"])
            assert (answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]) == (
                text,
                len(expected["prompt"]),
            )
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            explained = httpx.get(f"{system.url}/v1/requests/{answer['id']}/explain", timeout=60).json()
    finally:
        system.process.kill()
        system.process.communicate()
    # Of another image, only the block before the image is found; of the same one, the block with its tokens too.
    assert cached == [0, BLOCK, 2 * BLOCK, BLOCK, BLOCK, BLOCK, 2 * BLOCK]
    assert explained["first_token"]["predicted_tokens"] == explained["first_token"]["cached_tokens"] == 2 * BLOCK
