"""Chats with images of different sizes for a tiny Qwen2-VL, and their output from vLLM without forebay."""

import base64
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from forebay.ingress.model import Model
from tests.engines.vllm_settings import ARGUMENTS, BLOCK

STAND_INS = Path(__file__).parent / "without_torchvision"
TOKENS = 6
NO_VIDEOS: dict[str, Any] = {"limit_mm_per_prompt": {"video": 0}}


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


def vllm_alone(directory: Path, chats: list[list[bytes]]) -> list[dict[str, Any]]:
    """Return the expanded prompt and the tokens of vLLM, in a process of its own, for chats with these images."""
    model, prompts = Model(directory), []
    for images in chats:
        parts = [{"text": "", **part, "type": part["type"].removesuffix("_url")} for part in content(images)]
        token_ids = model.encode(model.render([{"role": "user", "content": parts}]))
        prompts.append({"token_ids": token_ids, "images": [base64.b64encode(one).decode() for one in images]})
    command = [sys.executable, "-m", __name__, str(directory)]
    alone = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stderr[-4_000:]
    answers: list[dict[str, Any]] = json.loads(alone.stdout.splitlines()[-1])
    return answers


if __name__ == "__main__":
    print("\n" + json.dumps(generate_alone(sys.argv[1], json.load(sys.stdin))))
