"""Resolution of a workload name: the path of a workload file, or a generator with parameters.

The format of a file is detected from its content. A prefix from FORMATS sets the format, as in `azure:PATH`.
"""

from pathlib import Path

import msgspec

from forebay.runtime.errors import ConfigError
from forebay.simulate.workload import Workload, WorkloadOptions
from forebay.simulate.workloads.prepare import PreparedWorkload
from forebay.simulate.workloads.rows import MooncakeRow, RowFile
from forebay.simulate.workloads.source import BOM, NOT_JSON, WorkloadSource, lines, require_readable
from forebay.simulate.workloads.synthetic import Synthetic
from forebay.simulate.workloads.table import PRESETS, TableFile, columns_of, preset_of

FORMATS = ("forebay", "mooncake", *PRESETS, "recording", "synthetic")
HEAD_BYTES = 1 << 16
SQLITE = b"SQLite format 3\0"  # a recording, or the log of `forebay up`
ROW_FIELDS = tuple(f'"{name}"'.encode() for name in MooncakeRow.__struct_fields__)


def open_workload(name: str, options: WorkloadOptions) -> Workload:
    """Open a workload: a path or a generator. Raises ConfigError if a file is unreadable or of unknown format."""
    return PreparedWorkload(_source(name, options), options)


def _source(name: str, options: WorkloadOptions) -> WorkloadSource:
    form, colon, rest = name.partition(":")
    if form == "synthetic" and colon:
        if options.columns is not None:
            raise ConfigError("--columns: a generated workload has no columns; leave the option out")
        return Synthetic(rest, options.seed)
    path = Path(rest if colon and form in FORMATS else name)
    if options.columns is not None:
        return TableFile(path, columns_of(options.columns))
    form = form if colon and form in FORMATS else detect_format(path)
    if form in PRESETS:
        return TableFile(path, PRESETS[form])
    if form == "recording":
        from forebay.simulate.workloads.recording import RecordingFile  # noqa: PLC0415 - imports the readers of logs

        return RecordingFile(path)
    return RowFile(path, ours=form == "forebay")


def detect_format(path: Path) -> str:
    """Return the format of a file, detected from its beginning."""
    with require_readable(path).open("rb") as file:
        head = file.read(HEAD_BYTES).removeprefix(BOM).lstrip()
    if head.startswith(SQLITE):
        return "recording"
    first = head.partition(b"\n")[0].strip()
    if preset := preset_of(first):
        return preset
    if head.startswith(b"{"):
        try:
            if {"format", "version"} <= set(msgspec.json.decode(next(lines(path))[2], type=dict[str, msgspec.Raw])):
                return "forebay"
        except NOT_JSON:
            pass  # reported as an invalid row
    if not head or b"\0" in head or any(name in head for name in ROW_FIELDS):
        return "mooncake"
    known = ", ".join(form for form in FORMATS if form != "synthetic")
    reason = "unknown format; name the columns of a table with --columns, or a format, as in mooncake:FILE"
    raise ConfigError(f"{path}: {reason} (formats: {known})")
