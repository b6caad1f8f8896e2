"""Azure's LLM inference traces: CSV with TIMESTAMP, ContextTokens and GeneratedTokens. Prompts share no prefixes.

Source: Patel et al., "Splitwise" (ISCA 2024), Azure Public Dataset. Timestamps have seven decimals; the reader cuts the
    last decimal.
"""

import csv
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from forebay.simulate.workload import Turn, WorkloadUnusable
from forebay.simulate.workloads.lines import lines
from forebay.simulate.workloads.source import TIME_MS_MAX, US_PER_MS, RowErrors, invalid_lengths, require_readable

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BLOCK_TOKENS = 512  # any value is valid, because the prompts have no block ids
TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?", re.ASCII)
WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)


class AzureFile:
    """Workload source that reads an Azure trace."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            WorkloadUnusable: the file cannot be read.
        """
        self._path = require_readable(path)
        self.name = path.name
        self.block_tokens = BLOCK_TOKENS
        self.notes = ["the trace has no block ids, so prompts share no prefixes"]

    def turns(self, errors: RowErrors) -> Iterator[Turn]:
        """Yield the requests in the order of the file. Arrival times count from the timestamp of the first row."""
        errors.file, errors.unit = str(self._path), "line"
        columns: list[int] | None = None
        number = 0
        began: datetime | None = None
        for errors.row, _, line in lines(self._path):
            try:
                fields = next(csv.reader([line.decode()], strict=True))
            except (UnicodeDecodeError, csv.Error, StopIteration) as error:
                errors.report(f"is not a line of CSV ({error})")
                continue
            if columns is None:
                columns = self._columns(fields)
                continue
            if len(fields) <= max(columns):
                errors.report(f"got {len(fields)} fields; expected {', '.join(COLUMNS)}")
                continue
            time, *counts = (fields[at] for at in columns)
            at = _time(time)
            if at is None or not all(map(WHOLE.fullmatch, counts)):
                errors.report(f"got {','.join((time, *counts))!r}; expected a timestamp and two integers")
                continue
            prompt_tokens, output_tokens = map(int, counts)
            if reason := invalid_lengths(prompt_tokens, output_tokens):
                errors.report(reason)
                continue
            began = began or at
            if at < began:
                errors.report(f"the timestamp {time} is before that of the first row")
                continue
            at_us = (at - began) // timedelta(microseconds=1)
            if at_us > TIME_MS_MAX * US_PER_MS:
                errors.report(f"the timestamp {time} is more than 100 years after that of the first row")
                continue
            yield Turn(number=number, prompt_tokens=prompt_tokens, output_tokens=output_tokens, at_us=at_us)
            number += 1

    def _columns(self, header: list[str]) -> list[int]:
        try:
            return [header.index(name) for name in COLUMNS]
        except ValueError:
            raise WorkloadUnusable(f"{self._path}, line 1: expected the columns {', '.join(COLUMNS)}") from None


def _time(text: str) -> datetime | None:
    """Return a timestamp with a resolution of microseconds; None if the text is not a timestamp."""
    match = TIME.fullmatch(text.strip())
    if match is None:
        return None
    fraction = (match[3] or "").ljust(6, "0")[:6]
    try:
        return datetime.fromisoformat(f"{match[1]} {match[2]}.{fraction}+00:00")
    except ValueError:
        return None
