"""A stand-in for a vision encoder: embeddings on any CPU without a model. They mean nothing.

They depend on every pixel of a small copy of the image, are the same on every machine, and have the right shape: enough
to prove that the right bytes arrive where they should. Of a video it sees the bytes of the file alone.
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
IMAGE_PIXELS_MAX = 64 << 20  # as at the ingress: what is larger when it is unpacked is no image to look at


class MediaUnusable(Exception):
    """An image or a video that cannot be encoded, whoever tries; the text is fit for the client."""


class StandInEncoder:
    """Deterministic projections of pixels, as float32 of shape [placeholders, WIDTH]."""

    def load(self) -> None:
        """Check that what it needs is installed. Raises EngineError."""
        try:
            import numpy  # noqa: F401, PLC0415 - an extra
            import PIL.Image  # noqa: F401, PLC0415 - an extra
        except ImportError as error:
            text = f"the stand-in encoder needs numpy and Pillow ({error}): pip install 'forebay[media]'"
            raise EngineError(text) from error

    def encode(self, media: Media) -> "Array":
        """The embeddings of one image or video. Raises MediaUnusable."""
        import numpy as np  # noqa: PLC0415 - an extra

        pixels = _pixels(media.content) if media.kind == "image" else shake_128(media.content).digest(PIXELS)
        seen = np.frombuffer(pixels, dtype=np.uint8).astype(np.int32)
        shifted = np.stack([np.roll(seen, at) for at in range(media.tokens)])
        # Whole numbers that float32 holds exactly: no machine rounds them otherwise.
        return (shifted @ _weights()).astype(np.float32)

    def encode_all(self, media: Sequence[Media]) -> "Array":
        """Those of several, one after the other. Raises MediaUnusable, EngineError."""
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
        raise MediaUnusable(f"an image cannot be decoded: {error}") from error
