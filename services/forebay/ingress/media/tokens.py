"""Images and videos of requests, and the expansion of their placeholders to as many tokens as the engine uses.

The config.json of a model contains the placeholder token and, for example for LLaVA, the number of tokens per image. In
other models the number depends on the size of the image; `families` computes it for some. For the others the ingress
could not compute the block hashes of a prompt as the engine does, so it rejects their images and videos.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.events.media import Media, MediaKind
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.media.families import FAMILIES, VIDEO_FAMILIES, Expansion, IdOf, UnusableSize, expansion_of


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
    """A fetched image or video.

    Attributes:
        mime: MIME type, detected from the bytes.
        digest: SHA-256 of the bytes in hex.
        size: height and width of an image in pixels, in the orientation of its EXIF data, as engines turn it. For a
            video of a model that samples frames, the number of these frames, height and width.
    """

    kind: MediaKind
    mime: str
    content: bytes
    digest: str
    size: tuple[int, ...] = ()


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

    An expansion is None if the number of tokens depends on the image or video in a way that is not known here.
    """

    ids: Mapping[MediaKind, int]
    expansions: Mapping[MediaKind, Expansion | None]
    texts: Mapping[MediaKind, str]

    def require(self, refs: Sequence[MediaRef]) -> None:
        """Raise ApiError for the first image or video that the model or the ingress does not support."""
        takes_images = self.expansions.get("image") is not None
        for ref in refs:
            hint = "; send some of its frames as image_url" if ref.kind == "video" and takes_images else ""
            if ref.kind not in self.ids:
                text = f"{ref.where}: this model does not support {ref.kind}s{hint}"
                raise invalid(text, ref.where, "unsupported_parameter")
            if self.expansions[ref.kind] is None:
                text = f"{ref.where}: {ref.kind}s are not supported, because their tokens depend on their size{hint}"
                families = FAMILIES if ref.kind == "image" else VIDEO_FAMILIES
                text += f" in another way than in {', '.join(families)} with a preprocessor_config.json"
                raise ApiError(501, "unsupported_parameter", text, ref.where)

    @property
    def samples_frames(self) -> bool:
        """Whether the tokens of a video depend on its frames."""
        videos = self.expansions.get("video")
        return videos is not None and videos.samples_frames

    def require_size(self, ref: MediaRef, *size: int) -> None:
        """Raise ApiError for an image or video whose size the model does not support."""
        self._sequence(ref, size)

    def _sequence(self, ref: MediaRef, size: tuple[int, ...]) -> list[int]:
        expansion = self.expansions[ref.kind]
        assert expansion is not None, "`require` rejected this kind"
        try:
            return expansion.sequence(*size)
        except UnusableSize as error:
            frames = f"{size[0]} frames of " if ref.kind == "video" else ""
            text = f"{ref.where}: the {ref.kind} has {frames}{size[-1]} x {size[-2]} pixels, but {error}; crop it"
            raise invalid(text, ref.where, f"unsupported_{ref.kind}_size") from error

    def expand(
        self, token_ids: list[int], refs: Sequence[MediaRef], fetched: Sequence[FetchedMedia]
    ) -> "ExpandedPrompt":
        """Return a prompt in which each placeholder is replaced by the tokens of its image or video.

        `fetched` is in the order of `refs`. Raises ApiError if the numbers of placeholders and of media differ.
        """
        kinds = {token_id: kind for kind, token_id in self.ids.items()}
        pairs = list(zip(refs, fetched, strict=True))
        waiting = {kind: [pair for pair in pairs if pair[0].kind == kind] for kind in self.ids}
        wanted = {kind: len(ones) for kind, ones in waiting.items()}
        images = self.expansions.get("image")
        prompt = _Prompt({} if images is None else images.newlines)
        for token_id in token_ids:
            kind = kinds.get(token_id)
            if kind is None:
                prompt.add(token_id)
                continue
            if not waiting[kind]:
                text = f"the prompt has more placeholders of {kind}s than the {wanted[kind]} {kind}s of the request"
                raise invalid(text, "messages", "media_mismatch")
            ref, one = waiting[kind].pop(0)
            prompt.add_media(one, token_id, self._sequence(ref, one.size))
        left = sum(map(len, waiting.values()))
        if left:
            text = (
                f"the chat template omitted {left} of {len(fetched)} images and videos; put them into another message"
            )
            raise invalid(text, refs[0].where, "media_mismatch")
        return prompt.expanded()


@dataclass(slots=True)
class _Place:
    one: FetchedMedia
    begin: int
    end: int
    source: list[int]


class _Prompt:
    """Prompt under construction.

    `newlines` are the ids of the tokens of 1, 2 and more newlines. A tokenizer makes one token of the newlines at the
    edge of an image and of those beside it. The tokens that an image replaces then include the token beside it.
    """

    def __init__(self, newlines: Mapping[int, int]) -> None:
        self._newlines = newlines
        self._numbers = {token_id: number for number, token_id in newlines.items()}
        self._token_ids: list[int] = []
        self._places: list[_Place] = []

    def add(self, token_id: int) -> None:
        place = self._last_place()
        if place is not None and self._join(token_id):
            place.source.append(token_id)
        else:
            self._token_ids.append(token_id)

    def add_media(self, one: FetchedMedia, placeholder: int, sequence: list[int]) -> None:
        place, before = self._last_place(), self._token_ids[-1:]
        joined = self._join(sequence[0])
        begin = len(self._token_ids) - joined
        self._token_ids += sequence[joined:]
        source = [*before, placeholder] if joined and place is None else [placeholder]
        self._places.append(_Place(one, begin, len(self._token_ids), source))

    def expanded(self) -> "ExpandedPrompt":
        return ExpandedPrompt(self._token_ids, tuple(map(self._media, self._places)))

    def _media(self, place: _Place) -> Media:
        one, first = place.one, self._token_ids[place.begin]
        return Media(
            kind=one.kind,
            digest=one.digest,
            mime=one.mime,
            first_token=place.begin,
            tokens=place.end - place.begin,
            replaced=() if place.source == [first] else tuple(place.source),
            content=one.content,
        )

    def _last_place(self) -> _Place | None:
        """Return the image or video with which the prompt ends."""
        return self._places[-1] if self._places and self._places[-1].end == len(self._token_ids) else None

    def _join(self, token_id: int) -> bool:
        """Replace the last token by one for its newlines and those of `token_id`. Return whether there is one."""
        if not self._newlines or not self._token_ids:
            return False
        numbers = [self._numbers.get(one) for one in (self._token_ids[-1], token_id)]
        joined = None if None in numbers else self._newlines.get(sum(number or 0 for number in numbers))
        if joined is not None:
            self._token_ids[-1] = joined
        return joined is not None


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    token_ids: list[int]
    media: tuple[Media, ...] = ()


def media_tokens_of(
    config: Mapping[str, Any],
    text_of: Callable[[int], str | None],
    id_of: IdOf,
    settings: Mapping[MediaKind, Mapping[str, Any]],
) -> MediaTokens:
    """Return the placeholder tokens of a model.

    Args:
        text_of: returns the text of a token, None for an unknown token, which is ignored.
        id_of: returns the token of a text, None if there is none.
        settings: values of the model's processors of images and videos, with those of its processor.

    Raises ConfigError if a value of the settings is invalid.
    """
    ids: dict[MediaKind, int] = {}
    expansions: dict[MediaKind, Expansion | None] = {}
    texts: dict[MediaKind, str] = {}
    is_family = config.get("model_type") in FAMILIES
    by_size = is_family or any(config.get(name) for name in BY_SIZE)
    for kind, names in TOKEN_NAMES.items():
        token_id = _integer(config, names)
        count = None if by_size else _integer(config, COUNT_NAMES[kind])
        expansion = None
        if is_family:
            expansion = expansion_of(kind, config, settings.get(kind, {}), id_of)
        elif token_id is not None and count is not None and 1 <= count <= TOKENS_MAX:
            expansion = _repeated(token_id, count)
        token_id = token_id if expansion is None else expansion.placeholder
        text = None if token_id is None else text_of(token_id)
        if token_id is not None and text is not None:
            ids[kind], expansions[kind], texts[kind] = token_id, expansion, text
    return MediaTokens(ids, expansions, texts)


def _repeated(token_id: int, count: int) -> Expansion:
    return Expansion(token_id, lambda *_: [token_id] * count)


def _integer(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    found = (config.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)
