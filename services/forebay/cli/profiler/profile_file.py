"""The file of `forebay profile run`: settings, measured points, and points that could not be measured, as JSON.

The file is written after each point, so that an interrupted run continues. A planner reads `prefill` and `decode`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast

import msgspec

from forebay.events.scaling import DecodePoint, PrefillPoint
from forebay.runtime.errors import ConfigError
from forebay.runtime.files import read_file, replacing

FILE_BYTES_MAX = 16 << 20

ProfiledRole = Literal["aggregated", "prefill", "decode"]


class ProfileSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and how. Only a run with the same settings continues a file."""

    model: str
    worker: str  # id of the worker; empty for the only worker of the system
    role: ProfiledRole  # `prefill` has only prefill points, `decode` only decode points, `aggregated` both
    isl: tuple[int, ...]  # prompt lengths of the prefill points, in tokens
    contexts: tuple[int, ...]  # context lengths of the decode points, in tokens
    concurrencies: tuple[int, ...]  # numbers of concurrent requests of the decode points
    repeats: int
    output_tokens: int  # output tokens per request of the decode points


class GridPoint(msgspec.Struct, frozen=True, kw_only=True):
    stage: Literal["prefill", "decode"]
    tokens: int  # prompt tokens of a prefill point, mean context length of a decode point
    concurrency: int = 1  # concurrent requests of a decode point; 1 for a prefill point

    def __str__(self) -> str:
        if self.stage == "prefill":
            return f"prefill of {self.tokens} tokens"
        return f"decode with context {self.tokens}, concurrency {self.concurrency}"


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """Point that could not be measured, and the reason."""

    point: GridPoint
    reason: str


class MeasuredProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    settings: ProfileSettings
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def has(self, point: GridPoint) -> bool:
        if any(one.point == point for one in self.left_out):
            return True
        if point.stage == "prefill":
            return any(one.isl == point.tokens for one in self.prefill)
        return any((one.context, one.concurrency) == (point.tokens, point.concurrency) for one in self.decode)


def grid(settings: ProfileSettings) -> Iterator[GridPoint]:
    """Yield all points of a profile in the order in which they are measured."""
    if settings.role != "decode":
        for tokens in settings.isl:
            yield GridPoint(stage="prefill", tokens=tokens)
    if settings.role != "prefill":
        for tokens in settings.contexts:
            for concurrency in settings.concurrencies:
                yield GridPoint(stage="decode", tokens=tokens, concurrency=concurrency)


def open_profile(path: Path, settings: ProfileSettings) -> MeasuredProfile:
    """Return the profile in a file that an interrupted run has written, or an empty profile if there is no file."""
    if not path.exists():
        return MeasuredProfile(settings=settings)
    content = read_file(path, "profile", FILE_BYTES_MAX)
    try:
        found = msgspec.json.decode(content, type=MeasuredProfile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a file of this command ({error}); choose another --out") from None
    different = [
        name for name in ProfileSettings.__struct_fields__ if getattr(found.settings, name) != getattr(settings, name)
    ]
    if different:
        values = "; ".join(
            f"{name} was {_shown(found.settings, name)}, now {_shown(settings, name)}" for name in different
        )
        raise ConfigError(f"{path}: measured with other settings ({values}); use those to continue, or another --out")
    return found


def write_profile(path: Path, profile: MeasuredProfile) -> None:
    """Replace the file atomically. Raises ConfigError if it cannot be written."""
    try:
        with replacing(path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _shown(settings: ProfileSettings, name: str) -> str:
    value = getattr(settings, name)
    if isinstance(value, tuple):
        return ",".join(map(str, cast("tuple[int, ...]", value)))
    return str(value) or "none"
