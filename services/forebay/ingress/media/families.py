"""Tokens of images and videos in model families whose processor makes a number of tokens that depends on their size.

Theory of operation. A processor of transformers replaces the placeholder of an image by a sequence of tokens. This
sequence depends only on the size of the image, the vocabulary, and the files preprocessor_config.json and
processor_config.json. So it is computed here from the size in the header of the image, without transformers and without
pixels. Ties decide between grids of tiles, so each calculation has the order and precision of the original. The tests
compare the sequences with those of the processors.

vLLM samples the frames of a video (`forebay.ingress.media.video`). The processor of Qwen2-VL and Qwen2.5-VL resizes
them like images, to limits of its own, and combines each two frames.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any

import msgspec

from forebay.events.media import MediaKind
from forebay.runtime.errors import ConfigError

NEWLINES_MAX = 31  # of the longest token of newlines in the vocabulary of Gemma 3
ASPECT_MAX = 200  # of an image for Qwen-VL; transformers rejects longer ones
LLAMA4_TOKENS = (
    "<|image_start|>",
    "<|image|>",
    "<|patch|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|image_end|>",
)
TOKENS_MAX = 1 << 18  # of a video; more fit into no context of these models

Positive = Annotated[int, msgspec.Meta(ge=1)]
IdOf = Callable[[str], int | None]


class UnusableSize(Exception):
    """The model does not support images or videos of this size. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """How an image or a video becomes tokens.

    Attributes:
        placeholder: token id that stands for it in the output of the chat template.
        sequence: returns its token ids, given its height and width in pixels, or raises UnusableSize. For a video with
            `samples_frames`, the number of its sampled frames is the first argument.
        newlines: token id of each number of newlines, if the sequence begins and ends with newlines.
        samples_frames: whether the sequence of a video depends on its frames.
    """

    placeholder: int
    sequence: Callable[..., list[int]]
    newlines: Mapping[int, int] = field(default_factory=dict)
    samples_frames: bool = False


class _Edges(msgspec.Struct, frozen=True):
    """Smallest and largest number of pixels after resizing, in spite of the names."""

    shortest_edge: Positive = 56 * 56
    longest_edge: Positive = 28 * 28 * 1280


class _Tile(msgspec.Struct, frozen=True):
    height: Positive
    width: Positive


class _QwenVl(msgspec.Struct, frozen=True):
    patch_size: Positive = 14
    merge_size: Positive = 2
    size: _Edges = _Edges()
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None

    def tokens(self, height: int, width: int) -> int:
        """Return the number of tokens, as `smart_resize` of transformers determines the size."""
        if max(height, width) / min(height, width) > ASPECT_MAX:
            raise UnusableSize(f"this model supports aspect ratios of up to {ASPECT_MAX}")
        side = self.patch_size * self.merge_size
        fewest, most = self.min_pixels or self.size.shortest_edge, self.max_pixels or self.size.longest_edge
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > most:
            scale = math.sqrt((height * width) / most)
            rows, columns = (max(1, math.floor(edge / scale / side)) for edge in (height, width))
        elif rows * columns * side * side < fewest:
            scale = math.sqrt(fewest / (height * width))
            rows, columns = (math.ceil(edge * scale / side) for edge in (height, width))
        return rows * columns


class _QwenVlVideo(_QwenVl, frozen=True):
    size: _Edges = _Edges(128 * 28 * 28, 768 * 28 * 28)
    temporal_patch_size: Positive = 2


class _Llama4(msgspec.Struct, frozen=True):
    size: _Tile = _Tile(336, 336)
    max_patches: Positive = 16
    resize_to_max_canvas: bool = False
    patch_size: Positive = 14
    pixel_shuffle_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5

    @property
    def tile_tokens(self) -> int:
        patches = (self.size.height // self.patch_size) * (self.size.width // self.patch_size)
        return patches // round(1.0 / self.pixel_shuffle_ratio**2)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles, as `get_best_fit` of transformers selects them.

        That function compares scales as float32. Up to 40 megapixels, scales that differ do so as float32, too.
        """
        scales = {
            grid: min(self.size.height * grid[0] / height, self.size.width * grid[1] / width)
            for grid in _grids(1, self.max_patches)
        }
        enlarging = [scale for scale in scales.values() if scale >= 1]
        selected = (max if self.resize_to_max_canvas else min)(enlarging) if enlarging else max(scales.values())
        return min((grid for grid, scale in scales.items() if scale == selected), key=math.prod)


class _InternVl(msgspec.Struct, frozen=True):
    size: _Tile = _Tile(384, 384)
    min_patches: Positive = 1
    max_patches: Positive = 12
    image_seq_length: Positive = 256

    def tiles(self, height: int, width: int) -> int:
        """Return the number of tiles with the thumbnail, as `get_optimal_tiled_canvas` of transformers selects them."""
        best, least = (1, 1), math.inf
        for columns, rows in _grids(self.min_patches, self.max_patches):
            distance = abs(width / height - columns / rows)
            is_filled = width * height > 0.5 * self.size.height * self.size.width * columns * rows
            if distance < least or (distance == least and is_filled):
                best, least = (columns, rows), distance
        return 1 if math.prod(best) == 1 else math.prod(best) + 1


class _Gemma3(msgspec.Struct, frozen=True):
    image_seq_length: Positive = 256


@cache
def _grids(tiles_min: int, tiles_max: int) -> list[tuple[int, int]]:
    sides = range(1, tiles_max + 1)
    grids = [(one, other) for one in sides for other in sides if tiles_min <= one * other <= tiles_max]
    return sorted(grids, key=math.prod)


def _qwen_vl(config: Mapping[str, Any], settings: Mapping[str, Any], id_of: IdOf) -> Expansion:
    images, pad = msgspec.convert(settings, _QwenVl), config["image_token_id"]
    return Expansion(pad, lambda height, width: [pad] * images.tokens(height, width))


def _qwen_vl_video(config: Mapping[str, Any], settings: Mapping[str, Any], id_of: IdOf) -> Expansion | None:
    videos, pad = msgspec.convert(settings, _QwenVlVideo), config["video_token_id"]
    if settings.get("cap_pixels_per_frame"):
        return None  # frames of long videos would be smaller

    def sequence(frames: int, height: int, width: int) -> list[int]:
        tokens = math.ceil(frames / videos.temporal_patch_size) * videos.tokens(height, width)
        if tokens > TOKENS_MAX:
            raise UnusableSize(f"they are {tokens:,} tokens; the limit is {TOKENS_MAX:,}")
        return [pad] * tokens

    return Expansion(pad, sequence, samples_frames=True)


def _internvl(config: Mapping[str, Any], settings: Mapping[str, Any], id_of: IdOf) -> Expansion:
    images, context = msgspec.convert(settings, _InternVl), config["image_token_id"]
    begin, end = _ids(id_of, "<img>", "</img>")

    def sequence(height: int, width: int) -> list[int]:
        return [begin, *[context] * (images.tiles(height, width) * images.image_seq_length), end]

    return Expansion(context, sequence)


def _llama4(config: Mapping[str, Any], settings: Mapping[str, Any], id_of: IdOf) -> Expansion:
    images = msgspec.convert(settings, _Llama4)
    if images.size.height != images.size.width:
        raise ConfigError(f"`size` of the image processor is {images.size}; Llama 4 needs a square")
    begin, image, patch, next_tile, next_row, end = _ids(id_of, *LLAMA4_TOKENS)
    tile = [patch] * images.tile_tokens

    def sequence(height: int, width: int) -> list[int]:
        rows, columns = images.grid(height, width)
        row = [*tile, *[next_tile, *tile] * (columns - 1), next_row]
        return [begin, *(row * rows if rows * columns > 1 else []), image, *tile, end]

    return Expansion(image, sequence)


def _gemma3(config: Mapping[str, Any], settings: Mapping[str, Any], id_of: IdOf) -> Expansion:
    """Return the expansion without pan and scan, which a processor does only if a call asks for it."""
    soft, begin, end = (config[name] for name in ("image_token_index", "boi_token_index", "eoi_token_index"))
    (around,) = _ids(id_of, "\n\n")
    tokens = [around, begin, *[soft] * msgspec.convert(settings, _Gemma3).image_seq_length, end, around]
    numbered = ((number, id_of("\n" * number)) for number in range(1, NEWLINES_MAX + 1))
    newlines = {number: token_id for number, token_id in numbered if token_id is not None}
    return Expansion(begin, lambda _height, _width: list(tokens), newlines)


def _ids(id_of: IdOf, *texts: str) -> list[int]:
    """Return the ids of tokens. Raises KeyError for a text that is no token."""
    found = {text: id_of(text) for text in texts}
    if missing := [text for text, token_id in found.items() if token_id is None]:
        raise KeyError(*missing)
    return [token_id for token_id in found.values() if token_id is not None]


# By `model_type` of config.json.
FAMILIES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], IdOf], Expansion | None]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _qwen_vl),
    "gemma3": _gemma3,
    "llama4": _llama4,
    "internvl": _internvl,
}
VIDEO_FAMILIES = dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _qwen_vl_video)


def expansion_of(
    kind: MediaKind, config: Mapping[str, Any], settings: Mapping[str, Any], id_of: IdOf
) -> Expansion | None:
    """Return how a model of `FAMILIES` expands images, or one of `VIDEO_FAMILIES` videos.

    None without settings, for another family, or if one of the tokens is unknown.

    Args:
        settings: values of the model's processor and of its processor of images or videos.
        id_of: returns the id of the token with a text, None if there is none.

    Raises ConfigError if a value of the settings is invalid.
    """
    if not settings:
        return None
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        return (FAMILIES if kind == "image" else VIDEO_FAMILIES)[config["model_type"]](config, given, id_of)
    except KeyError:
        return None
    except msgspec.ValidationError as error:
        raise ConfigError(f"the settings of the {kind} processor are invalid: {error}") from error
