"""Settings of the KV tiers of a worker."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forebay.workers.engine import EngineError

DISK_BYTES = 100 * 10**9
STORE_BYTES = 1000 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Tiers of one worker rank. By default a rank has no tier except device memory; `host_bytes` of 0 is no host tier.

    After `read_s`, a load from disk or store ends with the blocks that have arrived. After `write_s`, an offload ends.

    Attributes:
        disk: directory of the disk tier, for this worker alone; None for no disk tier.
        disk_bytes: maximum size of the disk tier in bytes; None for `DISK_BYTES`, if the engine limits the size.
        store: shared store: a directory or `s3://BUCKET/PREFIX`; empty for no shared store.
        store_bytes: maximum size of the shared store in bytes, over all workers and identities; None for
            `STORE_BYTES`, if the engine limits the size.
        store_endpoint: URL of the S3 endpoint of the shared store; empty for that of boto3's configuration.
        filter: whether disk and store accept only blocks that were used at least twice; None to filter if there is a
            host tier.
    """

    host_bytes: int = 0
    disk: Path | None = None
    disk_bytes: int | None = None
    store: str = ""
    store_bytes: int | None = None
    store_endpoint: str = ""
    filter: bool | None = None
    read_s: float = 5.0
    write_s: float = 30.0

    @property
    def filters(self) -> bool:
        return bool(self.host_bytes) if self.filter is None else self.filter


def require_no_fault(faults: Mapping[str, object]) -> None:
    """Raise EngineError with the first fault whose value is true. A fault begins with a key of `--kv-tier`."""
    for fault, is_present in faults.items():
        if is_present:
            raise EngineError(f"--kv-tier {fault}")
