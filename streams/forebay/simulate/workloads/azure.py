"""Azure's LLM inference traces: CSV of TIMESTAMP, ContextTokens and GeneratedTokens; prompts share nothing.

Source: Patel et al., "Splitwise" (ISCA 2024), Azure Public Dataset. Seconds have seven digits, the last is cut.
"""

import csv
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from forebay.simulate.workload import Turn, WorkloadUnusable
from forebay.simulate.workloads.lines import lines
from forebay.simulate.workloads.source import TIME_MS_MAX, US_PER_MS, Faults, lengths_fault, opened

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BLOCK_TOKENS = 512  # no prompt has ids
TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?", re.ASCII)
WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)


class AzureFile:
    """Such a file, as a source."""

    def __init__(self, path: Path) -> None:
        """Raises WorkloadUnusable."""
        self._path = opened(path)
        self.name = path.name
        self.block_tokens = BLOCK_TOKENS
        self.notes = ["prompts have no block ids: none shares anything with another"]

    def turns(self, faults: Faults) -> Iterator[Turn]:
        """In the order of the file; times count from the first row's."""
        faults.file, faults.unit = str(self._path), "line"
        columns: list[int] | None = None
        number = 0
        began: datetime | None = None
        for faults.row, _, line in lines(self._path):
            try:
                fields = next(csv.reader([line.decode()], strict=True))
            except (UnicodeDecodeError, csv.Error, StopIteration) as error:
                faults.bad(f"is no line of CSV ({error})")
                continue
            if columns is None:
                columns = self._columns(fields)
                continue
            if len(fields) <= max(columns):
                faults.bad(f"{len(fields)} fields, where {', '.join(COLUMNS)} are to be")
                continue
            time, *counts = (fields[at] for at in columns)
            at = _time(time)
            if at is None or not all(map(WHOLE.fullmatch, counts)):
                faults.bad(f"{','.join((time, *counts))!r} is no time and two whole numbers of tokens")
                continue
            prompt_tokens, output_tokens = map(int, counts)
            if reason := lengths_fault(prompt_tokens, output_tokens):
                faults.bad(reason)
                continue
            began = began or at
            if at < began:
                faults.bad(f"the time {time} is before that of the first row")
                continue
            at_us = (at - began) // timedelta(microseconds=1)
            if at_us > TIME_MS_MAX * US_PER_MS:
                faults.bad(f"the time {time} is more than a century after that of the first row")
                continue
            yield Turn(number=number, prompt_tokens=prompt_tokens, output_tokens=output_tokens, at_us=at_us)
            number += 1

    def _columns(self, header: list[str]) -> list[int]:
        try:
            return [header.index(name) for name in COLUMNS]
        except ValueError:
            raise WorkloadUnusable(f"{self._path}, line 1: the columns {', '.join(COLUMNS)} are to be there") from None


def _time(text: str) -> datetime | None:
    """With microseconds; None for what is no time."""
    said = TIME.fullmatch(text.strip())
    if said is None:
        return None
    fraction = (said[3] or "").ljust(6, "0")[:6]
    try:
        return datetime.fromisoformat(f"{said[1]} {said[2]}.{fraction}+00:00")
    except ValueError:
        return None
