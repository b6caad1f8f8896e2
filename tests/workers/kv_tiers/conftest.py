"""Places for stores of KV blocks: directories, and buckets of an S3 server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.kv_tiers.buckets import KEYS, clear_bucket, moto
from tests.workers.kv_tiers.cases import Place


@pytest.fixture(scope="package")
def server() -> Iterator[str]:
    with moto() as endpoint:
        yield endpoint


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in KEYS.items():
        monkeypatch.setenv(name, text)


@pytest.fixture
def endpoint(server: str, keys: None) -> str:
    """Return the S3 server, with an empty bucket."""
    clear_bucket(server)
    return server


# Tests of the object store cover what differs in a bucket.
@pytest.fixture(params=["directory", pytest.param("bucket", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path, request.getfixturevalue("endpoint") if request.param == "bucket" else "")
