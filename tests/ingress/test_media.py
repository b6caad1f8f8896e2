"""Images and videos in chats: their tokens in the prompt, and errors."""

import base64
import io
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.block_hashes import mm_hashes, sequence_hashes
from forebay.events.base import unpack_u32
from forebay.events.media import MEDIA_BYTES_MAX
from forebay.ingress.errors import ApiError
from forebay.ingress.media import fetch as media_module
from forebay.ingress.media.tokens import media_tokens_of
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.openai.fields import parse
from forebay.ingress.openai.requests import ChatBody
from forebay.ingress.prepare import PreparedRequest
from tests.ingress import media_model
from tests.ingress.conftest import MODULE_LOOP, NAME, Scene, make_scene
from tests.ingress.media_model import IMAGE_TOKENS, VIDEO_TOKENS

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

CHAT = "/v1/chat/completions"
MP4 = b"\x00\x00\x00\x18ftypmp42" + bytes(20)


def png(color: tuple[int, int, int] = (200, 30, 90), size: int = 16, kind: str = "PNG") -> bytes:
    kept = io.BytesIO()
    Image.new("RGB", (size, size), color).save(kept, kind)
    return kept.getvalue()


def data_url(content: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


def image(content: bytes | str) -> dict[str, Any]:
    url = content if isinstance(content, str) else data_url(content)
    return {"type": "image_url", "image_url": {"url": url}}


def video(content: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(content, "video/mp4")}}


def text(output: str) -> dict[str, Any]:
    return {"type": "text", "text": output}


def body(*parts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 3, **changes}


async def prepare(scene: Scene, *parts: dict[str, Any], **changes: Any) -> PreparedRequest:
    (prepared,) = await scene.ingress.prepare(parse(ChatBody, msgspec.json.encode(body(*parts, **changes))), [])
    return prepared


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    model = Model(media_model.make(tmp_path_factory.mktemp("media") / "m"))
    async with make_scene(model, body_bytes_max=64 << 20) as made:
        yield made


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with make_scene(Model(media_model.make(tmp_path / "m"))) as made:
        yield made


async def test_an_image_is_expanded_to_the_tokens_of_the_model(scene: Scene) -> None:
    content, frames = png(), MP4
    payload = body(text("What is this"), image(content), text("and"), video(frames), text("?"))
    waiting = scene.start(CHAT, payload)
    event = await scene.next_request()
    name = event.request_id
    scene.reply(name, " a cat")
    assert (await waiting).status_code == 200
    model = scene.model
    before, between, after = (model.encode(part) for part in ("<|user|>What is this", "and", "?"))
    ids = model.media.ids
    expected = [*before, *[ids["image"]] * IMAGE_TOKENS, *between, *[ids["video"]] * VIDEO_TOKENS, *after]
    assert unpack_u32(event.token_ids) == expected
    shown, moving = event.media
    assert (shown.kind, shown.mime, shown.first_token, shown.tokens) == ("image", "image/png", len(before), 6)
    assert (moving.kind, moving.mime, moving.tokens) == ("video", "video/mp4", 9)
    assert (shown.content, moving.content) == (content, frames)
    assert moving.first_token == len(before) + IMAGE_TOKENS + len(between)
    assert event.sequence_hashes == sequence_hashes(event.token_ids, 4, mm_hashes=mm_hashes(event.media, 4))
    assert event.sequence_hashes != sequence_hashes(event.token_ids, 4)


async def test_block_hashes_depend_on_the_pixels(scene: Scene) -> None:
    one, again, other = [
        await prepare(scene, text("see"), image(png(color))) for color in ((1, 2, 3), (1, 2, 3), (1, 2, 4))
    ]
    assert one.token_ids == again.token_ids == other.token_ids
    assert one.sequence_hashes == again.sequence_hashes != other.sequence_hashes


async def test_text_templates_get_placeholders_in_the_text(tmp_path: Path) -> None:
    async with make_scene(Model(media_model.make(tmp_path / "plain", media_model.PLAIN))) as scene:
        prompt = await prepare(scene, text("a"), image(png()), text("b"))
        (place,) = prompt.media
        assert place.first_token == len(scene.model.encode("<|user|>a"))
        assert prompt.prompt_tokens == len(scene.model.encode("<|user|>ab")) + IMAGE_TOKENS


async def test_list_templates_get_a_list_for_text_too(scene: Scene) -> None:
    prompt = await prepare(scene, text("hello"))
    assert (unpack_u32(prompt.token_ids), prompt.media) == (scene.model.encode("<|user|>hello"), ())


async def test_photos_of_phones_are_jpegs(scene: Scene) -> None:
    """A JPEG may have further pictures, any orientation and any color mode."""
    photo, turned = Image.new("RGB", (16, 8)), Image.Exif()
    turned[0x0112] = 6
    options: list[tuple[Any, str, dict[str, Any]]] = [
        (photo, "MPO", {"save_all": True, "append_images": [Image.new("RGB", (4, 4))]}),
        (photo, "MPO", {"save_all": True, "append_images": [Image.new("L", (4, 4))] * 3, "exif": turned}),
        (photo, "JPEG", {"exif": turned, "progressive": True}),
        (photo.convert("CMYK"), "JPEG", {}),
        (photo.convert("L"), "JPEG", {}),
    ]
    for one, kind, fields in options:
        content = io.BytesIO()
        one.save(content, kind, **fields)
        (place,) = (await prepare(scene, image(content.getvalue()))).media
        assert (place.mime, place.content) == ("image/jpeg", content.getvalue())


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
async def test_animations_and_all_color_modes_are_images(scene: Scene, kind: str) -> None:
    modes = {
        "PNG": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"],
        "WEBP": ["RGB", "RGBA"],
        "GIF": ["1", "L", "P", "RGB"],
    }
    for mode in modes[kind]:
        for frames in (1, 3):
            content, frame = io.BytesIO(), Image.new(mode, (8, 8))
            frame.save(content, kind, **({"save_all": True, "append_images": [frame] * 2} if frames > 1 else {}))
            (place,) = (await prepare(scene, image(content.getvalue()))).media
            assert place.mime == f"image/{kind.lower()}"


@MODULE_LOOP
@given(
    content=st.binary(min_size=1, max_size=80),
    head=st.sampled_from([";base64", ";charset=utf-8;BASE64", "image/png; base64 ", "video/mp4;a=b;base64"]),
    is_for_urls=st.booleans(),
    is_padded=st.booleans(),
    is_quoted=st.booleans(),
    fold=st.integers(1, 80),
    white_space=st.sampled_from(["", " ", "\n", "\r\n", "\t", "\f"]),
)
async def test_base64_may_be_folded_without_padding_and_for_urls(
    shared_scene: Scene,
    content: bytes,
    head: str,
    fold: int,
    white_space: str,
    *,
    is_for_urls: bool,
    is_padded: bool,
    is_quoted: bool,
) -> None:
    content = MP4 + content
    encoded = (base64.urlsafe_b64encode if is_for_urls else base64.b64encode)(content).decode()
    encoded = encoded if is_padded else encoded.rstrip("=")
    encoded = white_space.join(encoded[at : at + fold] for at in range(0, len(encoded), fold)) + white_space
    url = f"data:{head},{quote(encoded) if is_quoted else encoded}"
    (place,) = (await prepare(shared_scene, {"type": "video_url", "video_url": {"url": url}})).media
    assert place.content == content


@pytest.mark.parametrize(
    ("head", "mime"),
    [
        (b"\x00\x00\x00\x14ftypqt  ", "video/quicktime"),
        (b"\x1aE\xdf\xa3\x9fB\x86\x81\x01B\x82\x84webm", "video/webm"),
        (b"\x1aE\xdf\xa3\x9fB\x86\x81\x01B\x82\x88matroska", "video/x-matroska"),
        (b"RIFF\x00\x00\x00\x00AVI LIST", "video/x-msvideo"),
    ],
)
async def test_video_types_are_detected_from_the_bytes(scene: Scene, head: bytes, mime: str) -> None:
    (place,) = (await prepare(scene, video(head + bytes(30)))).media
    assert place.mime == mime


LARGE = base64.b64encode(bytes(MEDIA_BYTES_MAX + 1)).decode()


@MODULE_LOOP
@pytest.mark.parametrize(
    ("part", "status", "code", "says"),
    [
        (image("ftp://a/b"), 400, "invalid_media_url", "the scheme is 'ftp'; it must be http, https or data"),
        (image("x"), 400, "invalid_media_url", "the scheme is ''"),
        (image("http://"), 400, "invalid_media_url", "the URL has no host"),
        (image("https://user:pass@host/x"), 400, "invalid_media_url", "user name"),
        (image("http://h/" + "x" * 9_000), 400, "invalid_media_url", "longer than 8192 characters"),
        (image("http://[1::2::3]/"), 400, "invalid_media_url", "not a valid URL"),
        (image("data:image/png"), 400, "invalid_media_url", "the data URL has no comma"),
        (image("data:image/png;base64,@@"), 400, "invalid_media_url", "not valid base64"),
        (image("data:image/png;base64,A"), 400, "invalid_media_url", "not valid base64"),
        (image("data:image/png;base64,AA=A"), 400, "invalid_media_url", "not valid base64"),
        (image("data:image/png;base64,Ä"), 400, "invalid_media_url", "not valid base64"),
        (image("data:image/png;base64,"), 400, "invalid_media_url", "the content is empty"),
        (image("data:,plain%20text"), 400, "not_an_image", "not a valid image; supported formats are PNG, JPEG"),
        (image(b"<svg/>"), 400, "not_an_image", "not a valid image"),
        (image(png()[:60]), 400, "not_an_image", "not a valid image"),
        (image(MP4), 400, "not_an_image", "not a valid image"),
        (video(png()), 400, "not_a_video", "not a valid video; supported formats are MP4"),
        (image(f"data:;base64,{LARGE}"), 413, "media_too_large", "exceed 8 MiB together"),
        (image("http://127.0.0.1:1/x.png"), 400, "private_media_url", "127.0.0.1 is not a public address"),
        (image("http://[::1]/x.png"), 400, "private_media_url", "is not a public address"),
        (image("http://[::ffff:10.0.0.1]/x.png"), 400, "private_media_url", "is not a public address"),
        (image("http://0x7f.1/x.png"), 400, "", ""),
        (image("http://localhost/x.png"), 400, "private_media_url", "localhost is not a public address"),
        (image("http://no-such-host.invalid/x.png"), 400, "media_unavailable", "no-such-host.invalid is unknown"),
    ],
)
async def test_unsupported_media_are_rejected_with_their_path(
    shared_scene: Scene, part: dict[str, Any], status: int, code: str, says: str
) -> None:
    before = shared_scene.refusals()
    response = await shared_scene.client.post(CHAT, json=body(text("see"), part))
    error = response.json()["error"]
    assert response.status_code == status
    assert error["code"] == code or not code
    assert says in error["message"]
    assert error["message"].startswith(f"messages[0].content[1].{part['type']}.url: ")
    assert error["param"] == f"messages[0].content[1].{part['type']}.url"
    assert shared_scene.refusals() - before == {error["code"]: 1}
    assert shared_scene.requests() == []


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image_url"}, "messages[0].content[0].image_url is missing"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url.url is missing"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "high"}}, "image_url.detail is not supported"),
        ({"type": "image_url", "image_url": {"url": "x", "odd": 1}}, "image_url.odd"),
        ({"type": "text", "text": "a", "image_url": {"url": "x"}}, "image_url is not allowed in a part of type text"),
        ({"type": "input_audio", "input_audio": {}}, "parts of type input_audio are not supported"),
    ],
)
async def test_invalid_parts_are_rejected_by_name(scene: Scene, part: dict[str, Any], says: str) -> None:
    response = await scene.client.post(CHAT, json=body(part))
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


async def test_too_many_images_are_rejected_before_any_is_fetched(scene: Scene) -> None:
    with pytest.raises(ApiError, match=r"messages\[0\].content\[16\].image_url.url: a request may have at most 16"):
        await prepare(scene, *[image("http://127.0.0.1/")] * 17)


async def test_images_share_one_limit(scene: Scene) -> None:
    half = b"\x00" * 9 + bytes(MEDIA_BYTES_MAX // 2)
    with pytest.raises(ApiError, match="exceed 8 MiB together") as refused:
        await prepare(scene, video(MP4 + half), video(MP4 + half))
    assert refused.value.status == 413


@pytest.mark.parametrize(("most", "says"), [(100, "has 16 x 16 pixels; the limit is 100 pixels"), (1_000, None)])
async def test_images_with_too_many_pixels_are_rejected(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, most: int, says: str | None
) -> None:
    monkeypatch.setattr(media_module, "IMAGE_PIXELS_MAX", most)
    if says is None:
        await prepare(scene, image(png()))
        return
    with pytest.raises(ApiError, match=says):
        await prepare(scene, image(png()))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ApiError, match="too many pixels"):
        await prepare(scene, image(png()))


async def test_without_pillow_images_are_rejected_with_the_install_command(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = png()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ApiError, match=r"install Pillow with pip install 'forebay\[media\]'") as refused:
        await prepare(scene, image(content))
    assert (refused.value.status, refused.value.code) == (501, "media_not_installed")
    assert (await prepare(scene, video(MP4))).media


async def test_a_text_model_rejects_images() -> None:
    async with make_scene() as scene:
        with pytest.raises(ApiError, match=r"content\[0\].image_url.url: this model does not support images"):
            await prepare(scene, image(png()))
        assert (await prepare(scene, text("a"), text("b"))).media == ()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2_vl"},
        {"image_seq_length": 576, "image_grid_pinpoints": [[336, 672]]},
        {"image_seq_length": True},
        {"image_seq_length": 0},
        {"image_seq_length": 1 << 20},
    ],
)
async def test_models_without_a_fixed_number_of_image_tokens_are_rejected(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    async with make_scene(Model(media_model.make(tmp_path / "m", **config))) as scene:
        with pytest.raises(ApiError, match="images are not supported, because their tokens depend on") as refused:
            await prepare(scene, image(png()))
        assert refused.value.status == 501
        assert (await prepare(scene, text("but text is served"))).prompt_tokens


async def test_the_numbers_of_placeholders_and_images_must_match(tmp_path: Path, scene: Scene) -> None:
    with pytest.raises(ApiError, match="more placeholders of images than the 1 images of the request"):
        await prepare(scene, text("<image>"), image(png()))
    with pytest.raises(ApiError, match="more placeholders of videos than the 0 videos of the request"):
        await prepare(scene, text("<video>"))
    silent = media_model.make(
        tmp_path / "silent", "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    async with make_scene(Model(silent)) as other:
        with pytest.raises(ApiError, match="the chat template omitted 1 of 1 images and videos"):
            await prepare(other, text("see"), image(png()))


async def test_expanded_placeholders_must_fit_the_context(tmp_path: Path) -> None:
    config: dict[str, Any] = {"image_seq_length": 4_090, "max_position_embeddings": 4_096}
    async with make_scene(Model(media_model.make(tmp_path / "m", **config))) as scene:
        with pytest.raises(ApiError, match="exceed the context of 4096 tokens"):
            await prepare(scene, text("see this"), image(png()))


def test_unknown_placeholder_tokens_are_ignored() -> None:
    config = {"image_token_id": 5, "image_seq_length": 3}
    assert media_tokens_of(config, lambda _: None).ids == {}
    known = media_tokens_of({**config, "mm_tokens_per_image": 7}, lambda token_id: f"<{token_id}>")
    assert (known.ids, known.counts, known.texts) == ({"image": 5}, {"image": 7}, {"image": "<5>"})
    assert Model(DEFAULT_MODEL).media.ids == {}
