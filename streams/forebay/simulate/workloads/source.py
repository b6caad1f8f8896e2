"""What a format has to offer: its requests as they were recorded, and word of those that cannot be played."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from forebay.simulate.workload import Survey, Turn, WorkloadUnusable

REASONS_MAX = 20  # enough to see what is wrong with a file
PROMPT_TOKENS_MAX = 1 << 24  # far beyond any model's context; a prompt of it takes 64 MiB
OUTPUT_TOKENS_MAX = (1 << 31) - 1  # what a request may ask for
TIME_MS_MAX = 3_155_760_000_000  # a century: a clock of microseconds stays far below 64 bits at any speed
LATEST_US = 1 << 62  # whatever think times of centuries add up to
US_PER_MS = 1_000
US_PER_S = 1_000_000
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what a decoder says of any bytes

BlockId = Annotated[int, msgspec.Meta(ge=0)]
BLOCK_ID_MAX = (1 << 64) - 1

Placed = list[tuple[int | str, Turn]]  # requests, each with its place in the file


class Faults:
    """What cannot be played: ends the reading of a workload, or is counted where rows are to be skipped.

    Attributes:
        file: what is being read; `unit` and `row` say where in it, as `line 7`.
    """

    def __init__(self, *, skip: bool) -> None:
        self.file = ""
        self.unit = "line"
        self.row: int | str = 0
        self._skip = skip
        self._skipped = 0
        self._reasons: list[str] = []

    def bad(self, reason: str) -> None:
        """The row that is being read cannot be played. Raises WorkloadUnusable unless such rows are skipped."""
        text = f"{self.file}, {self.unit} {self.row}: {reason}"
        if not self._skip:
            raise WorkloadUnusable(text)
        self._skipped += 1
        if len(self._reasons) < REASONS_MAX:
            self._reasons.append(text)

    def survey(self, requests: int, notes: list[str]) -> Survey:
        """What was found."""
        return Survey(requests=requests, skipped=self._skipped, reasons=self._reasons, notes=notes)

    def nothing(self, name: str) -> WorkloadUnusable:
        """There is nothing to play; with what was skipped."""
        skipped = f": {self._skipped} rows were skipped, first {self._reasons[0]}" if self._skipped else ""
        return WorkloadUnusable(f"{name}: holds no request to play{skipped}")


class Source(Protocol):
    """A workload as it was recorded, or is generated. Picklable.

    Attributes:
        name: what to call it in a table.
        block_tokens: tokens that one of `Turn.block_ids` stands for.
        notes: what a user should know of how it is read; complete once `turns` was read to its end.
    """

    name: str
    block_tokens: int
    notes: list[str]

    def turns(self, faults: Faults) -> Iterator[Turn]:
        """In the order that `Workload.turns` tells, numbered from 0; `faults` names the place of each one."""
        ...


def opened(path: Path) -> Path:
    """The path, if it is a file that can be read again and again. Raises WorkloadUnusable."""
    try:
        if not path.is_file() and not path.is_dir() and path.exists():
            raise WorkloadUnusable(f"{path}: is a pipe or a device, which cannot be read twice: write it to a file")
        with path.open("rb"):
            return path
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise WorkloadUnusable(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from error


def too_many_ids(ids: int, tokens: int, block_tokens: int) -> str:
    """Why a prompt cannot have so many ids, if it cannot: they stand for other lengths than is believed."""
    most = -(-tokens // block_tokens)
    return f"{ids} hash ids, where {tokens} tokens have {most} of {block_tokens} tokens each" if ids > most else ""


def lengths_fault(prompt_tokens: int, output_tokens: int) -> str:
    """Why a request of these lengths cannot be played; empty if it can."""
    if not 1 <= prompt_tokens <= PROMPT_TOKENS_MAX:
        return f"a prompt of {prompt_tokens} tokens: from 1 to {PROMPT_TOKENS_MAX} can be played"
    if not 1 <= output_tokens <= OUTPUT_TOKENS_MAX:
        return f"an answer of {output_tokens} tokens: from 1 to {OUTPUT_TOKENS_MAX} can be played"
    return ""
