"""Videos in chats for models that sample frames: their tokens, and invalid or too large ones."""

import base64
import io
import json
import sys
from collections.abc import AsyncIterator, Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from forebay.ingress.errors import ApiError
from forebay.ingress.media import families, video
from forebay.ingress.model import Model
from forebay.ingress.openai.fields import parse
from forebay.ingress.openai.requests import ChatBody
from tests.harness.clips import clip, turned
from tests.ingress import media_model
from tests.ingress.conftest import MODULE_LOOP, NAME, Scene, make_scene

pytest.importorskip("av", reason="PyAV is not installed")

SETTINGS = {"patch_size": 8, "merge_size": 2, "min_pixels": 4 * 16 * 16, "max_pixels": 64 * 16 * 16}
CLIP = clip()


def make(directory: Path, model_type: str = "qwen2_vl", **settings: Any) -> Model:
    media_model.make(directory, model_type=model_type)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "video_token_id": config["video_token_index"]}))
    (directory / "preprocessor_config.json").write_text(json.dumps(SETTINGS | settings))
    return Model(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make(tmp_path_factory.mktemp("videos") / "m")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(model: Model) -> AsyncIterator[Scene]:
    async with make_scene(model) as made:
        yield made


async def tokens(scene: Scene, content: bytes) -> int:
    """Return the number of tokens of a video in a chat."""
    url = f"data:video/mp4;base64,{base64.b64encode(content).decode()}"
    part = {"type": "video_url", "video_url": {"url": url}}
    body = {"model": NAME, "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}
    (prepared,) = await scene.loaded.prepare(parse(ChatBody, msgspec.json.encode(body)), [])
    (place,) = prepared.media
    assert (place.kind, place.content) == ("video", content)
    return place.tokens


async def rejection(scene: Scene, content: bytes) -> tuple[int, str, str]:
    with pytest.raises(ApiError) as caught:
        await tokens(scene, content)
    return caught.value.status, caught.value.code, str(caught.value)


@pytest.mark.parametrize(
    ("content", "frames"),
    [
        (clip(container="mov", codec="mjpeg"), 4),
        (clip(container="webm", codec="libvpx-vp9"), 4),
        (clip(container="matroska", codec="libx264"), 4),
        (clip(container="avi"), 4),
        (clip(2), 2),
        (clip(3), 2),
        (clip(31, rate=Fraction(30_000, 1_001)), 4),
        (clip(96, rate=24), 8),
        (clip(9, rate=1), 8),
        (clip(12, rate=24, every=20), 8),  # 12 frames in 4.5 s
        (clip(451, rate=1), 451),  # vLLM's step between samples is rounded, so it takes one more than 450
    ],
)
@MODULE_LOOP
async def test_a_video_has_the_tokens_of_each_two_sampled_frames(scene: Scene, content: bytes, frames: int) -> None:
    assert await tokens(scene, content) == (frames + 1) // 2 * 3 * 4


@MODULE_LOOP
async def test_each_frame_is_resized_like_an_image(scene: Scene) -> None:
    assert await tokens(scene, clip(size=(16, 16))) == 2 * 2 * 2
    assert await tokens(scene, clip(size=(480, 640))) == 2 * 6 * 9
    assert await tokens(scene, clip(size=(32, 64))) == 2 * 2 * 4


@MODULE_LOOP
async def test_a_turned_video_has_the_size_that_the_engine_decodes(scene: Scene) -> None:
    size = video.sampled_size(None, turned(CLIP), "mov")  # type: ignore[arg-type]
    assert size == (4, 64, 48)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (CLIP[: len(CLIP) // 2], "not a valid video"),
        ((webm := clip(container="webm", codec="libvpx"))[: len(webm) * 2 // 3], "truncated, or its frame rate varies"),
        (clip(container="webm", codec="libvpx", every=5), "it has 12 frames, but its container announces 32"),
        (clip(1), "it has 1 frames; the model needs at least 2"),
        (clip(codec="mpeg2video"), "its codec is mpeg2video; supported codecs are h264, hevc"),
        (CLIP[:40] + bytes(len(CLIP) - 40), "not a valid video"),
        (b"\x00\x00\x00\x14ftypisom" + bytes(99), "not a valid video"),
    ],
)
@MODULE_LOOP
async def test_unusable_videos_are_rejected(scene: Scene, content: bytes, says: str) -> None:
    status, code, message = await rejection(scene, content)
    assert (status, code) == (400, "not_a_video")
    assert "messages[0].content[0].video_url.url: " in message and says in message


@MODULE_LOOP
async def test_a_video_that_lost_its_end_is_rejected(scene: Scene, tmp_path: Path) -> None:
    import av  # noqa: PLC0415 - an extra

    path = tmp_path / "front.mp4"
    with av.open(path, "w", options={"movflags": "faststart"}) as output:
        stream: Any = output.add_stream("mpeg4", rate=24)
        stream.width = stream.height = 64
        for _ in range(12):
            output.mux(stream.encode(av.VideoFrame(64, 64, "yuv420p")))
        output.mux(stream.encode())
    front, back = path.read_bytes(), clip(container="avi", codec="mjpeg")
    assert (await tokens(scene, front), await tokens(scene, back)) == (2 * 4 * 4, 2 * 3 * 4)
    cuts = [(front, ends(front)[6]), (front, len(front) - 1), (back, ends(back)[-1] - 1)]
    for content, end in cuts:
        assert (await rejection(scene, content[:end]))[1:] == (
            "not_a_video",
            "messages[0].content[0].video_url.url: not a valid video: it is truncated",
        )


def ends(content: bytes) -> list[int]:
    """Return the end of each frame in a file."""
    import av  # noqa: PLC0415 - an extra

    with av.open(io.BytesIO(content), "r") as opened:
        return [(packet.pos or 0) + packet.size for packet in opened.demux() if packet.size]


@pytest.mark.parametrize(
    ("limit", "value", "says"),
    [
        ("FRAME_PIXELS_MAX", 3_000, "64 x 48 pixels; the limit is 3,000 pixels"),
        ("FRAMES_MAX", 11, "more than 11 frames of 64 x 48; the limit is 11 frames and"),
        ("DECODED_PIXELS_MAX", 11 * 64 * 48, "more than 11 frames of 64 x 48; the limit is 18,000 frames and 33,792"),
        ("SAMPLED_PIXELS_MAX", 10_000, "4 sampled frames of 64 x 48 pixels; the limit is 10,000 pixels together"),
    ],
)
@MODULE_LOOP
async def test_too_large_videos_are_rejected(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, says: str
) -> None:
    monkeypatch.setattr(video, limit, value)
    status, code, message = await rejection(scene, CLIP)
    assert (status, code) == (413, "media_too_large") and says in message


@MODULE_LOOP
async def test_videos_with_too_many_tokens_are_rejected(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "TOKENS_MAX", 23)
    status, code, message = await rejection(scene, CLIP)
    assert (status, code) == (400, "unsupported_video_size")
    assert "the video has 4 frames of 64 x 48 pixels, but they are 24 tokens; the limit is 23" in message


@MODULE_LOOP
async def test_without_pyav_videos_are_rejected_with_the_install_command(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    status, code, message = await rejection(scene, CLIP)
    assert (status, code) == (501, "media_not_installed")
    assert "needs PyAV to count the frames of videos: pip install 'PATH[media]'" in message


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("preprocessor_config.json", SETTINGS | {"max_pixels": 4 * 16 * 16}, 2 * 1 * 2),
        ("video_preprocessor_config.json", {"patch_size": 16, "min_pixels": 1}, 2 * 2 * 2),
        ("processor_config.json", {"video_processor": {"temporal_patch_size": 4, **SETTINGS}}, 3 * 4),
        ("preprocessor_config.json", {"patch_size": 14}, 2 * 10 * 14),
    ],
)
async def test_settings_are_those_of_the_video_processor(
    tmp_path: Path, file: str, content: dict[str, Any], expected: int
) -> None:
    make(tmp_path / "m")
    (tmp_path / "m" / file).write_text(json.dumps(content))
    async with make_scene(Model(tmp_path / "m")) as scene:
        assert await tokens(scene, CLIP) == expected


@pytest.mark.parametrize(
    "make_other",
    [lambda to: make(to, "qwen3_vl"), lambda to: make(to, cap_pixels_per_frame=True)],
    ids=["qwen3_vl", "capped"],
)
async def test_models_whose_videos_are_not_supported(tmp_path: Path, make_other: Callable[[Path], Model]) -> None:
    async with make_scene(make_other(tmp_path / "m")) as scene:
        status, code, message = await rejection(scene, CLIP)
        assert (status, code) == (501, "unsupported_parameter")
        assert "send some of its frames as image_url in another way than in qwen2_vl, qwen2_5_vl with a" in message
