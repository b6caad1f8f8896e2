"""Images and videos in chats: their tokens in the prompt, how they are fetched, and errors."""

import asyncio
import base64
import io
import json
import random
import re
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.block_hashes import mm_hashes, sequence_hashes
from forebay.events.base import unpack_u32
from forebay.events.media import MEDIA_BYTES_MAX, Media
from forebay.ingress.errors import ApiError
from forebay.ingress.media import fetch as fetching
from forebay.ingress.media.families import Expansion
from forebay.ingress.media.fetch import MediaFetcher, is_public
from forebay.ingress.media.tokens import FetchedMedia, MediaRef, MediaSettings, MediaTokens, media_tokens_of
from forebay.ingress.model import DEFAULT_MODEL, InvalidModel, Model
from forebay.ingress.model_cards import read_card
from forebay.ingress.openai.fields import parse
from forebay.ingress.openai.requests import ChatBody
from forebay.ingress.prepare import PreparedRequest
from forebay.workers.engines.vllm.media import raw_prompt
from tests.ingress import media_model
from tests.ingress.conftest import CHAT, MODULE_LOOP, NAME, Scene, make_scene
from tests.ingress.media_model import IMAGE_TOKENS, VIDEO_TOKENS
from tests.system import until

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
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
    (prepared,) = await scene.loaded.prepare(parse(ChatBody, msgspec.json.encode(body(*parts, **changes))), [])
    return prepared


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a model that accepts images and videos."""
    return Model(media_model.make(tmp_path_factory.mktemp("media") / "m"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_scene(loaded: Model) -> AsyncIterator[Scene]:
    async with make_scene(loaded, body_bytes_max=64 << 20) as made:
        yield made


@pytest.fixture
async def scene(loaded: Model) -> AsyncIterator[Scene]:
    async with make_scene(loaded) as made:
        yield made


async def rejects(scene: Scene, status: int, says: str, *parts: dict[str, Any]) -> None:
    """Check that a chat with these parts gets an error."""
    with pytest.raises(ApiError, match=says) as caught:
        await prepare(scene, *parts)
    assert caught.value.status == status


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


@MODULE_LOOP
async def test_block_hashes_depend_on_the_pixels(shared_scene: Scene) -> None:
    one, again, other = [
        await prepare(shared_scene, text("see"), image(png(color))) for color in ((1, 2, 3), (1, 2, 3), (1, 2, 4))
    ]
    assert one.token_ids == again.token_ids == other.token_ids
    assert one.sequence_hashes == again.sequence_hashes != other.sequence_hashes


async def test_text_templates_get_placeholders_in_the_text(tmp_path: Path) -> None:
    async with make_scene(Model(media_model.make(tmp_path / "plain", media_model.PLAIN))) as scene:
        prompt = await prepare(scene, text("a"), image(png()), text("b"))
        (place,) = prompt.media
        assert place.first_token == len(scene.model.encode("<|user|>a"))
        assert prompt.prompt_tokens == len(scene.model.encode("<|user|>ab")) + IMAGE_TOKENS


@MODULE_LOOP
async def test_list_templates_get_a_list_for_text_too(shared_scene: Scene) -> None:
    prompt = await prepare(shared_scene, text("hello"))
    assert (unpack_u32(prompt.token_ids), prompt.media) == (shared_scene.model.encode("<|user|>hello"), ())


@MODULE_LOOP
async def test_photos_of_phones_are_jpegs(shared_scene: Scene) -> None:
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
        (place,) = (await prepare(shared_scene, image(content.getvalue()))).media
        assert (place.mime, place.content) == ("image/jpeg", content.getvalue())


@MODULE_LOOP
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
async def test_animations_and_all_color_modes_are_images(shared_scene: Scene, kind: str) -> None:
    modes = {
        "PNG": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"],
        "WEBP": ["RGB", "RGBA"],
        "GIF": ["1", "L", "P", "RGB"],
    }
    for mode in modes[kind]:
        for frames in (1, 3):
            content, frame = io.BytesIO(), Image.new(mode, (8, 8))
            frame.save(content, kind, **({"save_all": True, "append_images": [frame] * 2} if frames > 1 else {}))
            (place,) = (await prepare(shared_scene, image(content.getvalue()))).media
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


@MODULE_LOOP
@pytest.mark.parametrize(
    ("head", "mime"),
    [
        (b"\x00\x00\x00\x14ftypqt  ", "video/quicktime"),
        (b"\x1aE\xdf\xa3\x9fB\x86\x81\x01B\x82\x84webm", "video/webm"),
        (b"\x1aE\xdf\xa3\x9fB\x86\x81\x01B\x82\x88matroska", "video/x-matroska"),
        (b"RIFF\x00\x00\x00\x00AVI LIST", "video/x-msvideo"),
    ],
)
async def test_video_types_are_detected_from_the_bytes(shared_scene: Scene, head: bytes, mime: str) -> None:
    (place,) = (await prepare(shared_scene, video(head + bytes(30)))).media
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
    found = response.json()["error"]
    assert response.status_code == status
    assert found["code"] == code or not code
    assert says in found["message"]
    assert found["message"].startswith(f"messages[0].content[1].{part['type']}.url: ")
    assert found["param"] == f"messages[0].content[1].{part['type']}.url"
    assert shared_scene.refusals() - before == {found["code"]: 1}
    assert shared_scene.requests() == []


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image_url"}, "messages[0].content[0].image_url is missing"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url.url is missing"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "high"}}, "image_url.detail is not supported"),
        ({"type": "image_url", "image_url": {"url": "x", "odd": 1}}, "image_url.odd"),
        ({"type": "text", "text": "a", "image_url": {"url": "x"}}, "image_url is not allowed with the type text"),
        (
            {"type": "input_audio", "input_audio": {}},
            "parts of type input_audio are not supported; supported types are text, image_url, video_url",
        ),
    ],
)
@MODULE_LOOP
async def test_invalid_parts_are_rejected_by_name(shared_scene: Scene, part: dict[str, Any], says: str) -> None:
    await rejects(shared_scene, 400, re.escape(says), part)


HALF = MP4 + bytes(9 + MEDIA_BYTES_MAX // 2)


@MODULE_LOOP
@pytest.mark.parametrize(
    ("parts", "status", "says"),
    [
        # Rejected before any is fetched.
        ([image("http://127.0.0.1/")] * 17, 400, r"content\[16\].image_url.url: a request may have at most 16"),
        ([video(HALF)] * 2, 413, "exceed 8 MiB together"),
        ([text("<image>"), image(png())], 400, "more placeholders of images than the 1 images of the request"),
        ([text("<video>")], 400, "more placeholders of videos than the 0 videos of the request"),
    ],
)
async def test_numbers_and_sizes_of_images_are_limited(
    shared_scene: Scene, parts: list[dict[str, Any]], status: int, says: str
) -> None:
    await rejects(shared_scene, status, says, *parts)


async def test_images_with_too_many_pixels_are_rejected(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "IMAGE_PIXELS_MAX", 1_000)
    await prepare(scene, image(png()))
    monkeypatch.setattr(fetching, "IMAGE_PIXELS_MAX", 100)
    await rejects(scene, 413, "has 16 x 16 pixels; the limit is 100 pixels", image(png()))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    await rejects(scene, 413, "too many pixels", image(png()))


async def test_without_pillow_images_are_rejected_with_the_install_command(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = png()
    monkeypatch.setitem(sys.modules, "PIL", None)
    await rejects(scene, 501, r"needs Pillow to decode images: pip install 'PATH\[media\]'", image(content))
    assert (await prepare(scene, video(MP4))).media


async def test_a_text_model_rejects_images() -> None:
    async with make_scene() as scene:
        await rejects(scene, 400, r"content\[0\].image_url.url: this model does not support images", image(png()))
        assert (await prepare(scene, text("a"), text("b"))).media == ()


SILENT = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
UNKNOWN = "images are not supported, because their tokens depend on"


@pytest.mark.parametrize(
    ("template", "config", "status", "says"),
    [
        (media_model.LISTED, {"model_type": "qwen2_vl"}, 501, UNKNOWN),
        (media_model.LISTED, {"image_seq_length": 576, "image_grid_pinpoints": [[336, 672]]}, 501, UNKNOWN),
        (media_model.LISTED, {"image_seq_length": True}, 501, UNKNOWN),
        (media_model.LISTED, {"image_seq_length": 0}, 501, UNKNOWN),
        (media_model.LISTED, {"image_seq_length": 1 << 20}, 501, UNKNOWN),
        (media_model.LISTED, {"image_seq_length": 4_096}, 400, "the context of 4096 has no room"),
        (SILENT, {}, 400, "the chat template omitted 1 of 1 images and videos"),
    ],
)
async def test_models_that_cannot_expand_an_image_reject_it(
    tmp_path: Path, template: str, config: dict[str, Any], status: int, says: str
) -> None:
    async with make_scene(Model(media_model.make(tmp_path / "m", template, **config))) as scene:
        await rejects(scene, status, says, text("see this"), image(png()))
        assert (await prepare(scene, text("but text is served"))).prompt_tokens


@pytest.mark.parametrize(("config", "status"), [({}, 501), ({"video_token_index": None}, 400)])
async def test_videos_are_rejected_with_a_hint_to_images(tmp_path: Path, config: dict[str, Any], status: int) -> None:
    async with make_scene(Model(media_model.make(tmp_path / "m", image_seq_length=6, **config))) as scene:
        await rejects(scene, status, r"video_url.url: .*videos?.*; send some of its frames as image_url", video(MP4))


def test_unknown_placeholder_tokens_are_ignored() -> None:
    config = {"image_token_id": 5, "image_seq_length": 3}
    nothing: dict[str, int] = {}
    assert media_tokens_of(config, lambda _: None, nothing.get, {}).ids == {}
    known = media_tokens_of({**config, "mm_tokens_per_image": 7}, lambda token_id: f"<{token_id}>", nothing.get, {})
    expansion = known.expansions["image"]
    assert expansion is not None
    assert (known.ids, expansion.sequence(1, 1), known.texts) == ({"image": 5}, [5] * 7, {"image": "<5>"})
    assert Model(DEFAULT_MODEL).media.ids == {}


OPEN = MediaSettings(allow_private=True)
ANY_SIZE = MediaTokens({}, {"image": Expansion(0, lambda *_: [0])}, {})
Answer = Callable[[str, dict[str, str], asyncio.StreamWriter], Awaitable[None]]


def response(status: str, content: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


class Site:
    """A small HTTP server that records path and host of each request."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str]] = []
        self.headers: dict[str, str] = {}
        self.port = 0
        self.held: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        path = head[0].split()[1]
        self.received.append((path, self.headers["host"]))
        if path == "/never":
            self.held.append(writer)
            return
        if path == "/endless":
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + MP4)
            while not writer.is_closing():
                writer.write(bytes(1 << 20))
                await writer.drain()
        elif path.startswith("/to/"):
            writer.write(response("302 Found", location=path.removeprefix("/to/")))
        elif path == "/torn":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + MP4)
        elif path == "/nonsense":
            writer.write(b"what?\r\n\r\n")
        elif path == "/video":
            writer.write(response("200 OK", MP4, content_type="image/png", set_cookie="who=you"))
        else:
            writer.write(response("404 Not Found", b"no"))
        await writer.drain()
        writer.close()


@asynccontextmanager
async def site(tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    made = Site()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await made.serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for writer in made.held:
            writer.close()


@asynccontextmanager
async def fetcher(settings: MediaSettings = OPEN) -> AsyncIterator[Callable[..., Awaitable[list[FetchedMedia]]]]:
    one = MediaFetcher(settings)

    async def fetch(*urls: str) -> list[FetchedMedia]:
        refs = [MediaRef("video", url, f"part[{at}]") for at, url in enumerate(urls)]
        return await one.fetch(refs, ANY_SIZE)

    yield fetch
    await one.close()


async def test_the_resolved_name_is_the_name_in_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own codec uses the older IDNA standard, in which this name is fass.test, another host."""
    fass = "xn--fa-hia.test"
    names = Names(monkeypatch, **{fass: [["127.0.0.1"]]})
    async with site() as there, fetcher() as fetch:
        await fetch(f"http://fa\u00df.test:{there.port}/video")
        assert there.received == [("/video", f"{fass}:{there.port}")]
    assert names.received == [fass]


async def test_slow_name_servers_do_not_delay_other_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    received = []

    def getaddrinfo(host: str, *_: Any, **__: Any) -> Any:
        received.append(host)
        released.wait(60)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with fetcher() as fetch:
        pending = [asyncio.ensure_future(fetch(*[f"http://slow{n}.test/{at}" for at in range(16)])) for n in range(4)]
        try:
            await until(lambda: len(received) >= fetching.FETCHES_MAX)
            async with asyncio.timeout(30):
                assert await asyncio.to_thread(lambda: "leases are looked at, say") is not None
        finally:
            released.set()
            await asyncio.gather(*pending, return_exceptions=True)


async def test_media_are_returned_in_order() -> None:
    async with site() as there, fetcher() as fetch:
        url = f"http://127.0.0.1:{there.port}/video"
        found = await fetch(url, f"http://127.0.0.1:{there.port}/to//to//to//video", url)
        assert [(one.mime, one.content) for one in found] == [("video/mp4", MP4)] * 3
        assert there.headers["accept-encoding"] == "identity"
        assert "cookie" not in there.headers


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/nothing", "responded with status 404"),
        ("/torn", "cannot be read"),
        ("/nonsense", "cannot be read"),
        ("/to/ftp://x/y", "the scheme is 'ftp'; it must be http, https or data"),
        ("/to//to//to//to//video", "it redirects more than 3 times"),
        ("/to/http://no-such-host.invalid/", "no-such-host.invalid is unknown"),
        ("/to/http://xn--a/", "cannot be read (InvalidCodepoint)"),
    ],
)
async def test_errors_name_the_reference(path: str, text: str) -> None:
    async with site() as there, fetcher() as fetch:
        with pytest.raises(ApiError) as refused:
            await fetch(f"http://127.0.0.1:{there.port}/video", f"http://127.0.0.1:{there.port}{path}")
        assert refused.value.status == 400
        assert text in refused.value.message
        assert refused.value.message.startswith("part[1]: ")


async def test_content_above_the_limit_is_not_read_completely() -> None:
    async with site() as there, fetcher() as fetch:
        with pytest.raises(ApiError, match="exceed 8 MiB together") as refused:
            await fetch(f"http://127.0.0.1:{there.port}/endless")
        assert refused.value.status == 413
    assert MEDIA_BYTES_MAX == 8 << 20


async def test_a_timeout_names_the_slow_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as there, fetcher() as fetch:
        await fetch(f"http://127.0.0.1:{there.port}/video")  # the next one has a connection and is fast
        monkeypatch.setattr(fetching, "TIMEOUT_S", 1.5)
        with pytest.raises(ApiError, match=r"part\[1\]: it did not arrive within 1.5 s"):
            await fetch(f"http://127.0.0.1:{there.port}/video", f"http://127.0.0.1:{there.port}/never")


async def test_a_refused_connection_is_an_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with fetcher() as fetch:
            with pytest.raises(ApiError, match=r"127.0.0.1 cannot be read \(ConnectError\)"):
                await fetch(f"http://127.0.0.1:{unused.getsockname()[1]}/")


class Names:
    """Replace name resolution: each lookup of a name returns its next addresses; the last ones repeat."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **responses: list[list[str]]) -> None:
        self.received: list[str] = []
        self._answers = {name.replace("_", "."): list(given) for name, given in responses.items()}
        own = socket.getaddrinfo

        def getaddrinfo(host: str, port: int, *args: Any, **more: Any) -> Any:
            known = self._answers.get(host)
            if known is None:
                return own(host, port, *args, **more)
            self.received.append(host)
            addresses = known.pop(0) if len(known) > 1 else known[0]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


async def test_the_connection_uses_the_checked_address(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, pictures_test=[["127.0.0.1"], ["203.0.113.9"]])
    async with site() as there, fetcher(MediaSettings(allow_hosts=("pictures.test",))) as fetch:
        assert await fetch(f"http://Pictures.Test:{there.port}/video")
        assert there.received == [("/video", f"pictures.test:{there.port}")]
        assert names.received == ["pictures.test"]


async def test_every_address_of_a_name_must_be_public(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, mixed_test=[["8.8.8.8", "10.0.0.7"]])
    async with fetcher(MediaSettings(allow_hosts=("other.test",))) as fetch:
        with pytest.raises(ApiError, match=r"mixed\.test is not a public address") as refused:
            await fetch("http://mixed.test/x")
        assert "10.0.0.7" not in refused.value.message, "nor is it told what is inside"


async def test_a_redirect_to_a_private_address_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, pictures_test=[["127.0.0.1"]])
    async with site() as there, fetcher(MediaSettings(allow_hosts=("pictures.test",))) as fetch:
        with pytest.raises(ApiError, match=r"127\.0\.0\.1 is not a public address"):
            await fetch(f"http://pictures.test:{there.port}/to/http://127.0.0.1:{there.port}/video")
        assert [path for path, _ in there.received] == [f"/to/http://127.0.0.1:{there.port}/video"]


async def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with site() as there, fetcher() as fetch:
        assert await fetch(f"http://127.0.0.1:{there.port}/video")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
async def test_certificates_are_checked_against_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ("-subj", "/CN=pictures.test", "-addext", "subjectAltName=DNS:pictures.test")
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject)
    made = [*command, "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, made, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    monkeypatch.setattr("certifi.where", lambda: str(certificate))
    Names(monkeypatch, pictures_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]])
    async with site(tls) as there, fetcher() as fetch:
        assert await fetch(f"https://pictures.test:{there.port}/video")
        with pytest.raises(ApiError, match=r"other\.test cannot be read"):
            await fetch(f"https://other.test:{there.port}/video")
        with pytest.raises(ApiError, match=r"127\.0\.0\.1 cannot be read"):
            await fetch(f"https://127.0.0.1:{there.port}/video")


PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1")


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.9.9.9", "169.254.169.254", "172.16.0.1"),
        *("192.0.0.1", "192.0.2.1", "192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1"),
        *("239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1"),
        *("fec0::1", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::10.0.0.1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::1", "2002:a00:1::1", "2001:0:4136:e378:8000:63bf:f5ff:fffe", "", "host"),
    ],
)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)
    assert all(map(is_public, PUBLIC))


@pytest.mark.parametrize(
    "url", ["http://xn--a/x", "https://xn--/", "http://[::1/", "http://a:b/", "http://\u2460.test/"]
)
async def test_an_invalid_url_is_rejected(url: str) -> None:
    async with fetcher() as fetch:
        with pytest.raises(ApiError, match=r"^part\[0\]: not a valid URL"):
            await fetch(url)


QWEN = {
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "merge_size": 2,
    "do_resize": True,
    "size": None,
}


def model(directory: Path, settings: dict[str, Any] | None = QWEN, model_type: str = "qwen2_vl", **nested: Any) -> Path:
    made = media_model.make(directory, model_type=model_type, **nested)
    if settings is not None:
        (made / "preprocessor_config.json").write_text(json.dumps(settings))
    return made


def encoded(size: tuple[int, int], kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    kept = io.BytesIO()
    Image.new(mode, size).save(kept, kind, **options)
    return kept.getvalue()


def header(width: int, height: int) -> bytes:
    """Return the beginning of a PNG, without pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return chunk + struct.pack(">I", 1_000) + b"IDAT"


async def measured(contents: Sequence[bytes]) -> list[tuple[int, ...]]:
    fetcher = MediaFetcher(MediaSettings())
    try:
        return [(await fetcher.fetch([MediaRef("image", data_url(one), "x")], ANY_SIZE))[0].size for one in contents]
    finally:
        await fetcher.close()


def decoded(content: bytes) -> tuple[int, int]:
    """Return the height and width of an image that the vLLM engine passes to vLLM."""
    one = Media(kind="image", digest=sha256(content).hexdigest(), mime="", first_token=0, tokens=1, content=content)
    item: Any = SimpleNamespace(media=(one,), token_ids=bytes(4))
    (found,) = raw_prompt(item, "")["multi_modal_data"]["image"]
    return (found.height, found.width)


async def test_counted_size_is_that_which_the_engine_decodes() -> None:
    frames: dict[str, Any] = {"save_all": True, "append_images": [Image.new("RGB", (12, 30))] * 2}
    contents = [
        encoded((12, 30)),
        encoded((12, 30), "GIF", "P"),
        encoded((12, 30), "GIF", **frames),
        encoded((12, 30), "WEBP", "RGBA", save_all=True, append_images=[Image.new("RGBA", (12, 30))]),
        encoded((12, 30), "JPEG", "CMYK"),
        encoded((12, 30), "PNG", "LA"),
        encoded((12, 30), "PNG", "P", transparency=0),
        encoded((1, 1), "WEBP"),
    ]
    assert await measured(contents) == [*[(30, 12)] * 7, (1, 1)]
    assert list(map(decoded, contents)) == [*[(30, 12)] * 7, (1, 1)]
    for kind in ("JPEG", "PNG", "WEBP"):
        turned = []
        for orientation in range(10):
            exif = Image.Exif()
            exif[0x0112] = orientation
            turned.append(encoded((12, 30), kind, exif=exif))
        expected = [(12, 30) if orientation in (5, 6, 7, 8) else (30, 12) for orientation in range(10)]
        assert await measured(turned) == list(map(decoded, turned)) == expected


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow warns of damaged data
async def test_damaged_exif_turns_an_image_at_the_ingress_as_in_the_engine() -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x9286] = 6, "maker", b"comment"
    exif.get_ifd(0x8769)[0x9003] = "2026:01:01 00:00:00"
    whole = bytearray(encoded((12, 30), "JPEG", exif=exif))
    begin = whole.index(b"Exif")
    end = begin - 2 + int.from_bytes(whole[begin - 2 : begin])
    source, contents = random.Random(11), []
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(source.randint(1, 3)):
            damaged[source.randrange(begin + 6, end)] = source.choice([0, 1, 2, 5, 6, 8, 255])
        contents.append(bytes(damaged))
    sizes = await measured(contents)
    assert sizes == list(map(decoded, contents))
    assert set(sizes) == {(12, 30), (30, 12)}


async def test_tokens_depend_on_the_size(tmp_path: Path) -> None:
    async with make_scene(Model(model(tmp_path / "m"))) as scene:
        for size, tokens in (((1, 1), 4), ((28, 56), 6), ((560, 280), 200), ((1, 200), 29), ((200, 1), 29)):
            (place,) = (await prepare(scene, text("see"), image(encoded(size)))).media
            assert (place.tokens, place.replaced) == (tokens, ())
        both = await prepare(scene, image(encoded((280, 280))), text("and"), image(encoded((56, 112))))
        assert [(one.first_token, one.tokens) for one in both.media][1][1] == 8
        assert both.prompt_tokens == len(scene.model.encode("<|user|>and")) + 100 + 8


async def test_unsupported_sizes_are_rejected_before_they_are_decoded(tmp_path: Path) -> None:
    async with make_scene(Model(model(tmp_path / "m"))) as scene:
        says = r"messages\[0\].content\[0\].image_url.url: the image has 201 x 1 pixels, but .* up to 200; crop it"
        await rejects(scene, 400, says, image(header(201, 1)))
        await rejects(scene, 400, "the image has 1 x 4000000 pixels", image(header(1, 4_000_000)))
        await rejects(scene, 400, "not a valid image", image(header(200, 1)))
        await rejects(scene, 413, "too many pixels", image(header(100_000, 100_000)))
        await rejects(scene, 413, "8000 x 8000 pixels; the limit is 40,000,000 pixels", image(header(8_000, 8_000)))
        await rejects(scene, 400, "not a valid image", image(header(0, 10)))
        await rejects(scene, 400, "the context of 4096 has no room", image(encoded((2_000, 2_000), "GIF", "1")))


async def test_settings_of_the_processor(tmp_path: Path) -> None:
    nested = model(tmp_path / "nested", {"patch_size": 1})
    (nested / "processor_config.json").write_text(json.dumps({"image_processor": QWEN | {"patch_size": 28}}))
    async with make_scene(Model(nested)) as scene:
        (place,) = (await prepare(scene, image(encoded((560, 560))))).media
        assert place.tokens == 100
    card = read_card(nested)
    assert card is not None
    assert {"processor_config.json", "preprocessor_config.json"} <= card[1].keys()
    async with make_scene(Model(model(tmp_path / "without", None))) as scene:
        await rejects(scene, 501, "than in qwen2_vl, .* with a preprocessor_config.json", image(encoded((9, 9))))
    with pytest.raises(InvalidModel, match=r"image processor are invalid: Expected `int` >= 1 - at `\$.patch_size`"):
        Model(model(tmp_path / "invalid", {"patch_size": 0}))
    with pytest.raises(InvalidModel, match="Llama 4 needs a square"):
        Model(model(tmp_path / "llama", {"size": {"height": 1, "width": 2}}, "llama4"))
    async with make_scene(Model(model(tmp_path / "tokens", QWEN, "internvl"))) as scene:  # <img> is no token
        await rejects(scene, 501, "images are not supported", image(encoded((9, 9))))
