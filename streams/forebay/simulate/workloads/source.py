"""Interface of the readers of workload formats: the recorded requests, and errors in single rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from forebay.runtime.errors import ConfigError
from forebay.simulate.workload import Survey, Turn

REASONS_MAX = 20  # enough to see what is wrong with a file
PROMPT_TOKENS_MAX = 1 << 24  # far beyond any model's context; such a prompt takes 64 MiB
OUTPUT_TOKENS_MAX = (1 << 31) - 1  # the maximum of a request's max_tokens
TIME_MS_MAX = 3_155_760_000_000  # 100 years, so that microseconds stay far below 64 bits at any speed
LATEST_US = 1 << 62  # limit for the sum of long think times
US_PER_MS = 1_000
US_PER_S = 1_000_000
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # all errors that a decoder may raise

BlockId = Annotated[int, msgspec.Meta(ge=0)]
BLOCK_ID_MAX = (1 << 64) - 1

LINE_BYTES_MAX = 64 << 20  # a prompt of maximum length has a few megabytes of text
BOM = b"\xef\xbb\xbf"


def lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield line number (from 1), byte offset and stripped content of each line that is not blank."""
    try:
        with path.open("rb") as file:
            at = 0
            number = 0
            while line := file.readline(LINE_BYTES_MAX):
                number += 1
                if number == 1:
                    if b"\0" in line:
                        raise ConfigError(f"{path}: is not UTF-8 text")
                    if line.startswith(BOM):
                        at, line = len(BOM), line[len(BOM) :]
                if len(line) == LINE_BYTES_MAX:
                    raise ConfigError(f"{path}, line {number}: the line is longer than {LINE_BYTES_MAX >> 20} MiB")
                text = line.strip()
                if text:
                    yield number, at, text
                at += len(line)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


class RowErrors:
    """Errors in the rows of a workload. An error ends the reading, or is only counted if bad rows are to be skipped.

    Messages call a row `unit`, such as `line`. `row` is the position of the current row in the file.
    """

    def __init__(self, *, skip: bool) -> None:
        self.file = ""
        self.unit = "line"
        self.row: int | str = 0
        self._skip = skip
        self._skipped = 0
        self._reasons: list[str] = []

    def report(self, reason: str) -> None:
        """Report that the current row cannot be played. Raises ConfigError if bad rows are not to be skipped."""
        text = f"{self.file}, {self.unit} {self.row}: {reason}"
        if not self._skip:
            raise ConfigError(f"{text}; correct the row, or skip such rows with --skip-bad-rows")
        self._skipped += 1
        if len(self._reasons) < REASONS_MAX:
            self._reasons.append(text)

    def survey(self, requests: int, notes: list[str]) -> Survey:
        """Return the summary of the workload, with the errors that were reported."""
        return Survey(requests=requests, skipped=self._skipped, reasons=self._reasons, notes=notes)

    def empty_workload(self, name: str) -> ConfigError:
        """Return the error for a workload without a playable request."""
        skipped = f"; {self._skipped} rows were skipped, the first one: {self._reasons[0]}" if self._skipped else ""
        return ConfigError(f"{name}: contains no request to play{skipped}")


class WorkloadSource(Protocol):
    """Workload as it was recorded or generated, before `WorkloadOptions` are applied. Picklable."""

    name: str
    block_tokens: int  # tokens per id of `Turn.block_ids`
    # Remarks for the user on how the workload was read. Complete once `turns` has yielded the last request.
    notes: list[str]

    def turns(self, errors: RowErrors) -> Iterator[Turn]:
        """Yield the requests in the order of `Workload.turns`, numbered from 0. Sets `errors.row` for each request."""
        ...


def require_readable(path: Path) -> Path:
    """Return the path after checking that it is a regular, readable file."""
    try:
        if not path.is_file() and not path.is_dir() and path.exists():
            reason = "is a pipe or a device, which cannot be read twice; write its contents to a file"
            raise ConfigError(f"{path}: {reason}")
        with path.open("rb"):
            return path
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from error


def invalid_lengths(prompt_tokens: int, output_tokens: int) -> str:
    """Return why a request of these lengths cannot be played; empty if it can."""
    if not 1 <= prompt_tokens <= PROMPT_TOKENS_MAX:
        return f"got a prompt of {prompt_tokens} tokens; must be 1 to {PROMPT_TOKENS_MAX}"
    if not 1 <= output_tokens <= OUTPUT_TOKENS_MAX:
        return f"got a response of {output_tokens} tokens; must be 1 to {OUTPUT_TOKENS_MAX}"
    return ""
