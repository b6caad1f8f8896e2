"""Create a tiny deterministic Qwen2-VL or Qwen2.5-VL with random weights.

The number of tokens of an image or video depends on its size. The tokens of a Qwen2.5-VL also depend on the frame rate.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from tests.harness.models import make_tiny_model

TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PATCH = 8  # pixels; a token is a square of 2 x 2 patches
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "min_pixels": 4 * (2 * PATCH) ** 2,
    "max_pixels": 64 * (2 * PATCH) ** 2,
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|{{ part['type'] }}_pad|><|vision_end|>{% endif %}"
    "{% endfor %}</s>{% endfor %}<|assistant|>"
)


def write_model(directory: Path, family: str = "qwen2_vl") -> None:
    torch.manual_seed(make_tiny_model.SEED)
    tokenizer = make_tiny_model.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = CHAT_TEMPLATE
    text = make_tiny_model.model().config.to_dict()
    text["rope_parameters"] |= {"rope_type": "default", "mrope_section": [4, 6, 6]}
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": PATCH}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(TOKENS), strict=True))
    text["model_type"] = f"{family}_text"
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": make_tiny_model.HIDDEN}
        made: Any = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": make_tiny_model.HIDDEN}
        vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1], "tokens_per_second": 4}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        made = Qwen2_5_VLForConditionalGeneration(config)
    made.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(IMAGES))
