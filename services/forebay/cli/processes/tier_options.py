"""Option `--kv-tier` of `forebay worker` and `forebay up`: host memory, a disk, and a shared store for KV."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from forebay.cli.common.options import Option
from forebay.cli.common.times import size
from forebay.events.names import unknown_name
from forebay.processes.passwords import without_passwords
from forebay.runtime.errors import ConfigError, prefixed

if TYPE_CHECKING:
    from forebay.workers.kv_tiers.settings import TierSettings

BYTES_MIN = 1_000_000  # a few blocks of a small model
# Keys of each kind of tier, the required one first. Values of a key that several tiers have must be equal, unless it is
# the size or the path of one tier.
KEYS = {
    "host": ("size",),
    "disk": ("path", "size", "filter"),
    "store": ("path", "size", "endpoint", "filter"),
}
VALUES = {"filter": ("on", "off")}
KEY = re.compile(r",(?=[a-z]+=)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    PANEL: ClassVar = "KV tiers"

    kv_tier: Annotated[
        list[str] | None,
        Option(
            metavar="KIND:KEY=VALUE,...",
            help="Tier for KV: host:size=4GB, disk:path=DIR,size=100GB, or store:path=DIR,size=1TB, which workers"
            " share; its path may be s3://BUCKET/PREFIX, with endpoint=URL. filter=off also copies KV used once."
            " Repeatable.",
        ),
    ] = None

    def settings(self) -> "TierSettings | None":
        """Return the tiers, None without one. An invalid size ends the command. Raises ConfigError for other faults."""
        if not self.kv_tier:
            return None
        # Imported here, because --help does not wait for stores.
        from forebay.workers.kv_tiers.settings import TierSettings  # noqa: PLC0415

        tiers = parsed_tiers(self.kv_tier)
        disk, store = tiers.get("disk", {}), tiers.get("store", {})
        others = {name: value for tier in tiers.values() for name, value in tier.items() if name in VALUES}
        return TierSettings(
            host_bytes=_bytes("host", tiers.get("host", {})) or 0,
            disk=Path(_directory("disk", disk["path"])) if disk else None,
            disk_bytes=_bytes("disk", disk),
            store=_store(store["path"], store.get("endpoint", "")) if store else "",
            store_bytes=_bytes("store", store),
            store_endpoint=store.get("endpoint", ""),
            filter=None if "filter" not in others else others["filter"] == "on",
        )


def parsed_tiers(given: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the values of each tier by kind and key. Raises ConfigError if a value of `--kv-tier` is invalid."""
    found: dict[str, dict[str, str]] = {}
    for text in given:
        kind, _, rest = text.partition(":")
        shown = without_passwords(text)
        if kind not in KEYS:
            raise ConfigError(f"--kv-tier {shown}: {unknown_name('kind of tier', kind, KEYS)}")
        if kind in found:
            raise ConfigError(f"--kv-tier {shown}: there is another {kind} tier; give all its keys in one option")
        found[kind] = _values(text, KEYS[kind], rest)
    for key in VALUES:
        if len({tier[key] for tier in found.values() if key in tier}) > 1:
            raise ConfigError(f"--kv-tier: the tiers of a worker have one value of {key}")
    return found


def _values(text: str, keys: Sequence[str], rest: str) -> dict[str, str]:
    values, shown = {}, without_passwords(text)
    for part in KEY.split(rest):
        key, equals, value = part.partition("=")
        if key not in keys and equals:
            raise ConfigError(f"--kv-tier {shown}: {unknown_name('key', key, keys)}")
        if not value or value not in VALUES.get(key, (value,)):
            expected = f"one of {', '.join(VALUES[key])}" if key in VALUES else "KEY=VALUE"
            raise ConfigError(f"--kv-tier {shown}: expected {expected}, got {without_passwords(part)!r}")
        values[key] = value
    if keys[0] not in values:
        raise ConfigError(f"--kv-tier {shown}: the key {keys[0]} is missing")
    return values


def _bytes(kind: str, tier: dict[str, str]) -> int | None:
    return size(f"--kv-tier {kind}:size", tier["size"], BYTES_MIN) if "size" in tier else None


def _directory(kind: str, text: str) -> str:
    if Path(text).exists() and not Path(text).is_dir():
        raise ConfigError(f"--kv-tier {kind}:path={text}: not a directory")
    return text


def _store(text: str, endpoint: str) -> str:
    """Return the path of a store. Raises ConfigError if it is neither a directory nor a bucket."""
    scheme, separator, _ = text.partition("://")
    if endpoint and not (separator and endpoint.startswith(("http://", "https://"))):
        raise ConfigError(
            f"--kv-tier store:endpoint={endpoint}: expected http://HOST:PORT, of a path s3://BUCKET/PREFIX"
        )
    if separator and scheme != "s3":
        raise ConfigError(f"--kv-tier store:path={text}: unsupported store; expected a directory or s3://BUCKET/PREFIX")
    if not separator:
        return _directory("store", text)
    from forebay.workers.kv_tiers.object_store import parsed_bucket  # noqa: PLC0415 - as above

    with prefixed("--kv-tier store:path"):
        parsed_bucket(text)
    return text
