"""Tokens of images of any size at the ingress, against transformers' processors with their published settings."""

import importlib
import importlib.util
import json
import math
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from forebay.events.media import Media
from forebay.ingress.errors import ApiError
from forebay.ingress.media.tokens import FetchedMedia, MediaRef
from forebay.ingress.model import Model
from forebay.workers.engines.vllm.media import collapsed

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
LLAMA4 = "transformers.models.llama4.image_processing_llama4"
PAD, CONTEXT = "<|image_pad|>", "<IMG_CONTEXT>"
BEGIN, SOFT, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
INTERNVL_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": CONTEXT,
    "video_token": "<video>",
}
QWEN2 = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
QWEN3 = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "merge_size": 2}
GEMMA3 = {"do_pan_and_scan": None, "image_seq_length": 256, "size": {"height": 896, "width": 896}}
INTERNVL = {"crop_to_patches": False, "min_patches": 1, "max_patches": 12, "size": {"height": 448, "width": 448}}
Inputs = Callable[[Any, int, int], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """A processor of transformers, the text of an image in the chat template, special tokens, and files of the model.

    `inputs` returns what the image processor reports to the processor about an image, given its height and width.
    """

    processor: str
    image_processor: str
    placeholder: str
    tokens: Mapping[str, str]
    ids: Mapping[str, str]
    settings: Mapping[str, Any]
    inputs: Inputs


def qwen_inputs(images: Any, height: int, width: int) -> dict[str, Any]:
    import numpy as np  # noqa: PLC0415 - comes with vLLM

    return {"image_grid_thw": [np.array([1, 1, images.get_number_of_image_patches(height, width)])]}


def gemma_inputs(images: Any, height: int, width: int) -> dict[str, Any]:
    return {"num_crops": [0]}


def internvl_inputs(images: Any, height: int, width: int) -> dict[str, Any]:
    return {"num_patches": [images.get_number_of_image_patches(height, width, {"crop_to_patches": True})]}


def llama_inputs(images: Any, height: int, width: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415
    from transformers.image_utils import SizeDict  # noqa: PLC0415

    original = importlib.import_module(LLAMA4)
    resolutions = torch.tensor(original.find_supported_resolutions(16, SizeDict(height=336, width=336)))
    rows, columns = (original.get_best_fit((height, width), resolutions) // 336).tolist()
    return {"pixel_values": [torch.empty(1, 3, 336, 336)], "aspect_ratios": [(rows, columns)]}


QWEN_IMAGES = "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"
GEMMA_TOKENS = {"boi_token": BEGIN, "image_token": SOFT, "eoi_token": END}
LLAMA_TOKENS = ["image_start", "image", "patch", "tile_x_separator", "tile_y_separator", "image_end"]
QWEN_TOKENS = {"image_token": PAD, "video_token": "<|video_pad|>"}
QWEN_IDS = {"image_token_id": PAD}
FAMILIES = {
    name: Family(f"{name}.processing_{name}.{kind}", QWEN_IMAGES, PAD, QWEN_TOKENS, QWEN_IDS, settings, qwen_inputs)
    for name, kind, settings in (
        ("qwen2_vl", "Qwen2VLProcessor", QWEN2),
        ("qwen2_5_vl", "Qwen2_5_VLProcessor", QWEN2),
        ("qwen3_vl", "Qwen3VLProcessor", QWEN3),
    )
} | {
    "gemma3": Family(
        "gemma3.processing_gemma3.Gemma3Processor",
        "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        BEGIN,
        GEMMA_TOKENS,
        {"boi_token_index": BEGIN, "image_token_index": SOFT, "eoi_token_index": END},
        GEMMA3,
        gemma_inputs,
    ),
    "llama4": Family(
        "llama4.processing_llama4.Llama4Processor",
        "llama4.image_processing_llama4.Llama4ImageProcessor" if HAS_TORCHVISION else "",
        "<|image|>",
        {name: f"<|{name}|>" for name in LLAMA_TOKENS},
        {"image_token_index": "<|patch|>"},
        {"size": {"height": 336, "width": 336}, "max_patches": 16, "resize_to_max_canvas": False},
        llama_inputs,
    ),
    "internvl": Family(
        "internvl.processing_internvl.InternVLProcessor",
        "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
        CONTEXT,
        INTERNVL_TOKENS,
        {"image_token_id": CONTEXT},
        INTERNVL,
        internvl_inputs,
    ),
}


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


class Original:
    """A processor of transformers and the model directory of the ingress with the same files."""

    def __init__(self, name: str, directory: Path) -> None:
        from tokenizers import AddedToken  # noqa: PLC0415
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

        from tests.harness.models import make_tiny_model  # noqa: PLC0415 - imports torch

        self.family = FAMILIES[name]
        made = make_tiny_model.tokenizer()
        made.add_special_tokens({"additional_special_tokens": [*self.family.tokens.values()]})
        made.add_tokens([AddedToken("\n" * number, normalized=False) for number in range(1, 32)])
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=made.backend_tokenizer, extra_special_tokens=dict(self.family.tokens), pad_token="<pad>"
        )
        self.images = (
            named(self.family.image_processor)(**self.family.settings) if self.family.image_processor else None
        )
        self.processor = named(self.family.processor)(image_processor=self.images, tokenizer=self.tokenizer)
        self.tokenizer.save_pretrained(directory)
        ids = {key: self.tokenizer.convert_tokens_to_ids(text) for key, text in self.family.ids.items()}
        (directory / "config.json").write_text(
            json.dumps({"model_type": name, "max_position_embeddings": 1 << 17, **ids})
        )
        (directory / "preprocessor_config.json").write_text(json.dumps(self.family.settings))
        self.model = Model(directory)

    def sequence(self, height: int, width: int) -> str:
        return str(self.processor.replace_image_token(self.family.inputs(self.images, height, width), 0))

    def expand(self, text: str, *sizes: tuple[int, int]) -> tuple[list[int], tuple[Media, ...]]:
        """Return what the ingress makes of the output of a chat template."""
        refs = [MediaRef("image", "", f"image {at}") for at in range(len(sizes))]
        digests = [sha256(bytes([at])).hexdigest() for at in range(len(sizes))]
        fetched = [FetchedMedia("image", "", b"", digest, size) for digest, size in zip(digests, sizes, strict=True)]
        prompt = self.model.media.expand(self.model.encode(text), refs, fetched)
        return prompt.token_ids, prompt.media


@pytest.fixture(scope="module")
def processors() -> Iterator[None]:
    """Let processors be made without torchvision, and the functions of Llama 4's that do not use it be imported."""
    from transformers.processing_utils import ProcessorMixin  # noqa: PLC0415 - comes with vLLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)  # there is no video processor
        if not HAS_TORCHVISION:
            for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
                patch.setitem(sys.modules, name, types.ModuleType(name))
            patch.setattr(sys.modules["torchvision.transforms.v2"], "functional", None, raising=False)
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def original(request: pytest.FixtureRequest, processors: None, tmp_path_factory: pytest.TempPathFactory) -> Original:
    return Original(request.param, tmp_path_factory.mktemp(request.param))


def sizes(count: int, longest: int, seed: int = 43) -> list[tuple[int, int]]:
    """Return heights and widths from 1 pixel, each scale as often as the others, without those that Qwen-VL rejects."""
    source = random.Random(seed)
    found: list[tuple[int, int]] = []
    while len(found) < count:
        height, width = (round(math.exp(source.uniform(0, math.log(longest)))) for _ in range(2))
        if max(height, width) <= 200 * min(height, width):
            found.append((height, width))
    return found


def test_prompts_of_200_sizes_equal_those_of_the_processor(original: Original) -> None:
    """The images are beside each other, words and newlines, which Gemma 3's tokenizer joins with those of images."""
    edges = [(1, 1), (1, 200), (200, 1), (336, 336), (448, 896), (897, 448), (6324, 6324), (200_000, 1_000)]
    squares = [(side, side) for side in range(20, 1_000, 37)]
    source, left = random.Random(7), [*edges, *squares, *sizes(200, 8_000)]
    while left:
        several, left = left[: (count := source.randint(1, 4))], left[count:]
        text = expanded = source.choice(["user\n", "", "\n\n", "a"])
        sequences = [original.sequence(*size) for size in several]
        for sequence in sequences:
            after = source.choice(["", "\n", "\n\n", "a", "a\n"])
            text, expanded = text + original.family.placeholder + after, expanded + sequence + after
        found, media = original.expand(text, *several)
        assert found == original.tokenizer(expanded)["input_ids"], several
        assert collapsed(found, media) == original.model.encode(text)
        for place, sequence in zip(media, sequences, strict=True):
            inner = original.tokenizer(sequence)["input_ids"][1:-1]  # at its ends may be newlines
            assert found[place.first_token + 1 : place.first_token + place.tokens - 1] == inner


def test_processor_inserts_these_tokens_for_real_images(original: Original) -> None:
    from PIL import Image  # noqa: PLC0415 - comes with vLLM

    if original.images is None:
        pytest.skip("Llama 4's image processor needs torchvision, which has no build for CPUs on PyPI")
    pairs = sizes(8, 700)
    for pair in zip(pairs[::2], pairs[1::2], strict=True):
        text = f"user\n{original.family.placeholder}what\n{original.family.placeholder}is this?"
        images = [Image.new("RGB", (width, height)) for height, width in pair]
        made = original.processor(text=[text], images=images)
        assert original.expand(text, *pair)[0] == list(made["input_ids"][0]), pair


@pytest.mark.parametrize("original", [name for name in FAMILIES if name.startswith("qwen")], indirect=True)
def test_too_long_images_are_rejected_as_by_the_processor(original: Original) -> None:
    for size in ((1, 201), (201, 1), (10, 2_001), (40_000_000, 1)):
        with pytest.raises(ValueError, match="absolute aspect ratio must be smaller than 200"):
            original.sequence(*size)
        with pytest.raises(ApiError, match=r"image 0: the image has .* aspect ratios of up to 200; crop it") as caught:
            original.expand(original.family.placeholder, size)
        assert (caught.value.status, caught.value.code) == (400, "unsupported_image_size")
