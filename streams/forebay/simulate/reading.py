"""Resolution of a workload name: the path of a workload file or folder, or a generator with parameters.

The format of a file is detected from its content. A prefix from FORMATS sets the format, as in `azure:PATH`.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from forebay.simulate.mooncake import MooncakeRow
from forebay.simulate.workload import Workload, WorkloadOptions, WorkloadUnusable
from forebay.simulate.workloads.azure import AzureFile
from forebay.simulate.workloads.lines import BOM, lines
from forebay.simulate.workloads.prepare import PreparedWorkload
from forebay.simulate.workloads.recording import RecordingFile
from forebay.simulate.workloads.rows import RowFile
from forebay.simulate.workloads.runs import RUN_FORMATS, AgentRuns
from forebay.simulate.workloads.source import NOT_JSON, WorkloadSource, require_readable
from forebay.simulate.workloads.synthetic import Synthetic

FORMATS = ("forebay", "mooncake", "azure", "recording", *RUN_FORMATS, "synthetic")
HEAD_BYTES = 1 << 16
SQLITE = b"SQLite format 3\0"  # a recording, or the log of `forebay up`
ROW_FIELDS = tuple(f'"{name}"'.encode() for name in MooncakeRow.__struct_fields__)
RUN_SUFFIXES = (".json", ".jsonl")


def open_workload(name: str | Sequence[str], options: WorkloadOptions) -> Workload:
    """Open the workload with this name.

    Args:
        name: a path or a generator. Several names must be recorded agent runs, which are played side by side.

    Raises:
        WorkloadUnusable: a file cannot be read, or its format is unknown.
    """
    return PreparedWorkload(_source([name] if isinstance(name, str) else list(name), options), options)


def _source(names: list[str], options: WorkloadOptions) -> WorkloadSource:
    specified = [_split(one) for one in names]
    if len(specified) == 1 and specified[0][0] == "synthetic":
        return Synthetic(specified[0][1], options.seed)
    files = [[Path(path)] if form == "synthetic" else _files(Path(path)) for form, path in specified]
    formats = [form or detect_format(found[0]) for (form, _), found in zip(specified, files, strict=True)]
    paths = [path for found in files for path in found]
    if formats[0] in RUN_FORMATS and len(set(formats)) == 1:
        return AgentRuns(formats[0], paths, options, _name(names))
    if len(paths) > 1:
        text = f"{_name(names)}: only runs of one format can be played from several files"
        raise WorkloadUnusable(f"{text} ({', '.join(RUN_FORMATS)}); got {', '.join(dict.fromkeys(formats))}")
    match formats[0]:
        case "azure":
            return AzureFile(paths[0])
        case "recording":
            return RecordingFile(paths[0])
        case form:
            return RowFile(paths[0], ours=form == "forebay")


def detect_format(path: Path) -> str:
    """Return the format of a file, detected from its beginning.

    Raises:
        WorkloadUnusable: the format is unknown or the file cannot be read.
    """
    with require_readable(path).open("rb") as file:
        head = file.read(HEAD_BYTES).removeprefix(BOM).lstrip()
    if head.startswith(SQLITE):
        return "recording"
    if path.suffix.lower() == ".csv" or not head.startswith(b"{"):
        return "azure" if path.suffix.lower() == ".csv" or head.startswith(b"TIMESTAMP,") else _rows(path, head)
    _, _, first = next(lines(path))
    try:
        keys = set(msgspec.json.decode(first, type=dict[str, msgspec.Raw]))
    except NOT_JSON:
        # The line is longer than HEAD_BYTES, or one object spans many lines.
        return "weka" if b'"requests"' in head and b'"hash_id_scope"' in head else _rows(path, head)
    if {"format", "version"} <= keys:
        return "forebay"
    if "requests" in keys:
        return "weka"
    return "lmcache" if {"input", "output"} <= keys else _rows(path, head)


def _rows(path: Path, head: bytes) -> str:
    """Return the format of a file with one JSON object per line, or of an empty or binary file."""
    if not head or b"\0" in head or any(name in head for name in ROW_FIELDS):
        return "mooncake"
    known = ", ".join(form for form in FORMATS if form != "synthetic")
    reason = "unknown format; name one with a prefix, as in mooncake:FILE"
    raise WorkloadUnusable(f"{path}: {reason} (formats: {known})")


def _split(name: str) -> tuple[str, str]:
    """Split a format prefix from a name. The prefix is empty if there is none."""
    form, colon, rest = name.partition(":")
    return (form, rest) if colon and form in FORMATS else ("", name)


def _files(path: Path) -> list[Path]:
    """Return the file itself, or the run files of a folder sorted by name."""
    try:
        if not path.is_dir():
            return [path]
        found = sorted(one for one in path.iterdir() if one.suffix in RUN_SUFFIXES and one.is_file())
    except (OSError, ValueError) as error:
        raise WorkloadUnusable(f"{path}: cannot be read ({error})") from error
    if not found:
        raise WorkloadUnusable(f"{path}: the folder contains no {' or '.join(RUN_SUFFIXES)} file")
    return found


def _name(names: list[str]) -> str:
    return Path(_split(names[0])[1]).name if len(names) == 1 else f"{len(names)} runs"
