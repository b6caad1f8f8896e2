"""Tokens of videos at the ingress, against transformers' processor, and against the frames that vLLM samples."""

import importlib.util
import json
import random
import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from forebay.ingress.media.families import Expansion, expansion_of
from forebay.ingress.media.tokens import MediaRef
from forebay.ingress.media.video import sampled_frames, sampled_size
from tests.harness.clips import clip, turned

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
HAS_AV = importlib.util.find_spec("av") is not None
QWEN2 = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
SETTINGS: dict[str, Mapping[str, Any]] = {
    "published": QWEN2,
    "defaults": {"patch_size": 14},
    "small": {"size": {"shortest_edge": 4_096, "longest_edge": 50_176}, "patch_size": 8, "temporal_patch_size": 4},
}
PAD = 7


@pytest.fixture(scope="module")
def processor() -> Iterator[Any]:
    """Return the class of the video processor. Without torchvision, it has replacements for resizing."""
    if HAS_TORCHVISION:
        from transformers import Qwen2VLVideoProcessor  # noqa: PLC0415 - comes with vLLM

        yield Qwen2VLVideoProcessor
        return
    from transformers.image_processing_backends import TorchvisionBackend  # noqa: PLC0415

    path = Path(__file__).parent / "without_torchvision" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("video_stand_ins", path)
    assert spec is not None and spec.loader is not None
    module, modules, finders = importlib.util.module_from_spec(spec), dict(sys.modules), list(sys.meta_path)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("resize", "normalize"):
            patch.setattr(TorchvisionBackend, name, getattr(TorchvisionBackend, name))
        spec.loader.exec_module(module)
        sys.meta_path[:] = finders
        for name in set(sys.modules) - set(modules):
            del sys.modules[name]
        yield module.video_processor()


def expansion(settings: Mapping[str, Any]) -> Expansion:
    config = {"model_type": "qwen2_5_vl", "video_token_id": PAD}
    found = expansion_of("video", config, settings, lambda _: None)
    assert found is not None
    return found


def sizes(count: int) -> list[tuple[int, int, int]]:
    source = random.Random(43)
    made = [(source.randint(2, 64), source.randint(1, 1_200), source.randint(1, 1_200)) for _ in range(2 * count)]
    usable = [one for one in made if max(one[1:]) <= 200 * min(one[1:])]
    return [(2, 1, 1), (3, 1, 200), (768, 336, 336), (769, 1_080, 1_920), *usable[:count]]


@pytest.mark.parametrize("name", SETTINGS)
def test_videos_have_the_tokens_of_the_processor(processor: Any, name: str) -> None:
    original, made = processor(**SETTINGS[name]), expansion(SETTINGS[name])
    for frames, height, width in sizes(100):
        patches = original.get_num_of_video_patches(frames, height, width, {})
        if (tokens := patches // original.merge_size**2) <= 1 << 18:
            assert made.sequence(frames, height, width) == [PAD] * tokens, (frames, height, width)


@pytest.mark.parametrize("name", SETTINGS)
def test_processed_videos_have_these_tokens(processor: Any, name: str) -> None:
    import numpy as np  # noqa: PLC0415 - comes with vLLM

    original, made = processor(**SETTINGS[name], do_convert_rgb=False), expansion(SETTINGS[name])
    for frames, height, width in ((2, 48, 64), (5, 90, 50), (7, 30, 200)):
        pixels = np.zeros((frames, height, width, 3), np.uint8)
        grid = original(videos=[pixels], return_tensors="pt")["video_grid_thw"]
        assert len(made.sequence(frames, height, width)) == int(grid.prod()) // original.merge_size**2


def test_as_many_frames_are_sampled_as_by_vllm() -> None:
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY  # noqa: PLC0415
    from vllm.multimodal.video_decoders.base import VideoSourceMetadata, VideoTargetMetadata  # noqa: PLC0415

    loader, source = VIDEO_LOADER_REGISTRY.load("qwen2_vl"), random.Random(43)
    rates = (1.0, 12.5, 24.0, 30_000 / 1_001, 30.0, 60.0)
    cases = [(total, rate) for total in range(2, 1_600, 3) for rate in rates]
    cases += [(source.randint(2, 18_000), source.uniform(0.5, 120)) for _ in range(3_000)]
    for total, rate in cases:
        of_video = VideoSourceMetadata(total, rate, total / rate)
        sampled = loader.compute_frames_index_to_sample(of_video, VideoTargetMetadata(-1, 2, 300))
        for available in (total, total - 1):
            expected = len({at for at in sampled if at < available})
            assert sampled_frames(total, rate, available) == expected, (total, rate, available)


@pytest.mark.skipif(not HAS_AV, reason="the ingress needs PyAV to count frames")
def test_files_have_the_frames_and_sizes_that_vllm_decodes() -> None:
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY  # noqa: PLC0415

    loader, source = VIDEO_LOADER_REGISTRY.load("qwen2_vl"), random.Random(43)
    containers = {"mp4": "mov", "mov": "mov", "webm": "matroska", "matroska": "matroska", "avi": "avi"}
    codecs = {"mp4": ("libx264", "libx265", "mpeg4"), "webm": ("libvpx", "libvpx-vp9"), "mov": ("mjpeg", "libx264")}
    rates = (1, 2, 12, 24, Fraction(30_000, 1_001), 60)
    contents = [("mov", turned(clip(9))), ("mov", clip(451, rate=1))]
    for container, demuxer in containers.items():
        for codec in codecs.get(container, ("mpeg4", "libx264")[: 1 + (container == "matroska")]):
            for _ in range(6):
                size = (2 * source.randint(8, 60), 2 * source.randint(8, 60))
                frames, rate = source.choice((2, 3, 5, 31, 60, 97)), source.choice(rates)
                contents.append((demuxer, clip(frames, size, rate, container, codec)))
    for demuxer, content in contents:
        pixels, metadata = loader.load_bytes(content)
        assert sampled_size(MediaRef("video", "", "x"), content, demuxer) == pixels.shape[:3], json.dumps(metadata)
