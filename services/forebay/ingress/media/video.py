"""Frames that vLLM samples of a video: their number and size, from the container and the first frame.

Theory of operation. For Qwen2-VL and Qwen2.5-VL, vLLM samples `RATE` frames per second. The number of these frames
depends on the number of frames and the frame rate that OpenCV reports to vLLM. Both are computed here from the same
fields of the container by the same formulas, with PyAV. The packets of the video are counted, because a container may
announce more frames than it has. Only the first frame is decoded, for its size and rotation.
"""

import io
import math
from typing import TYPE_CHECKING

from forebay.ingress.errors import ApiError, invalid
from forebay.runtime.errors import install_command

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

    from forebay.ingress.media.tokens import MediaRef

CODECS = ("h264", "hevc", "mjpeg", "mpeg4", "vp8", "vp9")  # OpenCV's wheel has no decoder for AV1
RATE = 2  # sampled frames per second
SAMPLED_MIN, SAMPLED_MAX, SAMPLED_STEP = 4, 768, 2
FRAMES_MAX = 18_000  # ten minutes at 30 frames per second; vLLM decodes nearly all of them
DECODED_PIXELS_MAX = 20_000_000_000  # of all frames together: 5 minutes in full HD
FRAME_PIXELS_MAX = 40_000_000  # as of an image
SAMPLED_PIXELS_MAX = 400_000_000  # of the sampled frames together, which vLLM keeps uncompressed: 1.2 GB
LIMITS = {"max_pixels": str(FRAME_PIXELS_MAX)}  # of FFmpeg's decoder, because a frame may be larger than announced
QUARTER_TURNS = (90, 270)  # degrees; with these rotations, height and width are exchanged


def sampled_frames(total: int, rate: float, available: int) -> int:
    """Return the number of frames that vLLM samples; 0 if it cannot sample any.

    Args:
        total: frames of the video, as the container announces them.
        rate: frames per second.
        available: frames that the video has. Samples after them are left out.
    """
    longest = min(SAMPLED_MAX, total) // SAMPLED_STEP * SAMPLED_STEP
    wanted = min(max(total / rate * RATE, SAMPLED_MIN), longest)
    if (sampled := math.floor(wanted / SAMPLED_STEP) * SAMPLED_STEP) <= 0:
        return 0
    step = total / sampled
    count = math.ceil(total / step)  # by rounding, it may be one more
    last = min(int((count - 1) * step), total - 1)
    return count - (last >= available)


def sampled_size(ref: "MediaRef", content: bytes, container: str) -> tuple[int, int, int]:
    """Return the number of sampled frames of a video, and the height and width of each in pixels.

    `container` is the name of FFmpeg's demuxer. Raises ApiError if the video is invalid, truncated or too large.
    """
    try:
        import av  # noqa: PLC0415 - an extra
    except ImportError as error:
        text = f"{ref.where}: this ingress needs PyAV to count the frames of videos: {install_command('media')}"
        raise ApiError(501, "media_not_installed", text, ref.where) from error
    try:
        # The format is fixed, because other demuxers read further files that the content names.
        with av.open(io.BytesIO(content), "r", format=container, options=LIMITS) as opened:
            if not opened.streams.video:
                raise _invalid(ref, "it has no video stream")
            return _size(ref, opened, opened.streams.video[0], len(content))
    except (av.FFmpegError, ValueError, LookupError) as error:
        raise _invalid(ref, f"cannot decode it ({type(error).__name__})") from error


def _size(ref: "MediaRef", opened: "InputContainer", stream: "VideoStream", length: int) -> tuple[int, int, int]:
    if (codec := stream.codec_context.name) not in CODECS:
        raise _invalid(ref, f"its codec is {codec}; supported codecs are {', '.join(CODECS)}")
    pixels = stream.width * stream.height
    if pixels > FRAME_PIXELS_MAX:
        raise _too_large(ref, f"{stream.width} x {stream.height} pixels", f"{FRAME_PIXELS_MAX:,} pixels")
    stream.codec_context.options = LIMITS
    first, available = None, 0
    for packet in opened.demux(stream):
        if packet.is_corrupt:
            raise _invalid(ref, "it is truncated")
        if first is None:  # the last packet is empty, so a decoder with a delay ends there
            first = next(iter(packet.decode()), None)
        available += packet.size > 0 and not packet.is_discard
        if available > FRAMES_MAX or available * pixels > DECODED_PIXELS_MAX:
            limit = f"{FRAMES_MAX:,} frames and {DECODED_PIXELS_MAX:,} pixels in all of them"
            raise _too_large(ref, f"more than {available - 1:,} frames of {stream.width} x {stream.height}", limit)
    if any(entry.pos + entry.size > length for entry in stream.index_entries):
        raise _invalid(ref, "it is truncated")
    if first is None:
        raise _invalid(ref, "it has no frames")
    total, rate = _announced(opened, stream)
    if rate <= 0 or total <= 0:
        raise _invalid(ref, "its container has no duration or no frame rate")
    if available < total - 1:
        if opened.format.name.startswith(("matroska", "avi")):  # others have edit lists, which hide frames
            text = f"it has {available} frames, but its container announces {total}"
            raise _invalid(ref, f"{text}; it is truncated, or its frame rate varies: convert it to a constant one")
        total = available
    if (frames := sampled_frames(total, rate, available)) == 0:
        raise _invalid(ref, f"it has {total} frames; the model needs at least {SAMPLED_STEP}")
    if frames * pixels > SAMPLED_PIXELS_MAX:
        has = f"{frames} sampled frames of {stream.width} x {stream.height} pixels"
        raise _too_large(ref, has, f"{SAMPLED_PIXELS_MAX:,} pixels together")
    turned = first.rotation % 360 in QUARTER_TURNS
    return (frames, first.width, first.height) if turned else (frames, first.height, first.width)


def _announced(opened: "InputContainer", stream: "VideoStream") -> tuple[int, float]:
    """Return the number of frames and the frames per second that OpenCV reports."""
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    if stream.frames:
        return stream.frames, rate
    seconds = (opened.duration or 0) / 1_000_000
    if seconds <= 0 and stream.duration is not None and stream.time_base is not None:
        seconds = float(stream.duration * stream.time_base)
    return math.floor(seconds * rate + 0.5), rate


def _invalid(ref: "MediaRef", why: str) -> ApiError:
    return invalid(f"{ref.where}: not a valid video: {why}", ref.where, "not_a_video")


def _too_large(ref: "MediaRef", size: str, limit: str) -> ApiError:
    text = f"{ref.where}: the video has {size}; the limit is {limit}"
    return ApiError(413, "media_too_large", text, ref.where)
