"""Images and videos as vLLM takes them: work items to prompts. vLLM itself is not imported.

vLLM's processor puts in the placeholders by itself, one token for each image standing for as many as it needs; in a
`WorkItem` they are there already. So each run of them is one token again, and what vLLM makes of it must be the prompt
that the ingress hashed. Items are named by their digests, so that vLLM's KV events carry the names that
`forebay.core.block_hashes.mm_hash` knows. Embeddings need `enable_mm_embeds=True`.
"""

import asyncio
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forebay.events.base import unpack_u32
from forebay.events.media import Media
from forebay.events.tokens import ResponseError
from forebay.events.work import WorkItem
from forebay.workers.engines.standin_encoder import MediaUnusable
from forebay.workers.engines.vllm.requests import prompt_of

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.embeddings import Array


class MediaRefused(ValueError):
    """A request whose images or videos this engine cannot have; `answer` is for the client."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.answer = ResponseError(status=status, code=code, message=message)


async def engine_prompt(llm: Any, item: WorkItem, embeddings: "Array | None") -> dict[str, Any]:
    """What an `AsyncLLM` takes for an item, with its media or their `embeddings`, [placeholders, width].

    Raises MediaRefused, and ValueError for what vLLM's processor does not take. Work on images is done in threads.
    """
    token_ids = unpack_u32(item.token_ids)
    if not item.media:
        return prompt_of(token_ids, item.cache_namespace)
    config = llm.vllm_config.model_config
    if not config.supports_multimodal_inputs:
        raise MediaRefused(501, "media_not_supported", "the model of this worker takes no images or videos")
    if embeddings is None:
        try:
            fields = await asyncio.to_thread(raw_prompt, item)
        except MediaUnusable as error:
            raise MediaRefused(400, "media_not_encoded", str(error)) from error
    else:
        if (width := embeddings.shape[1]) != (wanted := config.get_inputs_embeds_size()):
            message = f"the encode worker's embeddings are {width} numbers wide, the model's are {wanted}"
            raise MediaRefused(500, "media_not_encoded", message)
        fields = _as_tensors(embedded_prompt(item, embeddings))
    if item.cache_namespace:
        fields["cache_salt"] = item.cache_namespace
    # vLLM's cache of items takes for granted that what was rendered is asked, and fails who asks after a cancelled one.
    (prompt,) = await llm.renderer.render_cmpl_async([fields], skip_mm_cache=True)
    if (made := prompt["prompt_token_ids"]) != token_ids:
        message = f"vLLM makes {len(made)} tokens of a prompt with images that has {len(token_ids)} by config.json"
        raise MediaRefused(501, "media_not_supported", f"{message}: the model lays them out in another way")
    return dict(prompt)


def _as_tensors(fields: dict[str, Any]) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - vLLM's

    data = {kind: [torch.tensor(one) for one in arrays] for kind, arrays in fields["multi_modal_data"].items()}
    return {**fields, "multi_modal_data": data}


def collapsed(token_ids: Sequence[int], media: Sequence[Media]) -> list[int]:
    """A prompt in which each image or video is one placeholder; `media` are in the order in which they stand."""
    found: list[int] = []
    end = 0
    for one in media:
        found += token_ids[end : one.first_token + 1]
        end = one.first_token + one.tokens
    return [*found, *token_ids[end:]]


def embedded_prompt(item: WorkItem, embeddings: "Array") -> dict[str, Any]:
    """The fields of vLLM's `TokensPrompt` for an item with embeddings, [placeholders, width], of all of its media.

    Values under `multi_modal_data` are numpy arrays of shape [placeholders, width]; vLLM wants torch tensors of them.
    """
    data: dict[str, list[Any]] = {}
    start = 0
    for one in item.media:
        data.setdefault(one.kind, []).append(embeddings[start : start + one.tokens])
        start += one.tokens
    return _prompt(item, data)


def raw_prompt(item: WorkItem) -> dict[str, Any]:
    """As `embedded_prompt`, with images for vLLM to encode by itself. Raises MediaUnusable."""
    return _prompt(item, {"image": [_image(one) for one in item.media]})


def _prompt(item: WorkItem, data: dict[str, list[Any]]) -> dict[str, Any]:
    names: dict[str, list[str]] = {}
    for one in item.media:
        names.setdefault(one.kind, []).append(one.digest)
    token_ids = collapsed(unpack_u32(item.token_ids), item.media)
    return {"prompt_token_ids": token_ids, "multi_modal_data": data, "multi_modal_uuids": names}


def _image(media: Media) -> Any:
    if media.kind != "image":
        raise MediaUnusable(f"a {media.kind} reaches vLLM by an encode worker alone: its frames are not decoded here")
    from PIL import Image  # noqa: PLC0415 - an extra

    try:
        image = Image.open(io.BytesIO(media.content))
        image.load()
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaUnusable(f"cannot decode an image: {error}") from error
