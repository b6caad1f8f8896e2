"""Images in real vLLM with a tiny LLaVA, raw and as embeddings, with the block hashes of the ingress."""

import asyncio
import importlib.util
import io
import json
import sys
import types
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from forebay.core.block_hashes import hash_seed, mm_hashes, sequence_hashes
from forebay.events.base import pack_u32, unpack_u64
from forebay.events.media import Encoded
from forebay.events.work import WorkItem
from forebay.ingress.media.tokens import FetchedMedia, MediaRef, MediaTokens, media_tokens_of
from forebay.workers.engines.vllm.encoder import VllmEncoder
from forebay.workers.engines.vllm.engine import VllmEngine
from forebay.workers.runtime.media_feed import MediaEngine
from tests.engines.driven import Answer, Driven, driven
from tests.engines.vllm_settings import BLOCK, SPEC, settings

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # as in test_vllm_engine
]

SAID = 6
OTHER_WEIGHTS = b'[{"weights":"%s"}]' % (b"0" * 64)
BEFORE, AFTER = range(10, 50), range(50, 90)  # a block before the image, part of it and more in the second
# vLLM's module of LLaVA imports this one for a function that Pixtral alone calls, and it wants torchvision, which has
# no build for CPUs on PyPI.
UNUSED = "transformers.models.pixtral.image_processing_pixtral"
STAND_IN = f"""import sys, types
made = sys.modules[{UNUSED!r}] = types.ModuleType({UNUSED!r})
made._num_image_tokens = None
"""


def png(*colors: tuple[int, int, int]) -> bytes:
    from PIL import Image  # noqa: PLC0415 - comes with vLLM

    image = Image.new("RGB", (48, 40), colors[0])
    for number, color in enumerate(colors[1:], start=1):
        image.paste(color, (8 * number, 0, 8 * number + 8, 20))
    kept = io.BytesIO()
    image.save(kept, "PNG")
    return kept.getvalue()


RED, BLUE = png((200, 30, 30), (0, 0, 0)), png((20, 40, 220), (255, 255, 255), (9, 99, 0))


class Llava:
    """Prompts of the ingress, and embeddings and output of the oracle."""

    def __init__(self, directory: Path) -> None:
        from tests.harness.models import make_tiny_llava  # noqa: PLC0415 - imports torch

        self.directory = directory
        self._model = make_tiny_llava.write_model(directory).float().eval()
        self._processor = make_tiny_llava.processor()
        config = json.loads((directory / "config.json").read_text())
        tokenizer = self._processor.tokenizer
        id_of = tokenizer.get_vocab().get
        self.tokens: MediaTokens = media_tokens_of(config, tokenizer.convert_ids_to_tokens, id_of, {})

    def _pixels(self, contents: Sequence[bytes]) -> Any:
        from PIL import Image  # noqa: PLC0415

        images = [Image.open(io.BytesIO(one)) for one in contents]
        return self._processor.image_processor(images, return_tensors="pt")["pixel_values"]

    def embeddings(self, contents: Sequence[bytes]) -> Any:
        """Return the embeddings of images, [placeholders, width]."""
        import torch  # noqa: PLC0415

        with torch.inference_mode():
            found = self._model.model.get_image_features(self._pixels(contents), return_dict=True).pooler_output
        return torch.cat(list(found)).numpy()

    def greedy(self, item: WorkItem, contents: Sequence[bytes]) -> list[int]:
        import torch  # noqa: PLC0415

        prompt = torch.frombuffer(bytearray(item.token_ids), dtype=torch.int32).long()[None]
        generated: list[int] = []
        with torch.inference_mode():
            for _ in range(SAID):
                tokens = torch.cat([prompt, torch.tensor([generated], dtype=torch.long)], dim=1)
                logits = self._model(input_ids=tokens, pixel_values=self._pixels(contents)).logits[0, -1]
                generated.append(int(logits.argmax()))
        return generated

    def item(
        self, vllm: Driven, contents: Sequence[bytes], text: Sequence[int] = AFTER, namespace: str = ""
    ) -> WorkItem:
        """A request with images, tokens and hashes as the ingress makes them."""
        token_id = self.tokens.ids["image"]
        refs = [MediaRef("image", "data:", "messages[0]") for _ in contents]
        found = [FetchedMedia("image", "image/png", one, sha256(one).hexdigest()) for one in contents]
        short = [1, *BEFORE]
        for _ in contents:
            short += [token_id, *text]
        expanded = self.tokens.expand(short, refs, found)
        item = vllm.item(expanded.token_ids, SAID, cache_namespace=namespace, logprobs=0)
        packed, seed = pack_u32(expanded.token_ids), hash_seed("", namespace)
        hashes = sequence_hashes(packed, BLOCK, seed, mm_hashes(expanded.media, BLOCK))
        return msgspec.structs.replace(item, media=expanded.media, sequence_hashes=hashes)


async def ask(vllm: Driven, item: WorkItem, embeddings: Any = None) -> Answer:
    answer = vllm.expect(item)
    assert isinstance(vllm.engine, MediaEngine)
    if embeddings is None:
        vllm.engine.submit(item)
    else:
        bare = tuple(msgspec.structs.replace(one, content=b"") for one in item.media)
        vllm.engine.submit_embedded(msgspec.structs.replace(item, media=bare), embeddings)
    await vllm.until(lambda: answer.over)
    return answer


async def reported(vllm: Driven, names: Sequence[int]) -> None:
    await vllm.until(lambda: set(names) <= vllm.held[0])


@pytest.fixture(scope="module")
def without_torchvision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("torchvision") is None:
            directory = tmp_path_factory.mktemp("unused")
            (directory / "sitecustomize.py").write_text(STAND_IN)
            patch.setenv("PYTHONPATH", str(directory), prepend=":")
            stand_in: Any = types.ModuleType(UNUSED)
            stand_in._num_image_tokens = None
            patch.setitem(sys.modules, UNUSED, stand_in)
        yield


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Llava:
    return Llava(tmp_path_factory.mktemp("model") / "llava")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def vllm(llava: Llava, without_torchvision: None) -> AsyncIterator[Driven]:
    async with driven(VllmEngine(replace(settings(llava.directory), kv_blocks=120)), SPEC) as one:
        yield one


async def test_image_and_its_embeddings_give_the_tokens_of_the_oracle(vllm: Driven, llava: Llava) -> None:
    for number, contents in enumerate([[RED], [BLUE], [RED, BLUE]]):
        raw = llava.item(vllm, contents, namespace=f"raw-{number}")
        expected = llava.greedy(raw, contents)
        answers = [await ask(vllm, raw)]
        embeddings = llava.embeddings(contents)
        assert embeddings.shape == (16 * len(contents), 64)
        # Of its own namespace, so nothing of the first is reused; vLLM's cache of encoded images is keyed by digest.
        await asyncio.wait_for(vllm.engine.llm.reset_encoder_cache(), 10)  # type: ignore[attr-defined]
        answers.append(await ask(vllm, llava.item(vllm, contents, namespace=f"embedded-{number}"), embeddings))
        assert [one.error for one in answers] == [None, None]
        assert [one.cached for one in answers] == [0, 0]
        assert [one.tokens for one in answers] == [expected, expected]
        logprobs = [[token.logprob for token in one.logprobs] for one in answers]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)


async def test_other_embeddings_give_other_tokens(vllm: Driven, llava: Llava) -> None:
    generated = []
    for content in (RED, BLUE):
        item = llava.item(vllm, [content], range(100, 140))
        answer = await ask(vllm, item, llava.embeddings([content]))
        assert answer.tokens == llava.greedy(item, [content])
        generated.append([token.logprob for token in answer.logprobs])
    assert max(abs(one - other) for one, other in zip(*generated, strict=True)) > 1e-3


async def test_hashes_of_images_equal_those_of_the_ingress(vllm: Driven, llava: Llava) -> None:
    text = range(150, 190)
    items = {content: llava.item(vllm, [content], text) for content in (RED, BLUE)}
    names = {content: unpack_u64(item.sequence_hashes) for content, item in items.items()}
    assert names[RED][0] == names[BLUE][0] and not set(names[RED][1:]) & set(names[BLUE][1:])
    await ask(vllm, items[RED], llava.embeddings([RED]))
    await reported(vllm, names[RED])
    assert not set(names[BLUE][1:]) & vllm.held[0]
    # What the index foretells is what vLLM has: of one image all blocks, of another those before it.
    for content in (RED, BLUE, BLUE):
        again = llava.item(vllm, [content], text)
        foretold = next((n for n, name in enumerate(names[content]) if name not in vllm.held[0]), len(names[content]))
        answer = await ask(vllm, again)
        assert answer.cached == foretold * BLOCK
        await reported(vllm, names[content])
    assert set(vllm.engine.held(0)) == vllm.held[0]
    plain = llava.item(vllm, [], text)
    both = llava.item(vllm, [RED, BLUE], text, "tenant")
    await ask(vllm, plain)
    await ask(vllm, both, llava.embeddings([RED, BLUE]))
    for item in (plain, both):
        await reported(vllm, unpack_u64(item.sequence_hashes))


async def test_half_precision_embeddings(vllm: Driven, llava: Llava) -> None:
    item = llava.item(vllm, [RED], range(200, 240))
    answer = await ask(vllm, item, llava.embeddings([RED]).astype("float16"))
    assert answer.tokens == llava.greedy(item, [RED])


async def test_cancelled_image_does_not_affect_later_requests(vllm: Driven, llava: Llava) -> None:
    content = png((1, 2, 3), (4, 200, 6))
    item = llava.item(vllm, [content], range(250, 290))
    (one,) = item.media
    fewer = msgspec.structs.replace(one, tokens=one.tokens - 1)
    other = await ask(vllm, msgspec.structs.replace(item, media=(fewer,), request_id=f"unlike-{item.request_id}"))
    assert other.error is not None
    assert (other.error.status, other.error.code) == (501, "media_not_supported")
    answer = await ask(vllm, item)
    assert answer.error is None
    assert answer.tokens == llava.greedy(item, [content])


async def test_encode_worker_has_the_embeddings_of_the_oracle(vllm: Driven, llava: Llava) -> None:
    encoder = VllmEncoder(replace(settings(llava.directory, role="encode"), block_size=None, kv_blocks=None))
    item = llava.item(vllm, [BLUE, RED], range(250, 290))
    try:
        await asyncio.to_thread(encoder.load)
        parts = await asyncio.to_thread(encoder.encode_all, item.media)
        assert not encoder.is_dead
    finally:
        await encoder.stop()
    rows = np.concatenate([part.embeddings for part in parts])
    assert rows == pytest.approx(llava.embeddings([BLUE, RED]), abs=1e-4)
    metadata = b"[%s]" % b",".join(part.metadata for part in parts)
    encoded = Encoded(descriptor=b"", shape=rows.shape, dtype="float32", checksum="0" * 16, metadata=metadata)
    answer = await ask(vllm, msgspec.structs.replace(item, encoded=encoded), rows)
    assert (answer.error, answer.not_fetched) == (None, None)
    assert answer.tokens == llava.greedy(item, [BLUE, RED])


async def test_invalid_media_are_refused(vllm: Driven, llava: Llava) -> None:
    item = llava.item(vllm, [RED])
    wide = await ask(vllm, item, llava.embeddings([RED])[:, :32])
    assert wide.not_fetched == "the encode worker's embeddings have width 32, the model's have 64"
    of_other = Encoded(descriptor=b"", shape=(16, 64), dtype="float32", checksum="0" * 16, metadata=OTHER_WEIGHTS)
    refused = await ask(
        vllm, msgspec.structs.replace(llava.item(vllm, [RED]), encoded=of_other), llava.embeddings([RED])
    )
    assert refused.not_fetched is not None and "the encode worker has other weights" in refused.not_fetched
    (one,) = item.media
    for kind in ("image", "video"):
        unusable = msgspec.structs.replace(one, kind=kind, content=b"nothing")
        broken = await ask(vllm, msgspec.structs.replace(llava.item(vllm, [RED]), media=(unusable,)))
        assert broken.error is not None
        assert (broken.error.status, broken.error.code) == (400, "media_not_encoded")
    assert not (await ask(vllm, llava.item(vllm, [RED]))).error
