"""Lines of a text file, one at a time, with their place in it."""

from collections.abc import Iterator
from pathlib import Path

from forebay.simulate.workload import WorkloadUnusable

LINE_BYTES_MAX = 64 << 20  # the text of a long context is a few megabytes; more is no file of lines
BOM = b"\xef\xbb\xbf"


def lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, from 1, byte offset and text of each line that is not blank, without its end.

    Raises WorkloadUnusable for what cannot be read or is no text.
    """
    try:
        with path.open("rb") as file:
            at = 0
            number = 0
            while line := file.readline(LINE_BYTES_MAX):
                number += 1
                if number == 1:
                    if b"\0" in line:
                        raise WorkloadUnusable(f"{path}: is no text in UTF-8")
                    if line.startswith(BOM):
                        at, line = len(BOM), line[len(BOM) :]
                if len(line) == LINE_BYTES_MAX:
                    raise WorkloadUnusable(f"{path}, line {number}: is longer than {LINE_BYTES_MAX >> 20} MiB")
                text = line.strip()
                if text:
                    yield number, at, text
                at += len(line)
    except OSError as error:
        raise WorkloadUnusable(f"{path}: cannot be read ({error.strerror})") from error
