"""Images of different sizes in `forebay up --engine vllm` with a tiny Qwen2-VL, against vLLM alone."""

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.ingress.model import Model
from tests.cli.up import FOREBAY, Up
from tests.engines.vllm_settings import ARGUMENTS, BLOCK, KV_BLOCKS

STAND_INS = Path(__file__).parent / "without_torchvision"
STARTED_WITHIN_S = 240.0
TOKENS = 6
NO_VIDEOS: dict[str, Any] = {"limit_mm_per_prompt": {"video": 0}}

pytestmark = pytest.mark.timeout(600)


def picture(width: int, height: int, seed: int, kind: str = "PNG", mode: str = "RGB", turn: int = 1) -> bytes:
    from PIL import Image  # noqa: PLC0415 - comes with vLLM

    image, kept, exif = Image.new("RGB", (width, height), (seed, 90, 200 - seed)), io.BytesIO(), Image.Exif()
    image.paste((255, seed, 0), (0, 0, width // 2, height // 3 + 1))
    exif[0x0112] = turn
    image.convert(mode).save(kept, kind, exif=exif)
    return kept.getvalue()


def content(images: list[bytes]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "tell me a story about a cache of blocks. " * 5}]
    for image in images:
        url = f"data:;base64,{base64.b64encode(image).decode()}"
        parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": " the quick brown fox"}]
    return parts


def generate_alone(directory: str, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the expanded prompts and the tokens of vLLM, in this process."""
    from PIL import Image, ImageOps  # noqa: PLC0415
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    engine, answers = LLM(directory, block_size=BLOCK, **NO_VIDEOS, **ARGUMENTS), []
    for one in prompts:
        images = [Image.open(io.BytesIO(base64.b64decode(image))) for image in one["images"]]
        data = {"image": [ImageOps.exif_transpose(image).convert("RGB") for image in images]}
        prompt: Any = {"prompt_token_ids": one["token_ids"], "multi_modal_data": data}
        (output,) = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
        answers.append({"prompt": output.prompt_token_ids, "tokens": list(output.outputs[0].token_ids)})
    return answers


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
    prompts = []
    for images in chats:
        parts = [{"text": "", **part, "type": part["type"].removesuffix("_url")} for part in content(images)]
        token_ids = model.encode(model.render([{"role": "user", "content": parts}]))
        prompts.append({"token_ids": token_ids, "images": [base64.b64encode(one).decode() for one in images]})
    command = [sys.executable, "-m", __name__, str(directory)]
    alone = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stderr[-4_000:]
    cached, explained = [], dict[str, Any]()
    options = ["--engine", "vllm", "--model", str(directory), "--model-name", "tiny", "--log", str(tmp_path / "run.db")]
    options += ["--block-size", str(BLOCK), "--kv-blocks", str(KV_BLOCKS), "--max-num-seqs", "8"]
    system = Up(*options, "--engine-args", json.dumps(ARGUMENTS | NO_VIDEOS), program=[FOREBAY])
    try:
        system.wait_ready(STARTED_WITHIN_S)
        for images, expected in zip(chats, json.loads(alone.stdout.splitlines()[-1]), strict=True):
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


if __name__ == "__main__":
    print("\n" + json.dumps(generate_alone(sys.argv[1], json.load(sys.stdin))))
