"""Images and videos of a prompt, and their embeddings by another worker. Contains data that clients sent."""

from typing import Annotated, Literal

import msgspec

from forebay.events.base import Count, Digest, Name, Part
from forebay.events.privacy import CHECKSUM, DROPPED, KEPT

MEDIA_BYTES_MAX = 8 << 20  # per request; the 16 MiB record also has to hold the longest prompt
MEDIA_MAX = 64  # per request
DESCRIPTOR_BYTES_MAX = 64 << 10  # half a kilobyte with one network device

MediaKind = Literal["image", "video"]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64, description="SHA-256 in hex.")]


class Media(Part, frozen=True, kw_only=True):
    """Image or video in a prompt.

    Attributes:
        kind: image or video.
        digest: SHA-256 of its bytes, which identifies it in block hashes, engines and embedding caches.
        mime: media type.
        first_token: position of its first placeholder token.
        tokens: number of placeholder tokens.
        content: its bytes; empty if another worker encoded it or the recording was anonymized.
    """

    kind: MediaKind
    digest: Sha256
    mime: Name
    first_token: Count
    tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    content: bytes = b""


class Encoded(Part, frozen=True, kw_only=True):
    """Embeddings of all media of a request, one row per placeholder, in the memory of the worker that encoded them.

    Attributes:
        descriptor: location, readable by the transfer layer alone.
        shape: dimensions of the tensor.
        dtype: element type.
        checksum: XXH3-64 of the XXH3-64s of the transferred blocks, in order, as little-endian u64.
    """

    descriptor: Annotated[bytes, msgspec.Meta(max_length=DESCRIPTOR_BYTES_MAX), DROPPED]
    shape: tuple[Count, ...]
    dtype: Annotated[Name, KEPT]
    checksum: Annotated[Digest, CHECKSUM]

    @property
    def shape_text(self) -> str:
        """Dimensions for display, such as `576 x 4096`."""
        return " x ".join(map(str, self.shape))


def require_bounded(media: tuple[Media, ...]) -> None:
    """Check the number and total size of media of a request. Raises ValueError above the limits."""
    if len(media) > MEDIA_MAX:
        raise ValueError(f"too many images and videos: {len(media)}, the maximum is {MEDIA_MAX}")
    total = sum(len(one.content) for one in media)
    if total > MEDIA_BYTES_MAX:
        raise ValueError(f"images and videos are too large: {total} bytes, the maximum is {MEDIA_BYTES_MAX}")
