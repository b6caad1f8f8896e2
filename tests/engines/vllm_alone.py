"""Chats with images and videos of different sizes for a tiny Qwen2-VL, and their output from vLLM without forebay."""

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


def picture(width: int, height: int, seed: int, kind: str = "PNG", mode: str = "RGB", turn: int = 1) -> bytes:
    from PIL import Image  # noqa: PLC0415 - comes with vLLM

    image, kept, exif = Image.new("RGB", (width, height), (seed, 90, 200 - seed)), io.BytesIO(), Image.Exif()
    image.paste((255, seed, 0), (0, 0, width // 2, height // 3 + 1))
    exif[0x0112] = turn
    image.convert(mode).save(kept, kind, exif=exif)
    return kept.getvalue()


def content(media: list[bytes]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "tell me a story about a cache of blocks. " * 5}]
    for one in media:
        name, url = f"{kind_of(one)}_url", f"data:;base64,{base64.b64encode(one).decode()}"
        parts += [{"type": name, name: {"url": url}}, {"type": "text", "text": " the quick brown fox"}]
    return parts


def kind_of(one: bytes) -> str:
    return "video" if one[4:8] == b"ftyp" else "image"


def generate_alone(directory: str, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the expanded prompts and the tokens of vLLM, in this process."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    engine, answers = LLM(directory, block_size=BLOCK, **ARGUMENTS), []
    for one in prompts:
        data: dict[str, list[Any]] = {}
        for encoded in one["media"]:
            data.setdefault(kind_of(base64.b64decode(encoded)), []).append(decoded(encoded))
        prompt: Any = {"prompt_token_ids": one["token_ids"], "multi_modal_data": data}
        (output,) = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
        answers.append({"prompt": output.prompt_token_ids, "tokens": list(output.outputs[0].token_ids)})
    return answers


def decoded(encoded: str) -> Any:
    """Return an image, or frames of a video with their metadata, as vLLM's server decodes them."""
    from PIL import Image, ImageOps  # noqa: PLC0415
    from vllm.multimodal.media import MediaConnector  # noqa: PLC0415

    content = base64.b64decode(encoded)
    if kind_of(content) == "video":
        url = f"data:video/mp4;base64,{encoded}"
        return MediaConnector().fetch_video(url, video_processor="Qwen2VLVideoProcessor").media
    return ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")


def vllm_alone(directory: Path, chats: list[list[bytes]]) -> list[dict[str, Any]]:
    """Return the expanded prompt and the tokens of vLLM, in a process of its own, for chats with images and videos."""
    model, prompts = Model(directory), []
    for media in chats:
        parts = [{"text": "", **part, "type": part["type"].removesuffix("_url")} for part in content(media)]
        token_ids = model.encode(model.render([{"role": "user", "content": parts}]))
        prompts.append({"token_ids": token_ids, "media": [base64.b64encode(one).decode() for one in media]})
    command = [sys.executable, "-m", __name__, str(directory)]
    alone = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stderr[-4_000:]
    answers: list[dict[str, Any]] = json.loads(alone.stdout.splitlines()[-1])
    return answers


if __name__ == "__main__":
    print("\n" + json.dumps(generate_alone(sys.argv[1], json.load(sys.stdin))))
