"""Stand-in for a vision encoder: deterministic embeddings on any CPU, without a model and without meaning.

The embeddings of an image depend on every pixel of a small copy of the image. Those of a video depend on the bytes of
its file. They have the right shape and are equal on every machine, so tests can verify that the right bytes arrive.
"""

import io
from collections.abc import Sequence
from functools import cache
from hashlib import shake_128
from typing import TYPE_CHECKING

from forebay.events.media import Media
from forebay.workers.engine import EngineError

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.embeddings import Array

WIDTH = 64  # length of an embedding
SIDE = 8  # width and height of the small copy, in pixels
CHANNELS = 3
PIXELS = SIDE * SIDE * CHANNELS
WEIGHTS_SEED = 1337
WEIGHT_MAX = 8
IMAGE_PIXELS_MAX = 64 << 20  # the same limit as at the ingress, after decompression


class MediaUnusable(Exception):
    """An image or video is invalid, so no worker can encode it. The message is for the client."""


class StandInEncoder:
    """Encoder that computes deterministic projections of pixels.

    An image or video has one float32 vector of length `WIDTH` per placeholder token.
    """

    def load(self) -> None:
        """Check that numpy and Pillow are installed. Raises EngineError if one is missing."""
        try:
            import numpy  # noqa: F401, PLC0415 - an extra
            import PIL.Image  # noqa: F401, PLC0415 - an extra
        except ImportError as error:
            text = f"the stand-in encoder needs numpy and Pillow ({error}): pip install 'forebay[media]'"
            raise EngineError(text) from error

    def encode(self, media: Media) -> "Array":
        """Return the embeddings of one image or video, of shape [placeholder tokens, WIDTH].

        Raises MediaUnusable if the image is invalid.
        """
        import numpy as np  # noqa: PLC0415 - an extra

        pixels = _pixels(media.content) if media.kind == "image" else shake_128(media.content).digest(PIXELS)
        seen = np.frombuffer(pixels, dtype=np.uint8).astype(np.int32)
        shifted = np.stack([np.roll(seen, at) for at in range(media.tokens)])
        # Integers that float32 represents exactly, so rounding is the same on every machine.
        return (shifted @ _weights()).astype(np.float32)

    def encode_all(self, media: Sequence[Media]) -> "Array":
        """Return the embeddings of several images and videos, in order, of shape [placeholder tokens, WIDTH].

        Raises MediaUnusable if an image is invalid, EngineError if numpy or Pillow is not installed.
        """
        self.load()
        import numpy as np  # noqa: PLC0415 - an extra

        return np.concatenate([self.encode(one) for one in media])


@cache
def _weights() -> "Array":
    import numpy as np  # noqa: PLC0415 - an extra

    draw = np.random.Generator(np.random.PCG64(WEIGHTS_SEED))
    return draw.integers(-WEIGHT_MAX, WEIGHT_MAX, (PIXELS, WIDTH), dtype=np.int32)


def _pixels(content: bytes) -> bytes:
    from PIL import Image  # noqa: PLC0415 - an extra

    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > IMAGE_PIXELS_MAX:
                size = f"{image.width} x {image.height}"
                raise MediaUnusable(f"an image of {size} pixels is too large; the limit is {IMAGE_PIXELS_MAX:,} pixels")
            pixels: bytes = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX).tobytes()
            return pixels
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaUnusable(f"cannot decode an image: {error}") from error
