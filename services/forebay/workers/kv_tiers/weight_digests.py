"""Digests of the files of models and adapters, on which the KV of every block depends.

Hashing 100 GB takes a minute, so digests of files are remembered by path, size and modification time. In the cache of
the Hugging Face Hub, files are links to blobs that are named by their SHA-256, so these are not hashed at all.
"""

import contextlib
import logging
import re
from collections.abc import Sequence
from hashlib import file_digest, sha256
from pathlib import Path

import msgspec

from forebay import runtime
from forebay.workers.engine import EngineError

LOG = logging.getLogger(__name__)

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# Settings that change what is computed from the same weights, for example the scaling of positions.
CONFIG_FILES = ("config.json", "adapter_config.json", "params.json")
REMEMBERED_MAX = 10_000  # files in a cache, 2 MB
SHA256_NAME = re.compile("[0-9a-f]{64}")  # blobs of small files are named by another hash


class FileDigest(msgspec.Struct, frozen=True):
    """Digest of a file in a cache, valid while size and modification time are the same."""

    size: int
    mtime_ns: int
    sha256: str


def default_cache() -> Path:
    """Return the file in which digests of this user's files are remembered."""
    return Path.home() / ".cache" / "forebay" / "file-digests.json"


def model_digest(folder: Path, cache: Path | None = None) -> str:
    """Return the SHA-256 of the weight files and the configuration of a model, in hex.

    Args:
        cache: file in which the digests of files are remembered; None to hash all files.

    Raises:
        EngineError: the directory has no weight files, or a file cannot be read.
    """
    if not _files(folder, WEIGHT_FILES):
        raise EngineError(f"{folder} has no weight files ({', '.join(WEIGHT_FILES)}), so its KV cannot be named")
    return _digest(folder, cache)


def adapter_digest(folder: Path, cache: Path | None = None) -> str:
    """Return the SHA-256 of the files of a LoRA adapter, in hex. The arguments are those of `model_digest`."""
    if not _files(folder, WEIGHT_FILES):
        raise EngineError(f"{folder} has no files of an adapter ({', '.join(WEIGHT_FILES)}), so its KV cannot be named")
    return _digest(folder, cache)


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def _digest(folder: Path, cache: Path | None) -> str:
    known = _load(cache)
    before = dict(known)
    state = sha256()
    for path in _files(folder, (*WEIGHT_FILES, *CONFIG_FILES)):
        try:
            digest = _file_digest(path, known)
        except OSError as error:
            raise EngineError(f"cannot read {path}: {error.strerror}") from error
        state.update(len(path.name.encode()).to_bytes(4, "little") + path.name.encode() + bytes.fromhex(digest))
    if cache is not None and known != before:
        _save(cache, known)
    return state.hexdigest()


def _file_digest(path: Path, known: dict[str, FileDigest]) -> str:
    target = path.resolve()
    if path.is_symlink() and target.parent.name == "blobs" and SHA256_NAME.fullmatch(target.name):
        target.stat()  # raises if the blob is missing
        return target.name
    with target.open("rb") as file:
        found = target.stat()
        old = known.get(str(target))
        if old is not None and (old.size, old.mtime_ns) == (found.st_size, found.st_mtime_ns):
            return old.sha256
        digest = file_digest(file, "sha256").hexdigest()
    known.pop(str(target), None)
    known[str(target)] = FileDigest(found.st_size, found.st_mtime_ns, digest)
    while len(known) > REMEMBERED_MAX:
        del known[next(iter(known))]
    return digest


def _load(cache: Path | None) -> dict[str, FileDigest]:
    if cache is not None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(cache.read_bytes(), type=dict[str, FileDigest])
    return {}


def _save(cache: Path, known: dict[str, FileDigest]) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_name(f"{cache.name}.{runtime.random_id()}.tmp")
        temporary.write_bytes(msgspec.json.encode(known))
        temporary.replace(cache)
    except OSError as error:
        LOG.info("digests of files are not remembered in %s: %s", cache, error.strerror)
