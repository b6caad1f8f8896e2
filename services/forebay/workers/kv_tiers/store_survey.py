"""List, verify and remove the blocks of all identities in a store, for operators.

Unlike a `BlockStore`, a survey works on a whole directory or bucket, creates nothing, and takes no lock: workers may
use the store at the same time. They notice removed blocks as misses.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers import block_file
from forebay.workers.kv_tiers.block_file import HEAD_BYTES, PAYLOAD_OFFSET, HeadFormat, parse_file_name
from forebay.workers.kv_tiers.block_stores import READ_REASONS
from forebay.workers.kv_tiers.directory_layout import (
    IDENTITY_FILE,
    IDENTITY_NAME,
    QUARANTINE,
    STORE_FILE,
    TEMPORARY,
    block_folders,
    decode_description,
    identities_in,
    read_description,
)
from forebay.workers.kv_tiers.identity import KvIdentity
from forebay.workers.kv_tiers.s3_bucket import Bucket, BucketError

QUARANTINED = re.compile(f"({'|'.join(READ_REASONS)})-(.*)")


class FoundFile(NamedTuple):
    """A file or object of a store.

    Attributes:
        identity: first digits of the identity digest.
        folder: folder below that of the identity: two digits of the key, or `quarantine`.
        used_s: when it was used last, seconds since 1970. In a bucket, when it was written.
    """

    identity: str
    name: str
    folder: str
    bytes: int
    used_s: float

    @property
    def kind(self) -> str:
        """Return `block`, `quarantined`, `temporary` or `other`."""
        if self.folder == QUARANTINE:
            return "quarantined"
        if self.name.endswith(TEMPORARY):
            return "temporary"
        return "block" if parse_file_name(self.name) is not None else "other"


class StorePlace(Protocol):
    """Files of a store in a directory or a bucket."""

    place: str
    store_id: str

    def identities(self) -> dict[str, KvIdentity | None]:
        """Return the identities in the store by their first digits; None if the description is damaged or missing."""
        ...

    def files(self, identity: str) -> Iterator[list[FoundFile]]:
        """Yield pages of the files of an identity, except its description."""
        ...

    def read(self, file: FoundFile, limit: int) -> bytes:
        """Return the first `limit` bytes of a file. Raises FileNotFoundError if it was removed meanwhile."""
        ...

    def quarantine(self, file: FoundFile, reason: str) -> None:
        """Move a bad file to the quarantine of its identity."""
        ...

    def remove(self, files: Sequence[FoundFile]) -> None:
        """Remove files. Files that do not exist are ignored."""
        ...


class DirectoryPlace:
    """Store in a directory.

    Raises:
        EngineError: the directory is not a store.
    """

    def __init__(self, root: Path) -> None:
        self.place = str(root)
        self._root = root
        try:
            found = read_description(root / STORE_FILE)
        except FileNotFoundError as error:
            raise EngineError(f"{root} is not a store of KV blocks: it has no {STORE_FILE}") from error
        except OSError as error:
            raise EngineError(f"cannot read {root / STORE_FILE}: {error.strerror}") from error
        self.store_id = decode_description(found, str(root)).store_id

    def identities(self) -> dict[str, KvIdentity | None]:
        """See `StorePlace.identities`."""
        found: dict[str, KvIdentity | None] = {}
        for folder in identities_in(self._root):
            try:
                found[folder.name] = msgspec.json.decode(read_description(folder / IDENTITY_FILE), type=KvIdentity)
            except (FileNotFoundError, msgspec.MsgspecError):
                found[folder.name] = None
            except OSError as error:
                raise EngineError(f"cannot read {folder / IDENTITY_FILE}: {error.strerror}") from error
        return found

    def files(self, identity: str) -> Iterator[list[FoundFile]]:
        """See `StorePlace.files`."""
        root = self._root / identity
        for folder in [*block_folders(root), root / QUARANTINE]:
            page = []
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        page.append(FoundFile(identity, entry.name, folder.name, found.st_size, found.st_mtime))
            if page:
                yield page

    def read(self, file: FoundFile, limit: int) -> bytes:
        """See `StorePlace.read`."""
        with self._path(file).open("rb") as opened:
            return opened.read(limit)

    def quarantine(self, file: FoundFile, reason: str) -> None:
        """See `StorePlace.quarantine`."""
        folder = self._root / file.identity / QUARANTINE
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._path(file).rename(folder / f"{reason}-{file.name}")

    def remove(self, files: Sequence[FoundFile]) -> None:
        """See `StorePlace.remove`."""
        for file in files:
            self._path(file).unlink(missing_ok=True)

    def _path(self, file: FoundFile) -> Path:
        return self._root / file.identity / file.folder / file.name


class BucketPlace:
    """Store in a bucket.

    Args:
        url: `s3://BUCKET/PREFIX`.
        endpoint: URL of the S3 endpoint; empty for that of boto3's configuration.

    Raises:
        EngineError: the bucket is not a store, or cannot be used.
    """

    def __init__(self, url: str, endpoint: str) -> None:
        self.place = url
        self._bucket = Bucket(url, endpoint)
        try:
            found = self._bucket.get(STORE_FILE)
        except BucketError as error:
            if error.reason == "missing":
                raise EngineError(f"{url} is not a store of KV blocks: it has no {STORE_FILE}") from error
            raise EngineError(str(error)) from error
        self.store_id = decode_description(found, url).store_id

    def identities(self) -> dict[str, KvIdentity | None]:
        """See `StorePlace.identities`."""
        found: dict[str, KvIdentity | None] = {}
        with _explained():
            names = {one.key.split("/")[0] for page in self._bucket.pages() for one in page}
        for name in sorted(filter(IDENTITY_NAME.fullmatch, names)):
            try:
                found[name] = msgspec.json.decode(self._bucket.get(f"{name}/{IDENTITY_FILE}"), type=KvIdentity)
            except msgspec.MsgspecError:
                found[name] = None
            except BucketError as error:
                if error.reason != "missing":
                    raise EngineError(str(error)) from error
                found[name] = None
        return found

    def files(self, identity: str) -> Iterator[list[FoundFile]]:
        """See `StorePlace.files`."""
        with _explained():
            for page in self._bucket.pages(f"{identity}/"):
                found = []
                for one in page:
                    parts = one.key.split("/")
                    if len(parts) == 3:
                        found.append(FoundFile(identity, parts[2], parts[1], one.bytes, one.written_s))
                if found:
                    yield found

    def read(self, file: FoundFile, limit: int) -> bytes:
        """See `StorePlace.read`."""
        try:
            return self._bucket.get(_key(file), limit)
        except BucketError as error:
            if error.reason == "missing":
                raise FileNotFoundError(str(error)) from error
            raise EngineError(str(error)) from error

    def quarantine(self, file: FoundFile, reason: str) -> None:
        """See `StorePlace.quarantine`."""
        with _explained():
            self._bucket.move(_key(file), f"{file.identity}/{QUARANTINE}/{reason}-{file.name}")

    def remove(self, files: Sequence[FoundFile]) -> None:
        """See `StorePlace.remove`."""
        with _explained():
            self._bucket.delete([_key(file) for file in files])


def open_place(place: str, endpoint: str = "") -> StorePlace:
    """Return the files of a store in a directory, or in a bucket at `s3://BUCKET/PREFIX`.

    Raises:
        EngineError: there is no store, or it cannot be used.
        PackageMissing: boto3 is not installed.
    """
    return BucketPlace(place, endpoint) if place.startswith("s3://") else DirectoryPlace(Path(place))


def file_problem(store: StorePlace, file: FoundFile, identity: KvIdentity | None) -> str:
    """Read the file of a block, and return why it is bad: `truncated`, `corrupt`, `foreign` or `newer`; empty if good.

    Raises FileNotFoundError if the file was removed meanwhile.

    Args:
        identity: identity of its folder; None if that is not known, which makes every block foreign.
    """
    name = parse_file_name(file.name)
    assert name is not None
    if identity is None or identity.short_digest != file.identity or file.folder != file.name[:2]:
        return "foreign"
    end = block_file.file_bytes(identity.block_bytes)
    content = store.read(file, end)
    checksum = HeadFormat(identity.digest, identity.block_bytes).checksum(content[:HEAD_BYTES], name)
    if isinstance(checksum, str):
        return checksum
    if len(content) < end:
        return "truncated"
    return "" if block_file.checksum(memoryview(content)[PAYLOAD_OFFSET:end]) == checksum else "corrupt"


def quarantine_reason(file: FoundFile) -> str:
    """Return why a quarantined file was bad, according to its name."""
    found = QUARANTINED.fullmatch(file.name)
    return found[1] if found else "unknown"


def _key(file: FoundFile) -> str:
    return f"{file.identity}/{file.folder}/{file.name}"


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except BucketError as error:
        raise EngineError(str(error)) from error
