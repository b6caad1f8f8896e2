"""Images and videos of requests, and the expansion of their placeholders to as many tokens as the engine uses.

The config.json of a model contains the placeholder token and the number of tokens per image, for example for LLaVA and
Gemma 3. In other models the number depends on the size of the image, and only the engine's processor knows it. The
ingress could not compute the block hashes of such prompts as the engine does, so it rejects their images and videos.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.events.media import Media, MediaKind
from forebay.ingress.errors import ApiError, invalid


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Hosts from which images and videos may be fetched. Hosts with public addresses are always allowed.

    Attributes:
        allow_hosts: lower-case host names whose addresses may be private.
        allow_private: whether the addresses of all hosts may be private, for tests and labs.
    """

    allow_hosts: tuple[str, ...] = ()
    allow_private: bool = False


@dataclass(frozen=True, slots=True)
class MediaRef:
    """Reference to an image or a video in the body of a request. `where` is the path of the URL in the body."""

    kind: MediaKind
    url: str
    where: str


@dataclass(frozen=True, slots=True)
class FetchedMedia:
    """A fetched image or video: its MIME type, detected from the bytes, and SHA-256 of the bytes in hex."""

    kind: MediaKind
    mime: str
    content: bytes
    digest: str


PUBLIC_ONLY = MediaSettings()


TOKEN_NAMES: dict[MediaKind, tuple[str, ...]] = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
}
COUNT_NAMES: dict[MediaKind, tuple[str, ...]] = {
    "image": ("mm_tokens_per_image", "image_seq_length"),
    "video": ("mm_tokens_per_video", "video_seq_length"),
}
# Fields of models that divide an image into a number of tiles that depends on its size.
BY_SIZE = ("image_grid_pinpoints", "use_image_tiling", "dynamic_image_size")
TOKENS_MAX = 1 << 16  # per image; a larger number is invalid


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Placeholder tokens of a model for images and videos. The maps are empty if the model accepts no media.

    A count is the number of tokens per image or video; None if it depends on the size of the image or video.
    """

    ids: Mapping[MediaKind, int]
    counts: Mapping[MediaKind, int | None]
    texts: Mapping[MediaKind, str]

    def require(self, refs: Sequence[MediaRef]) -> None:
        """Raise ApiError for the first image or video that the model or the ingress does not support."""
        for ref in refs:
            if ref.kind not in self.ids:
                text = f"{ref.where}: this model does not support {ref.kind}s"
                raise invalid(text, ref.where, "unsupported_parameter")
            if self.counts[ref.kind] is None:
                text = f"{ref.where}: {ref.kind}s are not supported, because their tokens depend on their size"
                raise ApiError(501, "unsupported_parameter", text, ref.where)

    def expand(
        self, token_ids: list[int], refs: Sequence[MediaRef], fetched: Sequence[FetchedMedia]
    ) -> "ExpandedPrompt":
        """Return a prompt in which each placeholder is repeated as often as the engine does.

        `fetched` is in the order of `refs`. Raises ApiError if the numbers of placeholders and of media differ.
        """
        kinds = {token_id: kind for kind, token_id in self.ids.items()}
        waiting = {kind: [one for one in fetched if one.kind == kind] for kind in self.ids}
        wanted = {kind: len(ones) for kind, ones in waiting.items()}
        expanded: list[int] = []
        media: list[Media] = []
        for token_id in token_ids:
            kind = kinds.get(token_id)
            if kind is None:
                expanded.append(token_id)
                continue
            if not waiting[kind]:
                text = f"the prompt has more placeholders of {kind}s than the {wanted[kind]} {kind}s of the request"
                raise invalid(text, "messages", "media_mismatch")
            one, count = waiting[kind].pop(0), self.counts[kind]
            assert count is not None, "`require` rejected this kind"
            place = len(expanded)
            media.append(
                Media(kind=kind, digest=one.digest, mime=one.mime, first_token=place, tokens=count, content=one.content)
            )
            expanded += [token_id] * count
        left = sum(map(len, waiting.values()))
        if left:
            text = (
                f"the chat template omitted {left} of {len(fetched)} images and videos; put them into another message"
            )
            raise invalid(text, refs[0].where, "media_mismatch")
        return ExpandedPrompt(expanded, tuple(media))


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    token_ids: list[int]
    media: tuple[Media, ...] = ()


def media_tokens_of(config: Mapping[str, Any], text_of: Callable[[int], str | None]) -> MediaTokens:
    """Return the placeholder tokens of a model. `text_of` returns None for an unknown token, which is ignored."""
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
