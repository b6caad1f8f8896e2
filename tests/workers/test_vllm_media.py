"""Prompts with images and videos for vLLM: one placeholder each, identified by their digests."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.media import Media
from forebay.workers.engines.standin_encoder import MediaUnusable
from forebay.workers.engines.vllm.media import MediaRefused, collapsed, embedded_prompt, engine_prompt, raw_prompt
from tests.workers.conftest import work_item

np = pytest.importorskip("numpy", reason="numpy is not installed")
PLACEHOLDER = 99


def media(first_token: int, tokens: int, kind: str = "image", content: bytes = b"") -> Media:
    digest = f"{first_token:064x}"
    fields = {"kind": kind, "digest": digest, "mime": "image/png", "first_token": first_token, "tokens": tokens}
    return Media(**fields, content=content)  # type: ignore[arg-type]


pieces = st.lists(st.tuples(st.lists(st.integers(0, 50), max_size=4), st.integers(1, 5)), max_size=4)


@given(pieces, st.lists(st.integers(0, 50), max_size=4))
def test_runs_of_placeholders_are_collapsed(pieces: list[tuple[list[int], int]], tail: list[int]) -> None:
    short: list[int] = []
    long: list[int] = []
    places = []
    for text, tokens in pieces:
        short += [*text, PLACEHOLDER]
        places.append(media(len(long) + len(text), tokens))
        long += [*text, *[PLACEHOLDER] * tokens]
    assert collapsed([*long, *tail], places) == [*short, *tail]


def test_embeddings_are_cut_by_item_and_kind() -> None:
    some = (media(1, 2), media(4, 3, "video"), media(8, 1))
    item = work_item("r", [5, 99, 99, 6, 98, 98, 98, 7, 99], 3, media=some)
    rows = np.arange(12.0).reshape(6, 2)
    prompt = embedded_prompt(item, rows)
    assert prompt["prompt_token_ids"] == [5, 99, 6, 98, 7, 99]
    assert [one.tolist() for one in prompt["multi_modal_data"]["image"]] == [[[0, 1], [2, 3]], [[10, 11]]]
    assert [one.tolist() for one in prompt["multi_modal_data"]["video"]] == [[[4, 5], [6, 7], [8, 9]]]
    assert prompt["multi_modal_uuids"] == {"image": [f"{1:064x}", f"{8:064x}"], "video": [f"{4:064x}"]}


def test_images_are_decoded_and_videos_are_not() -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    from tests.workers.pictures import png  # noqa: PLC0415 - it needs Pillow

    prompt = raw_prompt(work_item("r", [1, 99, 99], 2, media=(media(1, 2, content=png()),)))
    (image,) = prompt["multi_modal_data"]["image"]
    assert (image.mode, image.size, prompt["prompt_token_ids"]) == ("RGB", (16, 16), [1, 99])
    with pytest.raises(MediaUnusable, match="cannot decode an image"):
        raw_prompt(work_item("r", [1, 99], 2, media=(media(1, 1, content=b"no"),)))
    with pytest.raises(MediaUnusable, match="cannot decode the frames of a video; start an encode worker"):
        raw_prompt(work_item("r", [1, 99], 2, media=(media(1, 1, "video"),)))


def test_photos_are_upright_and_transparent_pixels_are_white() -> None:
    """As in vLLM's own server and in Hugging Face's processors."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    turned = image.Exif()
    turned[0x0112] = 6

    def pixels(mode: str, kind: str, color: Any, **fields: Any) -> Any:
        content = io.BytesIO()
        image.new(mode, (16, 8), color).save(content, kind, **fields)
        (found,) = raw_prompt(work_item("r", [99], 1, media=(media(0, 1, content=content.getvalue()),)))[
            "multi_modal_data"
        ]["image"]
        assert found.mode == "RGB"
        return found.size, found.getpixel((0, 0))

    assert pixels("RGB", "PNG", "red", exif=turned) == ((8, 16), (255, 0, 0))
    assert pixels("RGB", "JPEG", "black", exif=turned) == ((8, 16), (0, 0, 0))
    assert pixels("RGB", "MPO", "black", exif=turned) == ((8, 16), (0, 0, 0))
    assert pixels("RGB", "PNG", "red", exif=b"Exif\0\0broken") == ((16, 8), (255, 0, 0))
    assert pixels("RGBA", "PNG", (9, 9, 9, 0)) == ((16, 8), (255, 255, 255))
    assert pixels("LA", "PNG", (9, 0)) == ((16, 8), (255, 255, 255))
    assert pixels("P", "PNG", 0, transparency=0) == ((16, 8), (255, 255, 255))
    assert pixels("CMYK", "JPEG", (0, 0, 0, 0)) == ((16, 8), (255, 255, 255))


class Rendering:
    """Stand-in for the prompt rendering of `AsyncLLM`, with `spans` tokens per placeholder."""

    def __init__(self, *, multimodal: bool = True, spans: int = 2) -> None:
        config = SimpleNamespace(supports_multimodal_inputs=multimodal, get_inputs_embeds_size=lambda: 4)
        self.vllm_config = SimpleNamespace(model_config=config)
        self.renderer = self
        self.requested: list[dict[str, Any]] = []
        self._spans = spans

    async def render_cmpl_async(self, prompts: list[dict[str, Any]], *, skip_mm_cache: bool) -> list[dict[str, Any]]:
        assert skip_mm_cache
        self.requested += prompts
        (prompt,) = prompts
        tokens: list[int] = []
        for one in prompt["prompt_token_ids"]:
            tokens += [one] * (self._spans if one == PLACEHOLDER else 1)
        return [{"type": "multimodal", "prompt_token_ids": tokens, "cache_salt": prompt.get("cache_salt")}]


async def test_expanded_prompt_must_equal_that_of_the_ingress() -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    from tests.workers.pictures import png  # noqa: PLC0415 - it needs Pillow

    item = work_item("r", [1, 99, 99, 2], 2, media=(media(1, 2, content=png()),), cache_namespace="tenant")
    llm = Rendering()
    prompt = await engine_prompt(llm, item, None)
    assert (prompt["prompt_token_ids"], prompt["cache_salt"]) == ([1, 99, 99, 2], "tenant")
    assert llm.requested[0]["prompt_token_ids"] == [1, 99, 2]
    with pytest.raises(MediaRefused, match="expands the prompt to 3 tokens") as caught:
        await engine_prompt(Rendering(spans=1), item, None)
    assert caught.value.error.status == 501
    text = await engine_prompt(Rendering(multimodal=False), work_item("r", [1, 2], 2), None)
    assert text == {"type": "token", "prompt_token_ids": [1, 2]}


async def test_unsupported_media_are_refused() -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    item = work_item("r", [1, 99, 99], 2, media=(media(1, 2, content=b"no"),))
    refusals = {
        "does not support images": (Rendering(multimodal=False), None, 501, "media_not_supported"),
        r"cannot decode an image: cannot identify image file <_io\.BytesIO object at": (
            Rendering(),
            None,
            400,
            "media_not_encoded",
        ),
        "have width 3, the model's have 4": (Rendering(), np.zeros((2, 3)), 500, "media_not_encoded"),
    }
    for text, (llm, embeddings, status, code) in refusals.items():
        with pytest.raises(MediaRefused, match=text) as caught:
            await engine_prompt(llm, item, embeddings)
        assert (caught.value.error.status, caught.value.error.code) == (status, code)
        assert not llm.requested
