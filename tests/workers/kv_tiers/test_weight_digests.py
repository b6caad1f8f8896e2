"""Digests of models and adapters."""

import hashlib
import os
from pathlib import Path

import pytest

from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers.weight_digests import adapter_digest, model_digest

CONTENT = b"weights" * 1000
BLOB = hashlib.sha256(CONTENT).hexdigest()


def model(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "README.md").write_bytes(b"not part of the model")
    return folder


def test_equal_files_have_equal_digests(tmp_path: Path) -> None:
    first = model_digest(model(tmp_path / "a"))
    assert model_digest(model(tmp_path / "b")) == first
    (tmp_path / "b" / "README.md").write_bytes(b"changed")
    assert model_digest(tmp_path / "b") == first


@pytest.mark.parametrize("change", ["content", "config", "name", "another file"])
def test_a_change_of_the_model_changes_the_digest(tmp_path: Path, change: str) -> None:
    folder = model(tmp_path / "a")
    before = model_digest(folder)
    match change:
        case "content":
            (folder / "model.safetensors").write_bytes(b"x" + CONTENT)
        case "config":
            (folder / "config.json").write_bytes(b'{"rope_theta": 1}')
        case "name":
            (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        case "another file":
            (folder / "model-2.safetensors").write_bytes(b"")
    assert model_digest(folder) != before


def test_files_of_the_hub_are_named_by_their_blobs(tmp_path: Path) -> None:
    plain = model(tmp_path / "plain")
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "rev"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / BLOB).write_bytes(b"not hashed, because the name is the hash")
    (blobs / "0123456789abcdef0123456789abcdef01234567").write_bytes(b"{}")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / BLOB)
    (snapshot / "config.json").symlink_to("../../blobs/0123456789abcdef0123456789abcdef01234567")
    assert model_digest(snapshot) == model_digest(plain)
    (blobs / BLOB).unlink()
    with pytest.raises(EngineError, match=r"cannot read .*model\.safetensors: No such file"):
        model_digest(snapshot)


def test_digests_are_remembered_until_a_file_changes(tmp_path: Path) -> None:
    folder, cache = model(tmp_path / "a"), tmp_path / "cache" / "digests.json"
    path = folder / "model.safetensors"
    first = model_digest(folder, cache)
    times = path.stat()
    path.write_bytes(CONTENT[::-1])
    changed = model_digest(folder)
    assert changed != first
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert model_digest(folder, cache) == first  # remembered: size and time are the same
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert model_digest(folder, cache) == changed
    cache.write_bytes(b"damaged")
    assert model_digest(folder, cache) == changed


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert model_digest(model(tmp_path / "a"), tmp_path / "file" / "digests.json")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="has no weight files"):
        model_digest(tmp_path)
    with pytest.raises(EngineError, match="has no files of an adapter"):
        adapter_digest(tmp_path)


def test_adapters_have_digests(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(CONTENT)
    (folder / "adapter_config.json").write_bytes(b'{"r": 8}')
    before = adapter_digest(folder)
    (folder / "adapter_config.json").write_bytes(b'{"r": 16}')
    assert adapter_digest(folder) != before
