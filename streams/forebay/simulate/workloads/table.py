"""Workload tables: CSV with a header, or JSON lines, with a time and two lengths per request, without shared prefixes.

`--columns time=NAME,prompt=NAME,output=NAME` names the columns; `session=NAME` and `model=NAME` are optional. A time is
a timestamp, or a number of seconds. Presets: Azure's LLM inference traces (Patel et al., "Splitwise", ISCA 2024) and
BurstGPT (Wang et al., 2024).
"""

import csv
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from forebay.events.names import unknown_name
from forebay.runtime.errors import ConfigError
from forebay.simulate.workload import Turn
from forebay.simulate.workloads.source import (
    NOT_JSON,
    TIME_MS_MAX,
    US_PER_MS,
    US_PER_S,
    RowErrors,
    invalid_lengths,
    lines,
    require_readable,
)

REQUIRED = ("time", "prompt", "output")
FIELDS = (*REQUIRED, "session", "model")
PRESETS: Mapping[str, Mapping[str, str]] = {
    "azure": {"time": "TIMESTAMP", "prompt": "ContextTokens", "output": "GeneratedTokens"},
    "burstgpt": {"time": "Timestamp", "prompt": "Request tokens", "output": "Response tokens", "model": "Model"},
}
BLOCK_TOKENS = 512  # any value is valid, because the prompts have no block ids
TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?", re.ASCII)
SECONDS = re.compile(r"\d{1,12}(\.\d{1,9})?", re.ASCII)
OTHER_UNIT = re.compile(r"(?<![a-zA-Z])(?i:[mnuµ]s|[mnu]secs?|(milli|micro|nano)s\w*)(?![a-zA-Z])|(?<=[a-z])[MUN]s$")
WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)


def columns_of(text: str) -> dict[str, str]:
    """Parse `--columns`. Raises ConfigError if a field is unknown, duplicate or missing."""
    columns: dict[str, str] = {}
    for one in text.split(","):
        field, equals, name = one.partition("=")
        if field not in FIELDS:
            raise ConfigError(f"--columns {text}: {unknown_name('field', field, FIELDS)}")
        if not equals or not name or field in columns:
            reason = "duplicate field" if field in columns else "expected FIELD=NAME, got"
            raise ConfigError(f"--columns {text}: {reason} {one!r}")
        columns[field] = name
    if missing := [field for field in REQUIRED if field not in columns]:
        raise ConfigError(f"--columns {text}: missing field {missing[0]}, as in {missing[0]}=NAME")
    if found := OTHER_UNIT.search(columns["time"]):
        reason = f"the name {columns['time']} of its times says {found[0]!r}; expected a timestamp or seconds"
        raise ConfigError(f"--columns {text}: {reason}; convert the column, and rename it")
    return columns


class TableFile:
    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        """Open the file. `columns` has the name of the column of each field (`FIELDS`)."""
        self._path = require_readable(path)
        self._columns = columns
        self.name = path.name
        self.block_tokens = BLOCK_TOKENS
        self.notes = ["the trace has no block ids, so prompts share no prefixes"]

    def turns(self, errors: RowErrors) -> Iterator[Turn]:
        """Yield the requests in the order of the file. Arrival times count from the time of the first row."""
        errors.file, errors.unit = str(self._path), "line"
        number = 0
        began_us: int | None = None
        for row in self._rows(errors):
            time, prompt, output = (_text(row[self._columns[field]]) for field in REQUIRED)
            at_us = _time_us(time)
            if at_us is None or not (WHOLE.fullmatch(prompt) and WHOLE.fullmatch(output)):
                errors.report(f"got {time},{prompt},{output}; expected a timestamp or seconds, and two integers")
                continue
            if reason := invalid_lengths(int(prompt), int(output)):
                errors.report(reason)
                continue
            began_us = at_us if began_us is None else began_us
            if at_us < began_us:
                errors.report(f"the timestamp {time} is before that of the first row")
                continue
            if at_us - began_us > TIME_MS_MAX * US_PER_MS:
                errors.report(f"the timestamp {time} is more than 100 years after that of the first row")
                continue
            session, model = (
                str(value) if (value := row.get(self._columns.get(field, ""))) is not None else ""
                for field in ("session", "model")
            )
            yield Turn(
                number=number,
                prompt_tokens=int(prompt),
                output_tokens=int(output),
                at_us=at_us - began_us,
                session_id=session,
                model=model,
            )
            number += 1

    def _rows(self, errors: RowErrors) -> Iterator[Mapping[str, Any]]:
        """Yield the rows that have all columns."""
        header: list[str] | None = None
        is_json: bool | None = None
        for errors.row, _, line in lines(self._path):
            if is_json is None:
                is_json = line.startswith(b"{")
            if header is None and not is_json:
                header = _fields(line) or []
                if missing := [name for name in self._columns.values() if name not in header]:
                    raise ConfigError(f"{self._path}, line 1: {unknown_name('column', missing[0], header)}")
                continue
            try:
                row = msgspec.json.decode(line, type=dict[str, Any]) if header is None else _fields(line)
            except NOT_JSON as error:
                errors.report(str(error))
                continue
            if row is None:
                errors.report("is not a line of CSV")
                continue
            found = row if isinstance(row, dict) else dict(zip(header or (), row, strict=False))
            if missing := [name for name in self._columns.values() if name not in found]:
                errors.report(f"got {len(row)} fields; {missing[0]} is missing")
                continue
            yield found


def preset_of(first: bytes) -> str:
    """Return the preset whose columns the first line of a file has; empty if there is none."""
    try:
        known = set(msgspec.json.decode(first, type=dict[str, Any]) if first.startswith(b"{") else _fields(first) or ())
    except NOT_JSON:
        return ""
    return next((name for name, columns in PRESETS.items() if known.issuperset(columns.values())), "")


def _fields(line: bytes) -> list[str] | None:
    try:
        return next(csv.reader([line.decode()], strict=True))
    except (UnicodeDecodeError, csv.Error, StopIteration):
        return None


def _text(value: object) -> str:
    return f"{value:.9f}" if isinstance(value, float) else str(value)


def _time_us(text: str) -> int | None:
    """Return the microseconds of a timestamp or a number of seconds; None if the text is neither."""
    if SECONDS.fullmatch(text):
        seconds = float(text)
        return round(seconds * US_PER_S) if isfinite(seconds) else None
    match = TIME.fullmatch(text.strip())
    if match is None:
        return None
    try:
        whole = datetime.fromisoformat(f"{match[1]} {match[2]}").replace(tzinfo=UTC)
    except ValueError:
        return None
    return round(whole.timestamp()) * US_PER_S + int((match[3] or "").ljust(6, "0")[:6])
