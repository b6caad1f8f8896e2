"""Prompts with images and videos for vLLM. This module does not import vLLM.

vLLM's processor replaces one placeholder token per image by as many tokens as the image needs, but the prompt of a
`WorkItem` already contains all of them. So the tokens of each image are first collapsed to those that vLLM replaces.
The result of vLLM's expansion must equal the prompt that the ingress hashed. Images and videos are identified by their
digests, so that the hashes in vLLM's KV events equal `forebay.core.block_hashes.mm_hash`. Embeddings need
`enable_mm_embeds=True`.
"""

import asyncio
import contextlib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forebay.events.base import unpack_u32
from forebay.events.media import Media
from forebay.events.work import WorkItem
from forebay.workers.engine import AttemptFailed
from forebay.workers.engines.encode import MediaUnusable
from forebay.workers.engines.vllm.requests import prompt_of

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.embeddings import Array


async def engine_prompt(llm: Any, item: WorkItem, embeddings: "Array | None") -> dict[str, Any]:
    """Return the prompt of a request in vLLM's format.

    Without embeddings, of shape [placeholder tokens, width], vLLM encodes the media. Raises AttemptFailed if the engine
    cannot process the media, ValueError if vLLM's processor rejects the prompt.
    """
    token_ids = unpack_u32(item.token_ids)
    if not item.media:
        return prompt_of(token_ids, item.cache_namespace)
    config = llm.vllm_config.model_config
    if not config.supports_multimodal_inputs:
        raise AttemptFailed(501, "media_not_supported", "the model of this worker does not support images or videos")
    if embeddings is None:
        fields = await asyncio.to_thread(raw_prompt, item)
    else:
        if (width := embeddings.shape[1]) != (wanted := config.get_inputs_embeds_size()):
            message = f"the encode worker's embeddings have width {width}, the model's have {wanted}"
            raise AttemptFailed(500, "media_not_encoded", message)
        fields = _as_tensors(embedded_prompt(item, embeddings))
    if item.cache_namespace:
        fields["cache_salt"] = item.cache_namespace
    # vLLM's item cache assumes that every rendered prompt is submitted; after a cancelled one, later requests fail.
    (prompt,) = await llm.renderer.render_cmpl_async([fields], skip_mm_cache=True)
    if (made := prompt["prompt_token_ids"]) != token_ids:
        message = f"vLLM expands the prompt to {len(made)} tokens, the ingress by the model's files to {len(token_ids)}"
        reason = "the images need the same processor settings in both, or the model's are not supported"
        raise AttemptFailed(501, "media_not_supported", f"{message}; {reason}")
    return dict(prompt)


def _as_tensors(fields: dict[str, Any]) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - a dependency of vLLM

    data = {kind: [torch.tensor(one) for one in arrays] for kind, arrays in fields["multi_modal_data"].items()}
    return {**fields, "multi_modal_data": data}


def collapsed(token_ids: Sequence[int], media: Sequence[Media]) -> list[int]:
    """Return the prompt before its images and videos were expanded."""
    found: list[int] = []
    end = 0
    for one in media:
        found += token_ids[end : one.first_token]
        found += one.replaced or token_ids[one.first_token : one.first_token + 1]
        end = one.first_token + one.tokens
    return [*found, *token_ids[end:]]


def embedded_prompt(item: WorkItem, embeddings: "Array") -> dict[str, Any]:
    """Return the fields of vLLM's `TokensPrompt` for a request with the embeddings of all its media.

    The embeddings have the shape [placeholder tokens, width]. The values of `multi_modal_data` are numpy arrays. The
    caller must convert them to torch tensors, which vLLM needs.
    """
    data: dict[str, list[Any]] = {}
    start = 0
    for one in item.media:
        data.setdefault(one.kind, []).append(embeddings[start : start + one.tokens])
        start += one.tokens
    return _prompt(item, data)


def raw_prompt(item: WorkItem) -> dict[str, Any]:
    """Return the fields of vLLM's `TokensPrompt` for a request with images that vLLM encodes itself.

    Raises MediaUnusable if an image is invalid.
    """
    return _prompt(item, {"image": [_image(one) for one in item.media]})


def _prompt(item: WorkItem, data: dict[str, list[Any]]) -> dict[str, Any]:
    names: dict[str, list[str]] = {}
    for one in item.media:
        names.setdefault(one.kind, []).append(one.digest)
    token_ids = collapsed(unpack_u32(item.token_ids), item.media)
    return {"prompt_token_ids": token_ids, "multi_modal_data": data, "multi_modal_uuids": names}


def _image(media: Media) -> Any:
    if media.kind != "image":
        raise MediaUnusable(
            f"this worker cannot decode the frames of a {media.kind}; start an encode worker, which sends embeddings"
        )
    from PIL import Image, ImageOps  # noqa: PLC0415 - an extra

    try:
        image: Any = Image.open(io.BytesIO(media.content))
        image.load()
        with contextlib.suppress(Exception):  # as vLLM's server, which ignores invalid EXIF data
            image = ImageOps.exif_transpose(image)
        if not image.has_transparency_data:
            return image.convert("RGB")
        image, opaque = image.convert("RGBA"), Image.new("RGB", image.size, "white")
        opaque.paste(image, mask=image.getchannel("A"))
        return opaque
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaUnusable(f"cannot decode an image: {error}") from error
