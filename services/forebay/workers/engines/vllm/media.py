"""Prompts with images and videos for vLLM. This module imports vLLM only to decode videos.

vLLM's processor replaces one placeholder token per image by as many tokens as the image needs, but the prompt of a
`WorkItem` already contains all of them. So the tokens of each image are first collapsed to those that vLLM replaces.
The result of vLLM's expansion must equal the prompt that the ingress hashed. Images and videos are identified by their
digests, so that the hashes in vLLM's KV events equal `forebay.core.block_hashes.mm_hash`. Embeddings need
`enable_mm_embeds=True`.

An encode worker that runs vLLM sends an `ItemMetadata` for each image beside the embeddings. Some models need it: the
positions of the tokens of a Qwen-VL image depend on its grid of patches, and of a Qwen2.5-VL video on its frame rate.
"""

import asyncio
import contextlib
import io
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from forebay.events.base import unpack_u32
from forebay.events.media import Media
from forebay.events.work import WorkItem
from forebay.workers.engine import AttemptFailed
from forebay.workers.engines.encode import MediaUnusable
from forebay.workers.engines.vllm.requests import prompt_of
from forebay.workers.kv_transfer.embeddings import Array
from forebay.workers.kv_transfer.nixl_agent import TransferError

VIDEO_MODELS = ("qwen2_vl", "qwen2_5_vl")  # for others, an ingress cannot compute the tokens of a video


class ItemMetadata(msgspec.Struct, frozen=True):
    """Metadata of the embeddings of one image or video.

    Attributes:
        weights: SHA-256 of the weights of the encoder, from `weights_digest`; empty for an encoder of the user.
        fields: further inputs of the model, by vLLM's names.
    """

    weights: str = ""
    fields: dict[str, list[int] | float] = {}


async def engine_prompt(
    llm: Any, item: WorkItem, embeddings: Array | None, weights: Callable[[], str]
) -> dict[str, Any]:
    """Return the prompt of a request in vLLM's format.

    Without embeddings, of shape [placeholder tokens, width], vLLM encodes the media. `weights` returns the digest of
    the weights of this engine. Raises AttemptFailed if the engine cannot process the media, TransferError if the
    embeddings are not those of its model, ValueError if vLLM's processor rejects the prompt.
    """
    token_ids = unpack_u32(item.token_ids)
    if not item.media:
        return prompt_of(token_ids, item.cache_namespace)
    config = llm.vllm_config.model_config
    if not config.supports_multimodal_inputs:
        raise AttemptFailed(501, "media_not_supported", "the model of this worker does not support images or videos")
    if embeddings is None:
        fields = await asyncio.to_thread(raw_prompt, item, model_type_of(config))
    else:
        metadata = _metadata(item)
        for theirs in {one.weights for one in metadata} - {""}:
            if theirs != (own := await asyncio.to_thread(weights)):
                text = f"the encode worker has other weights ({theirs[:16]}) than this worker ({own[:16]})"
                raise TransferError(f"{text}: start both with the same files of the model")
        if (width := embeddings.shape[-1]) != (wanted := _width(config)):
            raise TransferError(f"the encode worker's embeddings have width {width}, the model's have {wanted}")
        fields = _as_tensors(embedded_prompt(item, embeddings, metadata))
    if item.cache_namespace:
        fields["cache_salt"] = item.cache_namespace
    # vLLM's item cache assumes that every rendered prompt is submitted; after a cancelled one, later requests fail.
    (prompt,) = await llm.renderer.render_cmpl_async([fields], skip_mm_cache=True)
    if (made := prompt["prompt_token_ids"]) != token_ids:
        message = f"vLLM expands the prompt to {len(made)} tokens, the ingress by the model's files to {len(token_ids)}"
        reason = "images and videos need the same processor settings in both, or the model's are not supported"
        raise AttemptFailed(501, "media_not_supported", f"{message}; {reason}")
    return dict(prompt)


def _metadata(item: WorkItem) -> list[ItemMetadata]:
    """Return the metadata of each image and video, which are empty if the encoder sent none."""
    raw = item.encoded.metadata if item.encoded is not None else b""
    try:
        found = msgspec.json.decode(raw or b"[]", type=list[ItemMetadata])
    except msgspec.MsgspecError as error:
        raise TransferError(f"the metadata of the embeddings are invalid: {error}") from error
    if len(found) not in (0, len(item.media)):
        raise TransferError(f"got metadata for {len(found)} images and videos, expected {len(item.media)}")
    return found or [ItemMetadata()] * len(item.media)


def model_type_of(config: Any) -> str:
    return str(getattr(config.hf_config, "model_type", ""))


def _width(config: Any) -> int:
    """Return the width of the embeddings of a model. Qwen3-VL adds those of some inner layers of its encoder."""
    layers = getattr(getattr(config.hf_config, "vision_config", None), "deepstack_visual_indexes", None)
    width: int = config.get_inputs_embeds_size() * (1 + len(layers or ()))
    return width


def _as_tensors(fields: dict[str, Any]) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - a dependency of vLLM

    def tensors(data: Any) -> Any:
        if isinstance(data, dict):
            return {name: torch.tensor(one) for name, one in data.items()}
        return [torch.tensor(one) for one in data]

    return {**fields, "multi_modal_data": {kind: tensors(data) for kind, data in fields["multi_modal_data"].items()}}


def collapsed(token_ids: Sequence[int], media: Sequence[Media]) -> list[int]:
    """Return the prompt before its images and videos were expanded."""
    found: list[int] = []
    end = 0
    for one in media:
        found += token_ids[end : one.first_token]
        found += one.replaced or token_ids[one.first_token : one.first_token + 1]
        end = one.first_token + one.tokens
    return [*found, *token_ids[end:]]


def embedded_prompt(item: WorkItem, embeddings: Array, metadata: Sequence[ItemMetadata]) -> dict[str, Any]:
    """Return the fields of vLLM's `TokensPrompt` for a request with the embeddings of all its media.

    The embeddings have the shape [placeholder tokens, width]. The values of `multi_modal_data` are lists of numpy
    arrays, or one array with lists of the further inputs of the model. The caller must convert them to torch tensors,
    which vLLM needs.
    """
    data: dict[str, Any] = {}
    fields: dict[str, dict[str, list[Any]]] = {}
    start = 0
    for one, described in zip(item.media, metadata, strict=True):
        data.setdefault(one.kind, []).append(embeddings[start : start + one.tokens])
        start += one.tokens
        for name, value in described.fields.items():
            fields.setdefault(one.kind, {}).setdefault(name, []).append(value)
    for kind, further in fields.items():
        data[kind] = {f"{kind}_embeds": np.concatenate(data[kind]), **further}
    return _prompt(item, data)


def raw_prompt(item: WorkItem, model_type: str) -> dict[str, Any]:
    """Return the fields of vLLM's `TokensPrompt` for a request with images and videos that vLLM encodes itself.

    Raises MediaUnusable if one is invalid, or the model supports no videos.
    """
    data: dict[str, Any] = {}
    for one in item.media:
        data.setdefault(one.kind, []).append(decoded(one, model_type))
    return _prompt(item, data)


def _prompt(item: WorkItem, data: dict[str, Any]) -> dict[str, Any]:
    names: dict[str, list[str]] = {}
    for one in item.media:
        names.setdefault(one.kind, []).append(one.digest)
    token_ids = collapsed(unpack_u32(item.token_ids), item.media)
    return {"prompt_token_ids": token_ids, "multi_modal_data": data, "multi_modal_uuids": names}


def decoded(media: Media, model_type: str) -> Any:
    """Return an image, or the sampled frames of a video with their metadata, as vLLM's server decodes them.

    Raises MediaUnusable if it is invalid, or a video of a model without them.
    """
    if media.kind == "image":
        return _image(media)
    if model_type not in VIDEO_MODELS:
        text = f"vLLM workers decode videos for {', '.join(VIDEO_MODELS)}, not for {model_type}"
        raise MediaUnusable(f"{text}; use images, or an encoder of your own")
    try:
        return import_module("forebay.workers.engines.vllm.calls").sampled_video(media.content)
    except Exception as error:  # of OpenCV, and several types of vLLM
        raise MediaUnusable(f"cannot decode a video: {error}") from error


def _image(media: Media) -> Any:
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
