"""Names of stored KV blocks: SHA-256 over everything that the content of a block depends on.

Theory of operation. The routing hash of a block has 64 bits and is not collision-resistant, so a client could construct
two prompts with the same hash. Therefore only the block key decides whose KV is served. The key of a block is the
SHA-256 of the key of the block before it, the tokens of the block, and the images in the block. The first block has the
SHA-256 of the identity, the salt and the adapter as parent. So equal keys mean equal KV, up to the rounding of kernels.

Keys are stored in files. A change of this module that changes a key must increase `KEY_VERSION`.

Hashing 100 GB of weights takes a minute, so digests of files are remembered by path, size and modification time. In the
cache of the Hugging Face Hub, files are links to blobs that are named by their SHA-256, so these are not hashed at all.
"""

import contextlib
import functools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import file_digest, sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from forebay import runtime
from forebay.events.base import U32_BYTES
from forebay.workers.engine import EngineError

LOG = logging.getLogger(__name__)

KEY_VERSION = 1
SHORT_HEX = 16  # digits of an identity digest in names of folders and stores
NO_MEDIA: Mapping[int, Sequence[str]] = {}

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# Settings that change what is computed from the same weights, for example the scaling of positions.
CONFIG_FILES = ("config.json", "adapter_config.json", "params.json")
REMEMBERED_MAX = 10_000  # files in a cache of digests, 2 MB
SHA256_NAME = re.compile("[0-9a-f]{64}")  # blobs of small files are named by another hash


class BlockName(NamedTuple):
    """Name of a stored block: its key of 32 bytes, and its sequence hash for routing (`forebay.core.block_hashes`)."""

    key: bytes
    sequence_hash: int


class KvIdentity(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What the KV of every block of a worker rank depends on, except the prompt and the adapter.

    `weights` is the SHA-256 of the weight files in hex. `layout` is the order of layers, keys, values, heads and tokens
    in a block; `layout` and `dtype` are as the engine names them. `model` is for operators, and not part of the digest.
    """

    weights: str
    tp_rank: int
    tp_size: int
    layout: str
    dtype: str
    block_size: int
    block_bytes: int
    model: str = ""

    @functools.cached_property
    def digest(self) -> bytes:
        numbers = (self.tp_rank, self.tp_size, self.block_size, self.block_bytes)
        return _digest("forebay.kv.identity", self.weights, self.layout, self.dtype, *map(str, numbers))

    @property
    def short_digest(self) -> str:
        """Return the first 16 hex digits of the digest, which name the identity in stores."""
        return self.digest.hex()[:SHORT_HEX]


class KeyChain:
    """Computes the block keys of prompts with the same identity, salt (cache salt or tenant) and adapter digest.

    Requests with different salts share no blocks.
    """

    def __init__(self, identity: KvIdentity, *, salt: str = "", adapter: str = "") -> None:
        self._width = identity.block_size * U32_BYTES
        self._root = _digest("forebay.kv.prompt", identity.digest.hex(), salt, adapter)

    def extend(
        self, parent: bytes | None, token_ids: bytes, media: Mapping[int, Sequence[str]] = NO_MEDIA
    ) -> list[bytes]:
        """Return the key of each full block of consecutive tokens (packed u32), and ignore later tokens.

        Args:
            parent: key of the block before the tokens; None if the tokens start a prompt.
            media: images and videos in each block, from `media_by_block`. Index 0 is the first block of `token_ids`.
        """
        key = self._root if parent is None else parent
        width = self._width
        keys: list[bytes] = []
        for block in range(len(token_ids) // width):
            state = sha256(key)
            state.update(token_ids[block * width : (block + 1) * width])
            if media and (objects := media.get(block)):
                state.update(_framed(*objects))
            key = state.digest()
            keys.append(key)
        return keys


def media_by_block(objects: Iterable[tuple[str, int, int]], block_size: int) -> dict[int, list[str]]:
    """Return the argument `media` of block keys: for each block, the objects in it and their positions.

    `objects` has digest, first token and number of tokens of each image or video, in any order. The position matters:
    placeholder tokens are equal for all images, so tokens alone do not show where an image ends.
    """
    found: dict[int, list[str]] = {}
    for digest, first, tokens in sorted(objects, key=lambda one: one[1]):
        for block in range(first // block_size, (first + tokens - 1) // block_size + 1):
            found.setdefault(block, []).append(f"{digest}@{first - block * block_size}+{tokens}")
    return found


def _digest(*parts: str) -> bytes:
    return sha256(KEY_VERSION.to_bytes(4, "little") + _framed(*parts)).digest()


def _framed(*parts: str) -> bytes:
    """Encode texts with their lengths, so that different lists never have the same bytes."""
    encoded = [part.encode() for part in parts]
    return b"".join(len(part).to_bytes(4, "little") + part for part in encoded)


class FileDigest(msgspec.Struct, frozen=True):
    """Digest of a file in a cache, valid while size and modification time are the same."""

    size: int
    mtime_ns: int
    sha256: str


def default_cache() -> Path:
    """Return the file in which digests of this user's files are remembered."""
    return Path.home() / ".cache" / "forebay" / "file-digests.json"


def weights_digest(folder: Path, cache: Path | None = None) -> str:
    """Return the SHA-256 of the weight files and the configuration of a model or a LoRA adapter, in hex.

    Digests of files are remembered in `cache`; if None, all files are hashed. Raises EngineError if the directory has
    no weight files, or a file cannot be read.
    """
    if not _files(folder, WEIGHT_FILES):
        raise EngineError(f"{folder} has no weight files ({', '.join(WEIGHT_FILES)}), so its KV cannot be named")
    known = _load(cache)
    before = dict(known)
    state = sha256()
    for path in _files(folder, (*WEIGHT_FILES, *CONFIG_FILES)):
        try:
            digest = _file_digest(path, known)
        except OSError as error:
            raise EngineError(f"cannot read {path}: {error.strerror}") from error
        state.update(_framed(path.name) + bytes.fromhex(digest))
    if cache is not None and known != before:
        _save(cache, known)
    return state.hexdigest()


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


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
