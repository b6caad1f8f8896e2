"""Open the store of KV blocks at a place that an operator configured."""

import logging
import os
import socket
from importlib.util import find_spec
from pathlib import Path

from forebay.workers.kv_tiers.block_stores import BlockStore, IoKind
from forebay.workers.kv_tiers.directory_store import DirectoryStore
from forebay.workers.kv_tiers.guarded_store import GuardedStore, may_hang
from forebay.workers.kv_tiers.identity import KvIdentity
from forebay.workers.kv_tiers.s3_store import S3Store

LOG = logging.getLogger(__name__)

S3 = "s3://"


def default_io() -> IoKind:
    """Return `nixl` if NIXL is installed, otherwise `plain`."""
    if find_spec("nixl_cu12") is not None and find_spec("numpy") is not None:
        return "nixl"
    LOG.info("KV blocks are moved by plain I/O, because NIXL is not installed")
    return "plain"


def open_store(
    place: str | Path,
    identity: KvIdentity,
    *,
    quota_bytes: int,
    shared: bool,
    io: IoKind | None = None,
    owner: str = "",
    endpoint: str = "",
) -> BlockStore:
    """Open a store of KV blocks, which is created if necessary.

    Args:
        place: a directory, or `s3://BUCKET/PREFIX`.
        quota_bytes: maximum size of the store in bytes, over all identities.
        shared: whether other workers may use the store, too. Buckets are always shared.
        io: how bytes are moved; None for `default_io()`.
        owner: name of this worker, for the error of another worker that uses the same directory.
        endpoint: URL of the S3 endpoint; empty for that of boto3's configuration.

    Raises:
        EngineError: the store cannot be opened. The message tells why and what to do.
        PackageMissing: a package that the store needs is not installed.
    """
    kind = default_io() if io is None else io
    if str(place).startswith(S3):
        return S3Store(str(place), identity, quota_bytes=quota_bytes, io=kind, endpoint=endpoint)
    root = Path(place)
    store = DirectoryStore(
        root,
        identity,
        quota_bytes=quota_bytes,
        io=kind,
        shared=shared,
        owner=owner or f"process {os.getpid()} on {socket.gethostname()}",
    )
    return GuardedStore(store, identity.block_bytes, str(root)) if may_hang(root) else store
