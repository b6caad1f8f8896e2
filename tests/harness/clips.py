"""Small videos of moving bars. Needs the package av."""

import io
import struct
from fractions import Fraction
from typing import Any

import numpy as np

PIXELS = {"mjpeg": "yuvj420p"}


def clip(
    frames: int = 12,
    size: tuple[int, int] = (48, 64),
    rate: Fraction | int = 24,
    container: str = "mp4",
    codec: str = "mpeg4",
    *,
    bar: int = 0,
    every: int = 1,
) -> bytes:
    """Return a video.

    Args:
        size: height and width in pixels.
        bar: brightness of the bar, by which videos differ.
        every: shows all frames after the first half so many times as long, which makes the frame rate variable.
    """
    import av  # noqa: PLC0415 - an extra

    kept = io.BytesIO()
    with av.open(kept, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate)
        (stream.height, stream.width), stream.pix_fmt = size, PIXELS.get(codec, "yuv420p")
        for at in range(frames):
            pixels = np.full((*size, 3), (40, 90, bar), np.uint8)
            pixels[:, at % size[1] :] = (255 - bar, 3 * at % 256, 200)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = at + (every - 1) * max(0, at - frames // 2), 1 / Fraction(rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return kept.getvalue()


def turned(content: bytes) -> bytes:
    """Return a video in MP4 with the rotation of a phone that was held upright."""
    at = content.index(b"tkhd") + 44  # its matrix, in version 0 of the box
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    return content[:at] + matrix + content[at + len(matrix) :]
