"""Stand-in for a vision encoder: deterministic embeddings on any CPU, without a model and without meaning.

They depend on every pixel of a small copy of the image, are equal on every machine, and have the right shape. Tests can
therefore verify that the right bytes arrive. For a video they depend on the bytes of the file only.
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

WIDTH = 64  # of an embedding
SIDE = 8  # of the small copy, in pixels
CHANNELS = 3
PIXELS = SIDE * SIDE * CHANNELS
WEIGHTS_SEED = 1337
WEIGHT_MAX = 8
IMAGE_PIXELS_MAX = 64 << 20  # the same limit as at the ingress, after decompression


class MediaUnusable(Exception):
    """Image or video that no worker can encode. The message is for the client."""


class StandInEncoder:
    """Encoder by deterministic projections of pixels, as float32 of shape [placeholders, WIDTH]."""

    def load(self) -> None:
        """Check that the required packages are installed. Raises EngineError."""
        try:
            import numpy  # noqa: F401, PLC0415 - an extra
            import PIL.Image  # noqa: F401, PLC0415 - an extra
        except ImportError as error:
            text = f"the stand-in encoder needs numpy and Pillow ({error}): pip install 'forebay[media]'"
            raise EngineError(text) from error

    def encode(self, media: Media) -> "Array":
        """Return the embeddings of one image or video. Raises MediaUnusable."""
        import numpy as np  # noqa: PLC0415 - an extra

        pixels = _pixels(media.content) if media.kind == "image" else shake_128(media.content).digest(PIXELS)
        seen = np.frombuffer(pixels, dtype=np.uint8).astype(np.int32)
        shifted = np.stack([np.roll(seen, at) for at in range(media.tokens)])
        # Integers that float32 represents exactly, so rounding is the same on every machine.
        return (shifted @ _weights()).astype(np.float32)

    def encode_all(self, media: Sequence[Media]) -> "Array":
        """Return the embeddings of several media, in order. Raises MediaUnusable, EngineError."""
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
                raise MediaUnusable(f"an image of {image.width} x {image.height} pixels is too large")
            pixels: bytes = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX).tobytes()
            return pixels
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaUnusable(f"cannot decode an image: {error}") from error
