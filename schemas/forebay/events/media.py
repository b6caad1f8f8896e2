"""Parts of events with the images and videos of a prompt, and with their embeddings. They contain data of clients."""

from typing import Annotated, Literal

import msgspec

from forebay.events.base import Count, Digest, Name, Part
from forebay.events.privacy import CHECKSUM, DROPPED, SHA256, ZEROED, SystemName

MEDIA_BYTES_MAX = 8 << 20  # per request; the 16 MiB record also has to hold the longest prompt
MEDIA_MAX = 64  # per request
DESCRIPTOR_BYTES_MAX = 64 << 10  # a descriptor takes half a kilobyte if there is one network device
METADATA_BYTES_MAX = 16 << 10  # some 150 bytes per image

MediaKind = Literal["image", "video"]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64, description="SHA-256 in hex.")]


class Media(Part, frozen=True, kw_only=True):
    """Image or video in a prompt.

    In the prompt, placeholder tokens stand for it. The engine replaces them by its embedding.

    Attributes:
        kind: image or video.
        digest: SHA-256 of its bytes, which identifies it in block hashes, engines and embedding caches.
        mime: media type.
        first_token: position of its first placeholder token in the prompt, from 0.
        tokens: number of placeholder tokens, with the tokens around them that also belong to it.
        replaced: token ids that the engine itself replaces by these tokens; empty if it is the first of these tokens.
        content: its bytes; empty if another worker has encoded it or the recording was anonymized.
    """

    kind: MediaKind
    digest: Annotated[Sha256, SHA256]
    mime: Annotated[Name, DROPPED]
    first_token: Count
    tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    replaced: Annotated[tuple[Count, ...], ZEROED] = ()
    content: Annotated[bytes, DROPPED] = b""


class Encoded(Part, frozen=True, kw_only=True):
    """Location of the embeddings of all images and videos of a request, in the memory of the worker that encoded them.

    The embeddings are one tensor with one row per placeholder token.

    Attributes:
        descriptor: location of the tensor, in a format that only the transfer layer reads.
        shape: dimensions of the tensor.
        checksum: XXH3-64 over the XXH3-64 values of the transferred blocks, in order, each as little-endian u64.
        metadata: what the engine needs beside the tensor, in a format that only engines read; empty if nothing.
    """

    descriptor: Annotated[bytes, msgspec.Meta(max_length=DESCRIPTOR_BYTES_MAX), DROPPED]
    shape: tuple[Count, ...]
    dtype: SystemName
    checksum: Annotated[Digest, CHECKSUM]
    metadata: Annotated[bytes, msgspec.Meta(max_length=METADATA_BYTES_MAX), DROPPED] = b""

    @property
    def shape_text(self) -> str:
        """Dimensions of the tensor for display, such as `576 x 4096`."""
        return " x ".join(map(str, self.shape))


def require_bounded(media: tuple[Media, ...]) -> None:
    """Check the images and videos of one request against `MEDIA_MAX` and `MEDIA_BYTES_MAX`.

    Raises:
        ValueError: there are too many, or their total size is too large.
    """
    if len(media) > MEDIA_MAX:
        raise ValueError(f"too many images and videos: {len(media)}, the maximum is {MEDIA_MAX}")
    total = sum(len(one.content) for one in media)
    if total > MEDIA_BYTES_MAX:
        raise ValueError(f"images and videos are too large: {total} bytes, the maximum is {MEDIA_BYTES_MAX}")
