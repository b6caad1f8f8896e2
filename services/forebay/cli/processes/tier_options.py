"""Options of KV tiers: host memory, a disk, and a shared store. `forebay worker` and `forebay up` share them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from forebay.cli.common.times import size
from forebay.ingress.errors import Unusable

if TYPE_CHECKING:
    from forebay.workers.kv_tiers.settings import TierSettings

BYTES_MIN = 1_000_000  # a few blocks of a small model
NEEDED = {
    "kv_disk_size": ("kv_disk",),
    "kv_store_size": ("kv_store",),
    "kv_store_endpoint": ("kv_store",),
    "kv_tier_write": ("kv_host_size", "kv_disk", "kv_store"),
    "kv_tier_filter": ("kv_disk", "kv_store"),
    "kv_tier_io": ("kv_disk", "kv_store"),
}  # an option without effect, unless one of these is given


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Options that select the tiers for the KV of each worker rank. Each field is a command-line option."""

    PANEL: ClassVar = "KV tiers"

    kv_host_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory for KV per rank, such as 4GB. Default: none.")
    ] = None
    kv_disk: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory for KV. It survives restarts; one per worker.")
    ] = None
    kv_disk_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum KV in --kv-disk per rank. Default: 100GB.")
    ] = None
    kv_store: Annotated[
        str | None,
        typer.Option(
            metavar="STORE", help="KV store that workers share: a directory, or s3://BUCKET/PREFIX. Default: none."
        ),
    ] = None
    kv_store_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum KV in --kv-store, of all workers. Default: 1TB.")
    ] = None
    kv_store_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="S3 endpoint of --kv-store. Default: that of boto3.")
    ] = None
    kv_tier_write: Annotated[
        Literal["through", "eviction"] | None,
        typer.Option(
            help="through: copy KV to the next tier at once. eviction: copy KV when a tier evicts it. Default: through."
        ),
    ] = None
    kv_tier_filter: Annotated[
        bool | None,
        typer.Option(
            "--kv-tier-filter/--no-kv-tier-filter",
            help="Copy only KV that was used twice to disk and store. Default: with --kv-host-size.",
        ),
    ] = None
    kv_tier_io: Annotated[
        Literal["nixl", "plain"] | None,
        typer.Option(help="Library that moves KV to disk and store. Default: nixl if it is installed."),
    ] = None

    def settings(self) -> "TierSettings | None":
        """Return the tiers that the options select, None without a tier.

        An invalid size ends the command.

        Raises:
            Unusable: an option is invalid, or has no effect.
        """
        for name, others in NEEDED.items():
            if getattr(self, name) is not None and not any(getattr(self, other) is not None for other in others):
                raise Unusable(f"{_flag(name)} requires {' or '.join(map(_flag, others))}")
        if self.kv_host_size is None and self.kv_disk is None and self.kv_store is None:
            return None
        # Imported here, because --help does not wait for stores.
        from forebay.workers.kv_tiers.settings import DISK_BYTES, STORE_BYTES, TierSettings  # noqa: PLC0415

        if self.kv_disk is not None and self.kv_disk.exists() and not self.kv_disk.is_dir():
            raise Unusable(f"--kv-disk {self.kv_disk}: not a directory")
        return TierSettings(
            host_bytes=0 if self.kv_host_size is None else size("--kv-host-size", self.kv_host_size, BYTES_MIN),
            disk=self.kv_disk,
            disk_bytes=DISK_BYTES
            if self.kv_disk_size is None
            else size("--kv-disk-size", self.kv_disk_size, BYTES_MIN),
            store="" if self.kv_store is None else _store(self.kv_store, self.kv_store_endpoint),
            store_bytes=(
                STORE_BYTES if self.kv_store_size is None else size("--kv-store-size", self.kv_store_size, BYTES_MIN)
            ),
            store_endpoint=self.kv_store_endpoint or "",
            write=self.kv_tier_write or "through",
            filter=self.kv_tier_filter,
            io=self.kv_tier_io,
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _store(text: str, endpoint: str | None) -> str:
    """Return the value of --kv-store. Raises Unusable if it is neither a directory nor a bucket."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        if endpoint is not None:
            raise Unusable(f"--kv-store-endpoint requires --kv-store s3://BUCKET/PREFIX, got {text}")
        if not text or (Path(text).exists() and not Path(text).is_dir()):
            raise Unusable(f"--kv-store {text}: not a directory; expected a directory or s3://BUCKET/PREFIX")
        return text
    if scheme != "s3" or not rest.partition("/")[0]:
        raise Unusable(f"--kv-store {text}: unsupported store; expected a directory or s3://BUCKET/PREFIX")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise Unusable(f"--kv-store-endpoint {endpoint}: expected http://HOST:PORT or https://HOST:PORT")
    return text
