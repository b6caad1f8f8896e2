"""Copies of a log in use, as a power loss may leave them: the database and a part of its write-ahead log.

SQLite accepts frames of the write-ahead log up to the first frame whose salts or running checksum do not match, and of
these the frames up to the last one that ends a commit.
"""

import struct
from pathlib import Path

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
PAGE_BYTES = 4096
FRAME_BYTES = FRAME_HEADER_BYTES + PAGE_BYTES
SALTS = slice(16, 24)  # in the header; in a frame, 8 bytes from byte 8 on


class Outage:
    """Content of the database and of the write-ahead log at one moment, while no commit is in progress.

    Attributes:
        wal: Content of the write-ahead log, including frames that remain from before it last started over.
        commit_ends: Length of the write-ahead log at the end of each commit since it last started over.
    """

    def __init__(self, path: Path) -> None:
        self.database = path.read_bytes()
        self.wal = path.with_name(path.name + "-wal").read_bytes()
        self.commit_ends: list[int] = []
        for start in range(HEADER_BYTES, len(self.wal) - FRAME_BYTES + 1, FRAME_BYTES):
            if self.wal[start + 8 : start + 16] != self.wal[SALTS]:
                break
            (pages_after_commit,) = struct.unpack_from(">I", self.wal, start + 4)
            if pages_after_commit:
                self.commit_ends.append(start + FRAME_BYTES)

    @property
    def frame_ends(self) -> range:
        """Length of the write-ahead log at the end of each frame up to the last commit, and of its header."""
        return range(HEADER_BYTES, self.commit_ends[-1] + 1, FRAME_BYTES)

    def commits_within(self, intact_bytes: int) -> int:
        """Return how many commits survive if only this many bytes of the write-ahead log are intact."""
        return sum(end <= intact_bytes for end in self.commit_ends)

    def restore(self, path: Path, wal: bytes) -> None:
        """Write the database and this write-ahead log to `path`, as they are after a restart of the machine."""
        for name in (path, path.with_name(path.name + "-shm"), path.with_name(path.name + "-wal")):
            name.unlink(missing_ok=True)
        path.write_bytes(self.database)
        path.with_name(path.name + "-wal").write_bytes(wal)
