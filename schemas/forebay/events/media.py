"""Images and videos of a prompt, and their embeddings as another worker made them. Holds what clients sent."""

from typing import Annotated, Literal

import msgspec

from forebay.events.base import Count, Digest, Name, Part

MEDIA_BYTES_MAX = 8 << 20  # of one request: a record of 16 MiB also holds the longest prompt
MEDIA_MAX = 64  # of one request
DESCRIPTOR_BYTES_MAX = 64 << 10  # half a kilobyte with one network device

MediaKind = Literal["image", "video"]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64, description="SHA-256 in hex.")]


class Media(Part, frozen=True, kw_only=True):
    """An image or a video that stands in a prompt from token `first_token` on, for `tokens` placeholders.

    `digest` is of its bytes, and names it everywhere: in block hashes, in engines and in caches of embeddings. Without
    `content` somebody else encoded it, or the recording was anonymised.
    """

    kind: MediaKind
    digest: Sha256
    mime: Name
    first_token: Count
    tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    content: bytes = b""


class Encoded(Part, frozen=True, kw_only=True):
    """The embeddings of all media of a request, one row a placeholder, in the memory of the worker that made them.

    `descriptor` says where they lie, to the transfer layer alone. `checksum` is the XXH3-64 of their bytes.
    """

    descriptor: Annotated[bytes, msgspec.Meta(max_length=DESCRIPTOR_BYTES_MAX)]
    shape: tuple[Count, ...]
    dtype: Name
    checksum: Digest


def require_bounded(media: tuple[Media, ...]) -> None:
    """Refuse more media than a request may have (ValueError)."""
    if len(media) > MEDIA_MAX:
        raise ValueError(f"{len(media)} images and videos are more than {MEDIA_MAX}")
    total = sum(len(one.content) for one in media)
    if total > MEDIA_BYTES_MAX:
        raise ValueError(f"{total} bytes of images and videos are more than {MEDIA_BYTES_MAX}")
