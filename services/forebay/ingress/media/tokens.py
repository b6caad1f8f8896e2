"""Where images and videos stand in a prompt: one placeholder token of a template becomes as many as the engine has.

A model directory says which token stands for an image and for how many: `image_token_id` or `image_token_index`, with
`mm_tokens_per_image` or `image_seq_length` (LLaVA, Gemma 3 and others of the transformers library); likewise of videos.
Where the number depends on the size of an image it is known to the engine's own processor alone, and hashes made here
would not be the engine's: such models are refused, by name and with the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.events.media import Media, MediaKind
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.media.refs import FetchedMedia, MediaRef

TOKEN_NAMES: dict[MediaKind, tuple[str, ...]] = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
}
COUNT_NAMES: dict[MediaKind, tuple[str, ...]] = {
    "image": ("mm_tokens_per_image", "image_seq_length"),
    "video": ("mm_tokens_per_video", "video_seq_length"),
}
# Models that cut an image into as many tiles as it needs have these, whatever else they say.
BY_SIZE = ("image_grid_pinpoints", "use_image_tiling", "dynamic_image_size")
TOKENS_MAX = 1 << 16  # of one image; more is a wrong number


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """What a model takes.

    Attributes:
        ids: the placeholder of each kind.
        counts: how many tokens it becomes; None where that depends on what it stands for.
        texts: the placeholder as text.
        listed: whether the chat template wants a message as a list of its parts; else placeholders stand in its text.
    """

    ids: Mapping[MediaKind, int]
    counts: Mapping[MediaKind, int | None]
    texts: Mapping[MediaKind, str]
    listed: bool = False

    def content(self, parts: Sequence[str | MediaRef]) -> str | list[dict[str, str]]:
        """A message as the chat template takes it."""
        if not self.listed or not parts:
            return "".join(part if isinstance(part, str) else self.texts.get(part.kind, "") for part in parts)
        return [{"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind} for part in parts]

    def require(self, refs: Sequence[MediaRef]) -> None:
        """Raise ApiError for the first of a kind that the model does not take."""
        for ref in refs:
            if ref.kind not in self.ids:
                text = f"{ref.where}: this model takes no {ref.kind}s"
                raise invalid(text, ref.where, "unsupported_parameter")
            if self.counts[ref.kind] is None:
                text = f"{ref.where}: how many tokens an {ref.kind} is depends on its size in this model: not supported"
                raise ApiError(501, "unsupported_parameter", text, ref.where)

    def expand(self, token_ids: list[int], refs: Sequence[MediaRef], found: Sequence[FetchedMedia]) -> "ExpandedPrompt":
        """The prompt with all placeholders, and what stands where, in order. Raises ApiError unless each has one."""
        kinds = {token_id: kind for kind, token_id in self.ids.items()}
        waiting = {kind: [one for one in found if one.kind == kind] for kind in self.ids}
        wanted = {kind: len(ones) for kind, ones in waiting.items()}
        expanded: list[int] = []
        media: list[Media] = []
        for token_id in token_ids:
            kind = kinds.get(token_id)
            if kind is None:
                expanded.append(token_id)
                continue
            if not waiting[kind]:
                text = f"the prompt has more placeholders of {kind}s than the {wanted[kind]} that came with it"
                raise invalid(text, "messages", "media_mismatch")
            one, count = waiting[kind].pop(0), self.counts[kind]
            assert count is not None, "what has no number was refused"
            place = len(expanded)
            media.append(
                Media(kind=kind, digest=one.digest, mime=one.mime, first_token=place, tokens=count, content=one.content)
            )
            expanded += [token_id] * count
        left = sum(map(len, waiting.values()))
        if left:
            text = (
                f"the chat template left out {left} of {len(found)} images and videos: the model takes them elsewhere"
            )
            raise invalid(text, refs[0].where, "media_mismatch")
        return ExpandedPrompt(expanded, tuple(media))


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt as the engine will have it."""

    token_ids: list[int]
    media: tuple[Media, ...] = ()


def media_tokens_of(config: Mapping[str, Any], text_of: Callable[[int], str | None]) -> MediaTokens:
    """What a model's config.json says of images and videos; of a model for text alone, nothing.

    `text_of` gives the text of a token. A placeholder that the tokenizer does not have can stand in no prompt.
    """
    ids: dict[MediaKind, int] = {}
    counts: dict[MediaKind, int | None] = {}
    texts: dict[MediaKind, str] = {}
    by_size = any(config.get(name) for name in BY_SIZE)
    for kind, names in TOKEN_NAMES.items():
        token_id = _integer(config, names)
        text = None if token_id is None else text_of(token_id)
        if token_id is not None and text is not None:
            ids[kind], texts[kind] = token_id, text
            count = None if by_size else _integer(config, COUNT_NAMES[kind])
            counts[kind] = count if count is not None and 1 <= count <= TOKENS_MAX else None
    return MediaTokens(ids, counts, texts)


def _integer(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    found = (config.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)
