"""Create a tiny deterministic LLaVA (CLIP and Llama) with random weights, 350 KB.

An image is 16 tokens, whatever its size: `image_seq_length` of its config.json.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.harness.models import make_tiny_model

IMAGE = "<image>"
SIDE, PATCH = 32, 8  # pixels
IMAGE_TOKENS = (SIDE // PATCH) ** 2
TOWER = "vision_tower."


def processor() -> LlavaProcessor:
    """Return a processor: the tiny Llama's tokenizer with an image token, and CLIP's image processor."""
    tokenizer = make_tiny_model.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,  # CLIP's class token, which is not selected
    )


def model(image_token_id: int) -> LlavaForConditionalGeneration:
    torch.manual_seed(make_tiny_model.SEED)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=32,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=make_tiny_model.model().config,
        image_token_index=image_token_id,
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    return LlavaForConditionalGeneration(config).to(torch.bfloat16)


def write_model(directory: Path) -> LlavaForConditionalGeneration:
    parts = processor()
    made = model(parts.tokenizer.convert_tokens_to_ids(IMAGE))
    made.save_pretrained(directory)
    parts.save_pretrained(directory)
    # vLLM requires LLaVA's usual weight names; transformers 5 writes other names, and reads both.
    weights = directory / "model.safetensors"
    named = {name.replace(TOWER, f"{TOWER}vision_model."): tensor for name, tensor in load_file(weights).items()}
    save_file(named, weights, {"format": "pt"})
    return made
