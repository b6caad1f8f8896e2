"""Recorded runs of agents, played in parallel (closed loop). Each is a session whose requests wait for responses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from forebay.simulate.workload import Turn, WorkloadOptions
from forebay.simulate.workloads.lmcache import LmcacheRuns
from forebay.simulate.workloads.source import US_PER_S, PositionedTurns, RowErrors, require_readable
from forebay.simulate.workloads.weka import WekaRuns

RUN_FORMATS = ("weka", "lmcache")


class RunReader(Protocol):
    """Reader of a trace format whose files contain the sessions of agents.

    Attributes:
        block_tokens: tokens per block id in the first file. All other files must have the same value.
        local_ids: whether equal block ids in different sessions mean different blocks.
        notes: see `WorkloadSource`.
    """

    block_tokens: int
    local_ids: bool
    notes: list[str]

    def starts(self, path: Path) -> list[tuple[int, str]]:
        """Return start and name of each session of a file. Starts are in microseconds of one clock for all files.

        Raises:
            WorkloadUnusable: the file cannot be read.
        """
        ...

    def sessions(self, path: Path, errors: RowErrors) -> dict[str, PositionedTurns]:
        """Return the sessions of a file by name. Numbers and times of requests count from the start of their session.

        Raises:
            WorkloadUnusable: a request is invalid and bad rows are not skipped.
        """
        ...


class AgentRuns:
    """Workload source that plays the sessions of one or more trace files of one format in parallel."""

    def __init__(self, form: str, paths: list[Path], options: WorkloadOptions, name: str) -> None:
        """Open all files.

        Args:
            form: name of the format, from `RUN_FORMATS`.
            options: only `tokenizer` and `session_spacing_s` are used.

        Raises:
            WorkloadUnusable: a file cannot be read.
        """
        self.name = name
        self._paths = [require_readable(path) for path in paths]
        self._reader: RunReader = WekaRuns(paths[0]) if form == "weka" else LmcacheRuns(options.tokenizer)
        self._spacing_us = None if options.session_spacing_s is None else round(options.session_spacing_s * US_PER_S)
        self.block_tokens = self._reader.block_tokens
        self.notes = self._reader.notes

    def turns(self, errors: RowErrors) -> Iterator[Turn]:
        """Yield the requests session by session, in the order in which the sessions start."""
        reader = self._reader
        found: list[tuple[int, int, str]] = []
        for at, path in enumerate(self._paths):
            starts = reader.starts(path)
            found += [(began_us, at, name) for began_us, name in starts]
            if not starts:  # its sessions are never read below, so report its errors here
                errors.file = str(path)
                reader.sessions(path, errors)
        found.sort(key=lambda one: one[:2])
        read: tuple[int, dict[str, PositionedTurns]] = (-1, {})
        number = base = 0
        for at, (began_us, file, name) in enumerate(found):
            path = self._paths[file]
            errors.file = str(path)
            if read[0] != file:
                read = file, reader.sessions(path, errors)
            start_us = began_us - found[0][0] if self._spacing_us is None else at * self._spacing_us
            beyond = base
            for errors.row, turn in (turns := read[1].get(name, [])):
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
