"""Which workload a name stands for: a path in any format, or a generator with its parameters.

A format is told by a file's content; `azure:PATH`, with any name of FORMATS, says it outright.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from forebay.simulate.mooncake import Row
from forebay.simulate.workload import Workload, WorkloadOptions, WorkloadUnusable
from forebay.simulate.workloads.azure import AzureFile
from forebay.simulate.workloads.lines import BOM, lines
from forebay.simulate.workloads.prepare import Played
from forebay.simulate.workloads.recording import RecordingFile
from forebay.simulate.workloads.rows import RowFile
from forebay.simulate.workloads.runs import RUN_FORMATS, Runs
from forebay.simulate.workloads.source import NOT_JSON, Source, opened
from forebay.simulate.workloads.synthetic import Synthetic

FORMATS = ("forebay", "mooncake", "azure", "recording", *RUN_FORMATS, "synthetic")
HEAD_BYTES = 1 << 16
SQLITE = b"SQLite format 3\0"  # a recording, or the log of `forebay up`
ROW_FIELDS = tuple(f'"{name}"'.encode() for name in Row.__struct_fields__)
RUN_SUFFIXES = (".json", ".jsonl")


def open_workload(name: str | Sequence[str], options: WorkloadOptions) -> Workload:
    """The workload that a name stands for; several names are runs to be played side by side.

    Raises WorkloadUnusable.
    """
    return Played(_source([name] if isinstance(name, str) else list(name), options), options)


def _source(names: list[str], options: WorkloadOptions) -> Source:
    said = [_split(one) for one in names]
    if len(said) == 1 and said[0][0] == "synthetic":
        return Synthetic(said[0][1], options.seed)
    files = [[Path(path)] if form == "synthetic" else _files(Path(path)) for form, path in said]
    formats = [form or told_format(found[0]) for (form, _), found in zip(said, files, strict=True)]
    paths = [path for found in files for path in found]
    if formats[0] in RUN_FORMATS and len(set(formats)) == 1:
        return Runs(formats[0], paths, options, _name(names))
    if len(paths) > 1:
        text = f"{_name(names)}: of several files only runs of one format can be played side by side"
        raise WorkloadUnusable(f"{text} ({', '.join(RUN_FORMATS)}); these are {', '.join(dict.fromkeys(formats))}")
    match formats[0]:
        case "azure":
            return AzureFile(paths[0])
        case "recording":
            return RecordingFile(paths[0])
        case form:
            return RowFile(paths[0], ours=form == "forebay")


def told_format(path: Path) -> str:
    """The format that a file's beginning speaks for. Raises WorkloadUnusable for none, or if it cannot be read."""
    with opened(path).open("rb") as file:
        head = file.read(HEAD_BYTES).removeprefix(BOM).lstrip()
    if head.startswith(SQLITE):
        return "recording"
    if path.suffix.lower() == ".csv" or not head.startswith(b"{"):
        return "azure" if path.suffix.lower() == ".csv" or head.startswith(b"TIMESTAMP,") else _rows(path, head)
    _, _, first = next(lines(path))
    try:
        keys = set(msgspec.json.decode(first, type=dict[str, msgspec.Raw]))
    except NOT_JSON:
        # Cut off, or one object over many lines.
        return "weka" if b'"requests"' in head and b'"hash_id_scope"' in head else _rows(path, head)
    if {"format", "version"} <= keys:
        return "forebay"
    if "requests" in keys:
        return "weka"
    return "lmcache" if {"input", "output"} <= keys else _rows(path, head)


def _rows(path: Path, head: bytes) -> str:
    """Mooncake's format, if any of its fields is there. What holds nothing, or no text, is refused by who reads it."""
    if not head or b"\0" in head or any(name in head for name in ROW_FIELDS):
        return "mooncake"
    known = ", ".join(form for form in FORMATS if form != "synthetic")
    reason = "is in no format that is known; one that is meant can be said before it, as in mooncake:FILE"
    raise WorkloadUnusable(f"{path}: {reason} ({known})")


def _split(name: str) -> tuple[str, str]:
    """The format that a name begins with, empty for none, and the rest."""
    form, colon, rest = name.partition(":")
    return (form, rest) if colon and form in FORMATS else ("", name)


def _files(path: Path) -> list[Path]:
    """The file, or those of a folder in the order of their names."""
    try:
        if not path.is_dir():
            return [path]
        found = sorted(one for one in path.iterdir() if one.suffix in RUN_SUFFIXES and one.is_file())
    except (OSError, ValueError) as error:
        raise WorkloadUnusable(f"{path}: cannot be read ({error})") from error
    if not found:
        raise WorkloadUnusable(f"{path}: is a folder without a {' or '.join(RUN_SUFFIXES)} file")
    return found


def _name(names: list[str]) -> str:
    return Path(_split(names[0])[1]).name if len(names) == 1 else f"{len(names)} runs"
