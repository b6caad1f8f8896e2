"""Recorded runs of agents side by side: sessions of their own, in closed loop."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from forebay.simulate.workload import Turn, WorkloadOptions
from forebay.simulate.workloads.lmcache import LmcacheRuns
from forebay.simulate.workloads.source import US_PER_S, Faults, Placed, opened
from forebay.simulate.workloads.weka import WekaRuns

RUN_FORMATS = ("weka", "lmcache")


class RunReader(Protocol):
    """A format with one file a run, or several sessions in a file.

    Attributes:
        block_tokens: of the first file; the others have the same.
        local_ids: block ids mean something only within their session.
        notes: see `Source`.
    """

    block_tokens: int
    local_ids: bool
    notes: list[str]

    def starts(self, path: Path) -> list[tuple[int, str]]:
        """Of each session of a file, in us on a clock that the files share, and its name. Raises WorkloadUnusable."""
        ...

    def sessions(self, path: Path, faults: Faults) -> dict[str, Placed]:
        """The sessions of a file: requests numbered, and timed, from the start of each. Raises WorkloadUnusable."""
        ...


class Runs:
    """Files of one such format, as a source."""

    def __init__(self, form: str, paths: list[Path], options: WorkloadOptions, name: str) -> None:
        """Raises WorkloadUnusable."""
        self.name = name
        self._paths = [opened(path) for path in paths]
        self._reader: RunReader = WekaRuns(paths[0]) if form == "weka" else LmcacheRuns(options.tokenizer)
        self._spacing_us = None if options.session_spacing_s is None else round(options.session_spacing_s * US_PER_S)
        self.block_tokens = self._reader.block_tokens
        self.notes = self._reader.notes

    def turns(self, faults: Faults) -> Iterator[Turn]:
        """Session by session, in the order in which they start."""
        reader = self._reader
        found: list[tuple[int, int, str]] = []
        for at, path in enumerate(self._paths):
            starts = reader.starts(path)
            found += [(began_us, at, name) for began_us, name in starts]
            if not starts:  # so nobody asks for its sessions below
                faults.file = str(path)
                reader.sessions(path, faults)
        found.sort(key=lambda one: one[:2])
        read: tuple[int, dict[str, Placed]] = (-1, {})
        number = base = 0
        for at, (began_us, file, name) in enumerate(found):
            path = self._paths[file]
            faults.file = str(path)
            if read[0] != file:
                read = file, reader.sessions(path, faults)
            start_us = began_us - found[0][0] if self._spacing_us is None else at * self._spacing_us
            beyond = base
            for faults.row, turn in (turns := read[1].get(name, [])):
                ids = turn.block_ids
                if reader.local_ids and ids:
                    ids = tuple([base + one for one in ids])
                    beyond = max(beyond, *ids, -1)
                yield replace(
                    turn,
                    number=number + turn.number,
                    after=tuple(number + one for one in turn.after),
                    block_ids=ids,
                    at_us=0 if turn.after and not turn.at_us else start_us + turn.at_us,
                    session_id=path.stem + turn.session_id,
                )
            number += len(turns)
            base = beyond + 1
