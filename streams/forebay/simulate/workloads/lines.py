"""Iteration over the lines of a text file with their positions."""

from collections.abc import Iterator
from pathlib import Path

from forebay.simulate.workload import WorkloadUnusable

LINE_BYTES_MAX = 64 << 20  # a prompt of maximum length has a few megabytes of text
BOM = b"\xef\xbb\xbf"


def lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield line number (from 1), byte offset and stripped content of each line that is not blank.

    Raises:
        WorkloadUnusable: the file cannot be read or is not text.
    """
    try:
        with path.open("rb") as file:
            at = 0
            number = 0
            while line := file.readline(LINE_BYTES_MAX):
                number += 1
                if number == 1:
                    if b"\0" in line:
                        raise WorkloadUnusable(f"{path}: is not UTF-8 text")
                    if line.startswith(BOM):
                        at, line = len(BOM), line[len(BOM) :]
                if len(line) == LINE_BYTES_MAX:
                    raise WorkloadUnusable(f"{path}, line {number}: the line is longer than {LINE_BYTES_MAX >> 20} MiB")
                text = line.strip()
                if text:
                    yield number, at, text
                at += len(line)
    except OSError as error:
        raise WorkloadUnusable(f"{path}: cannot be read ({error.strerror})") from error
