"""Files of a directory with KV blocks: where they are, and the two files that describe the directory.

    store.json                          format version and random id of the store
    owner.lock                          locked by the worker that owns the directory, which is named in it
    IDENTITY/identity.json              what the 16 digits of IDENTITY mean
    IDENTITY/AA/KEY-HASH.kv             a block; AA are the first two digits of its key
    IDENTITY/AA/KEY-HASH.kv.RANDOM.tmp  a block while it is written
    IDENTITY/quarantine/                bad files, for an operator

The same layout is that of the objects in a bucket.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forebay import runtime
from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers.block_file import FORMAT_VERSION
from forebay.workers.kv_tiers.identity import SHORT_HEX, KvIdentity

STORE_FILE = "store.json"
LOCK_FILE = "owner.lock"
IDENTITY_FILE = "identity.json"
QUARANTINE = "quarantine"
TEMPORARY = ".tmp"
TEMPORARY_AGE_S = 3600.0  # a temporary file of this age is from a writer that crashed; a write takes seconds
DESCRIPTION_BYTES_MAX = 64 << 10

IDENTITY_NAME = re.compile(f"[0-9a-f]{{{SHORT_HEX}}}")
FOLDER_NAME = re.compile("[0-9a-f]{2}")


class StoreDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `store.json`.

    Attributes:
        format_version: version of the layout and of the block files.
        store_id: random id, by which routers recognize the store.
    """

    format_version: int
    store_id: str


def new_description() -> bytes:
    """Return the content of `store.json` for a new store."""
    return msgspec.json.encode(StoreDescription(format_version=FORMAT_VERSION, store_id=runtime.random_id()[:16]))


def decode_description(data: bytes, where: str) -> StoreDescription:
    """Return the description of a store.

    Raises:
        EngineError: the description is damaged, or is that of a newer version.
    """
    try:
        found = msgspec.json.decode(data, type=StoreDescription)
    except msgspec.MsgspecError as error:
        raise EngineError(
            f"{where} is not a store of KV blocks: {STORE_FILE} does not decode ({error}). Use another place, or remove"
            f" {STORE_FILE} to start with a new store id"
        ) from error
    if found.format_version > FORMAT_VERSION:
        raise EngineError(
            f"{where} has KV blocks of format {found.format_version}, and this version of forebay reads formats up to"
            f" {FORMAT_VERSION}. Upgrade forebay, or use another place"
        )
    return found


def describe(root: Path) -> StoreDescription:
    """Return the description of a directory, which is created together with its description if necessary.

    Raises:
        EngineError: the directory cannot be used.
    """
    path = root / STORE_FILE
    try:
        root.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            create_whole(path, new_description())
        return decode_description(read_description(path), str(root))
    except OSError as error:
        raise EngineError(f"cannot use {root} for KV blocks: {error.strerror}") from error


def read_description(path: Path) -> bytes:
    """Return the content of a small file."""
    with path.open("rb") as file:
        return file.read(DESCRIPTION_BYTES_MAX)


def create_whole(path: Path, content: bytes) -> None:
    """Create a file that other processes see only with its whole content. Raises FileExistsError if it exists."""
    temporary = path.with_name(f"{path.name}.{runtime.random_id()}{TEMPORARY}")
    temporary.write_bytes(content)
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()


def describe_identity(root: Path, identity: KvIdentity) -> Path:
    """Return the folder of an identity, which is created if necessary.

    Raises:
        EngineError: the folder cannot be created, or is that of another identity.
    """
    folder = root / identity.short_digest
    path = folder / IDENTITY_FILE
    try:
        folder.mkdir(exist_ok=True)
        (folder / QUARANTINE).mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            create_whole(path, msgspec.json.encode(identity))
        check_identity(read_description(path), identity, str(folder))
    except OSError as error:
        raise EngineError(f"cannot use {folder} for KV blocks: {error.strerror}") from error
    return folder


def check_identity(data: bytes, identity: KvIdentity, where: str) -> None:
    """Check that a description is that of this identity. Raises EngineError if it is not."""
    try:
        found = msgspec.json.decode(data, type=KvIdentity)
    except msgspec.MsgspecError as error:
        raise EngineError(
            f"{where}/{IDENTITY_FILE} does not decode ({error}); remove it to have it written again"
        ) from error
    if found.digest != identity.digest:
        raise EngineError(f"{where} has KV of another identity: {found}; remove the folder, or use another place")


def lock_directory(root: Path, owner: str, *, shared: bool) -> int:
    """Lock a directory until the returned file descriptor is closed.

    Several workers may lock the same directory as shared, if no worker has locked it for itself alone.

    Args:
        owner: name of the worker, for the errors of others.
        shared: whether other workers may use the directory, too.

    Raises:
        EngineError: another worker has locked the directory.
    """
    path = root / LOCK_FILE
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise EngineError(f"cannot use {root} for KV blocks: {error.strerror}") from error
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.pread(fd, 1024, 0).decode(errors="replace").strip()
        os.close(fd)
        used = f"is the disk tier of {other}" if other else "is the shared store of other workers"
        raise EngineError(
            f"{root} {used}. A disk tier belongs to one worker rank, so give each its own directory"
        ) from None
    except OSError:
        # Some network file systems have no locks. They cannot protect a shared directory either.
        if not shared:
            os.close(fd)
            raise
        return fd
    os.ftruncate(fd, 0)
    if not shared:
        os.pwrite(fd, owner.encode(), 0)
    return fd


def identities_in(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        if IDENTITY_NAME.fullmatch(path.name) and path.is_dir():
            yield path


def block_folders(identity: Path) -> Iterator[Path]:
    for path in sorted(identity.iterdir()):
        if FOLDER_NAME.fullmatch(path.name) and path.is_dir():
            yield path
