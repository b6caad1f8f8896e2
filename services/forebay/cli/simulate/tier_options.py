"""Options for the sizes of simulated tiers."""

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from forebay.simulate.settings import Settings
from forebay.simulate.tiers.settings import DiskTier, FleetTiers, HostTier, StoreTier, TierModel, WorkerTiers

Tier = TypeVar("Tier", bound=TierModel)


def with_tier_sizes(settings: Settings, host: str | None, disk: str | None, store: str | None) -> Settings:
    """Return settings with other sizes of the tiers. None leaves a size unchanged; other properties stay as they are.

    Raises:
        ValueError: a size is invalid; the text names the option.
    """
    if host is disk is store is None:
        return settings
    tiers = settings.tiers or FleetTiers()
    tiers = replace(
        tiers,
        host=_sized("--kv-host-size", HostTier, tiers.host, host),
        disk=_sized("--kv-disk-size", DiskTier, tiers.disk, disk),
        store=_sized("--kv-store-size", StoreTier, tiers.store, store),
    )
    pools = tuple(
        replace(pool, groups=tuple(replace(group, tiers=_own(group.tiers, host, disk)) for group in pool.groups))
        for pool in settings.pools
    )
    return replace(settings, pools=pools, tiers=tiers)


def _own(tiers: WorkerTiers | None, host: str | None, disk: str | None) -> WorkerTiers | None:
    """Return the tiers of an engine profile with the sizes of the options."""
    if tiers is None:
        return None
    return WorkerTiers(
        host=tiers.host and _sized("--kv-host-size", HostTier, tiers.host, host),
        disk=tiers.disk and _sized("--kv-disk-size", DiskTier, tiers.disk, disk),
    )


def _sized(option: str, kind: Callable[..., Tier], tier: Tier | None, size: str | None) -> Tier | None:
    if size is None:
        return tier
    try:
        return kind(size=size) if tier is None else replace(tier, size=size)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
