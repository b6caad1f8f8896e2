"""Digests of a model and of LoRA adapters, on which the keys of their KV depend."""

from collections.abc import Iterable
from hashlib import file_digest, sha256
from pathlib import Path

from forebay.workers.engines.model_directory import WEIGHTS

CONFIG = "config.json"


def model_digest(directory: Path) -> str:
    """Return the SHA-256 of the weights and the configuration of a model, in hex."""
    weights = {path for pattern in WEIGHTS for path in directory.glob(pattern)}
    return files_digest([*weights, directory / CONFIG])


def directory_digest(directory: Path) -> str:
    """Return the SHA-256 of the files in a directory, without its subdirectories, in hex."""
    return files_digest(path for path in directory.iterdir() if path.is_file())


def files_digest(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the names and contents of files, in hex."""
    total = sha256()
    for path in sorted(paths):
        with path.open("rb") as content:
            total.update(f"{path.name}\0{file_digest(content, 'sha256').hexdigest()}\0".encode())
    return total.hexdigest()
