"""Cache of the LoRA adapters that are named by URIs. All workers of a user on a host share it.

Theory of operation. fsspec reads the files of a URI. They are written to a directory of their own, which is renamed to
the digest of its files once they are complete and checked. So nobody sees a part of an adapter. A process locks the
directories that it writes or whose adapters it has loaded. Locks end with their process: the directory of a crashed
download is recognised by its free lock, and removed. A directory whose adapter is in use is never removed, because an
engine may read it again later.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from forebay import runtime
from forebay.runtime.errors import install_command
from forebay.workers.engine import EngineRefused, one_line

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
SCHEMES = ("file", "hf", "s3")
FILE = re.compile(r"[\w-][\w.-]*\.(json|safetensors)", re.ASCII)  # no pickles: reading one may run code
PICKLES = (".bin", ".pt", ".pth", ".pkl")
PARTIAL = "partial-"
LOCK = "lock"
CACHE_BYTES = 32 << 30
ADAPTER_BYTES_MAX = 4 << 30  # an adapter of rank 256 for a model of 70 billion parameters has 3 GiB
CONFIG_BYTES_MAX = 1 << 20
FILES_MAX = 64
RANK_MAX = 512  # above that of any engine
CHUNK_BYTES = 8 << 20
PROGRESS_BYTES = 256 << 20
# Without these limits, s3fs tries an unreachable server for minutes, and all later commands wait.
S3_OPTIONS = {"config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 2}}}


def default_directory() -> Path:
    return Path.home() / ".cache" / "forebay" / "adapters"


def is_uri(text: str) -> bool:
    return "://" in text


def base_names(model: str, directory: Path | None) -> frozenset[str]:
    """Return the names by which an adapter may name its base model, compared by their last component.

    They are the name in the API, the name of the directory, and the name on the Hub if the directory is in its cache.
    """
    parts = () if directory is None else (directory.name, *directory.parts)
    hub = [part.rpartition("--")[2] for part in parts if part.startswith("models--")]
    return frozenset(map(_last, (model, *parts[:1], *hub)))


class _Config(msgspec.Struct):
    """Fields of `adapter_config.json`, as PEFT writes them."""

    r: int
    target_modules: list[str] | str
    peft_type: str = "LORA"
    base_model_name_or_path: str | None = None


class CachedAdapter(NamedTuple):
    """Adapter in the cache, which stays there until it is closed or this process ends."""

    directory: Path
    digest: str
    lock: int

    def close(self) -> None:
        os.close(self.lock)


class AdapterCache:
    """Cache for the adapters of one base model.

    Args:
        bases: names of the base model, from `base_names`. Empty accepts adapters of any model.
        rank_max: highest rank that the engine accepts.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        bytes_max: int = CACHE_BYTES,
        bases: frozenset[str] = frozenset(),
        rank_max: int = RANK_MAX,
    ) -> None:
        self.root = root or default_directory()
        self._bytes_max = bytes_max
        self._bases = bases
        self._rank_max = rank_max

    async def fetch(self, uri: str, digest: str = "") -> CachedAdapter:
        """Return the adapter at a URI from the cache, after a download if necessary.

        An adapter with a known `digest` that is in the cache is not read again. Raises EngineRefused if the URI is
        invalid or unreachable, or the adapter is not allowed or has another digest.
        """
        stop = threading.Event()
        try:
            return await runtime.offload(self.fetch_now, uri, digest, stop)
        except asyncio.CancelledError:
            stop.set()  # the thread ends after its chunk, and removes what it has written
            raise

    def fetch_now(self, uri: str, digest: str = "", stop: threading.Event | None = None) -> CachedAdapter:
        """Do the same as `fetch`, without an event loop, until `stop` is set."""
        scheme = urlsplit(uri).scheme
        if scheme not in SCHEMES:
            raise EngineRefused(f"{uri}: unknown scheme {scheme!r}; schemes are: {', '.join(SCHEMES)}")
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if digest and (known := self._known(digest)) is not None:
                return known
            return self._download(uri, scheme, digest, stop or threading.Event())
        except EngineRefused:
            raise
        except ImportError as error:
            raise EngineRefused(f"{uri}: {scheme}:// needs a package ({error}): {install_command('lora')}") from error
        except Exception as error:  # each file system of fsspec has errors of its own
            raise EngineRefused(f"cannot read the adapter {uri}: {one_line(error)}") from error

    def _download(self, uri: str, scheme: str, expected: str, stop: threading.Event) -> CachedAdapter:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - takes a tenth of a second, and the Hub client half of one

        place = unquote(urlsplit(uri).path) if scheme == "file" else uri  # fsspec does not decode it
        # A file system of its own, because fsspec remembers listings.
        system, path = url_to_fs(place, skip_instance_cache=True, **(S3_OPTIONS if scheme == "s3" else {}))
        found = {one["name"].rpartition("/")[2]: one for one in system.ls(path, detail=True) if one["type"] == "file"}
        sizes = {name: int(found[name]["size"]) for name in sorted(found) if FILE.fullmatch(name)}
        _require_files(uri, sizes, found)
        with self._alone():
            partial, lock = self._begin(uri, sizes)
        try:
            listed = sha256()
            reader = _Reader(uri, sum(sizes.values()), stop)
            for name, size in sizes.items():
                with system.open(found[name]["name"], "rb") as source, (partial / name).open("r+b") as target:
                    listed.update(f"{reader.copy(source, target, name, size)}  {name}\n".encode())
            self._check_config(uri, partial)
            digest = listed.hexdigest()
            if expected and digest != expected:
                raise EngineRefused(
                    f"the content of {uri} has changed: its digest is {digest}, expected {expected}; add the changed"
                    " adapter under another name"
                )
            logger.info("the adapter %s is in the cache: digest %s", uri, digest)
            with self._alone():
                if (known := self._held(digest)) is None:
                    partial.rename(self.root / digest)
                    fcntl.flock(lock, fcntl.LOCK_SH)
                    return CachedAdapter(self.root / digest, digest, lock)
                shutil.rmtree(partial)
                os.close(lock)
                return known
        except BaseException:
            with self._alone():
                shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)
            raise

    def _known(self, digest: str) -> CachedAdapter | None:
        with self._alone():
            return self._held(digest)

    def _held(self, digest: str) -> CachedAdapter | None:
        """Lock a complete adapter against removal, and note its use. Return None if the cache does not have it."""
        directory = self.root / digest
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.utime(directory)
        return CachedAdapter(directory, digest, lock)

    def _begin(self, uri: str, sizes: dict[str, int]) -> tuple[Path, int]:
        """Make room for files, and create them with their sizes, so that they count from now on."""
        self._make_room(uri, sum(sizes.values()))
        partial = self.root / f"{PARTIAL}{runtime.random_id()}"
        partial.mkdir(mode=0o700)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, size in sizes.items():
            (partial / name).touch()
            os.truncate(partial / name, size)
        return partial, lock

    def _make_room(self, uri: str, needed: int) -> None:
        """Remove crashed downloads, and then unused adapters, the least recently used first."""
        folders = [folder for folder in self.root.iterdir() if folder.is_dir()]
        sizes = {folder: sum(file.stat().st_size for file in folder.iterdir()) for folder in folders}
        for folder in sorted(folders, key=lambda one: (not one.name.startswith(PARTIAL), one.stat().st_mtime_ns)):
            if not folder.name.startswith(PARTIAL) and sum(sizes.values()) + needed <= self._bytes_max:
                return
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A crash during the removal must not leave a part of an adapter.
                shutil.rmtree(folder.rename(self.root / f"{PARTIAL}{runtime.random_id()}"))
                del sizes[folder]
            except BlockingIOError:
                pass  # it is in use
            finally:
                os.close(lock)
        if (used := sum(sizes.values())) + needed > self._bytes_max:
            raise EngineRefused(
                f"the cache {self.root} has no room for the {needed} bytes of {uri}: adapters in use have {used} of"
                f" {self._bytes_max} bytes; unload some, or raise --lora-cache-size"
            )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes and threads from changing the names of directories and from locking them."""
        with (self.root / LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _check_config(self, uri: str, folder: Path) -> None:
        """Raise EngineRefused if the configuration of an adapter is invalid, or does not suit the base model."""
        try:
            config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_Config)
        except msgspec.MsgspecError as error:
            raise EngineRefused(f"{uri}: invalid {CONFIG}: {error}") from None
        if config.peft_type != "LORA":
            raise EngineRefused(f"{uri}: peft_type is {config.peft_type!r}; only LORA is supported")
        if not 1 <= config.r <= self._rank_max:
            raise EngineRefused(f"{uri}: its rank r is {config.r}; the engine accepts 1 to {self._rank_max}")
        if not config.target_modules:
            raise EngineRefused(f"{uri}: target_modules is empty, so the adapter changes nothing")
        base = config.base_model_name_or_path
        if base and self._bases and _last(base) not in self._bases:
            raise EngineRefused(
                f"{uri}: it is an adapter of {base}, and this worker has {' or '.join(sorted(self._bases))}; correct"
                f" base_model_name_or_path in {CONFIG} if they are the same model"
            )


class _Reader:
    """Copies the files of an adapter, and logs the progress."""

    def __init__(self, uri: str, total: int, stop: threading.Event) -> None:
        self._uri, self._total, self._stop = uri, total, stop
        self._done = self._logged = 0

    def copy(self, source: Any, target: Any, name: str, size: int) -> str:
        """Copy a file of `size` bytes, and return its SHA-256 in hex. Raises EngineRefused if its size differs."""
        state, left = sha256(), size
        while chunk := source.read(CHUNK_BYTES):
            if self._stop.is_set():
                raise EngineRefused(f"the download of {self._uri} was cancelled")
            left -= len(chunk)
            if left < 0:
                break
            state.update(chunk)
            target.write(chunk)
            self._done += len(chunk)
            if self._done - self._logged >= PROGRESS_BYTES:
                self._logged = self._done
                logger.info("downloading %s: %d of %d MB", self._uri, self._done >> 20, self._total >> 20)
        if left:
            raise EngineRefused(f"{self._uri}: {name} has not the {size} bytes that were listed; retry the command")
        return state.hexdigest()


def _require_files(uri: str, sizes: dict[str, int], found: Iterable[str]) -> None:
    """Raise EngineRefused if the allowed files are no adapter, or too many or too large."""
    if CONFIG not in sizes:
        raise EngineRefused(f"{uri} is not an adapter: it has no {CONFIG}")
    if not any(name.endswith(".safetensors") for name in sizes):
        pickles = [name for name in found if name.endswith(PICKLES)]
        hint = f"; {pickles[0]} is a pickle, which may run code: convert it to safetensors" if pickles else ""
        raise EngineRefused(f"{uri} has no safetensors file{hint}")
    if len(sizes) > FILES_MAX:
        raise EngineRefused(f"{uri} has {len(sizes)} files; the maximum is {FILES_MAX}")
    if sizes[CONFIG] > CONFIG_BYTES_MAX:
        raise EngineRefused(f"{uri}: {CONFIG} has {sizes[CONFIG]} bytes; the maximum is {CONFIG_BYTES_MAX}")
    if (total := sum(sizes.values())) > ADAPTER_BYTES_MAX:
        raise EngineRefused(f"{uri} has {total} bytes; the maximum of an adapter is {ADAPTER_BYTES_MAX}")


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()
