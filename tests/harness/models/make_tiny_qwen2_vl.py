"""Create a tiny deterministic Qwen2-VL with random weights. The tokens of an image or video depend on its size."""

import json
from pathlib import Path

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

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


def write_model(directory: Path) -> None:
    torch.manual_seed(make_tiny_model.SEED)
    tokenizer = make_tiny_model.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = CHAT_TEMPLATE
    text = make_tiny_model.model().config.to_dict()
    text["rope_parameters"] |= {"rope_type": "default", "mrope_section": [4, 6, 6]}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": make_tiny_model.HIDDEN, "num_heads": 2, "patch_size": PATCH}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(TOKENS), strict=True))
    config = Qwen2VLConfig(text_config=text | {"model_type": "qwen2_vl_text"}, vision_config=vision, **ids)
    Qwen2VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(IMAGES))
