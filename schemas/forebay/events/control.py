"""Topic `control`: configuration and admin commands."""

from typing import Annotated, Literal

import msgspec

from forebay.events.base import Event, Name, Part

RouterMode = Literal["kv", "round-robin"]
Weight = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]  # finite, and so is every cost


class RouterConfig(Part, frozen=True, kw_only=True):
    """The KV router's weights. Names, defaults and meanings are Dynamo's (router configuration)."""

    mode: RouterMode = "kv"
    overlap_score_credit: Weight = 1.0
    prefill_load_scale: Weight = 1.0
    host_cache_hit_weight: Weight = 0.75
    disk_cache_hit_weight: Weight = 0.25
    decode_active_request_weight: Weight = 0.0
    temperature: Weight = 0.0


class PoolConfigured(Event, tag="control.pool_configured", frozen=True, kw_only=True):
    """A pool serves one model with blocks of one size; its routing rule is replaced as a whole."""

    pool: Name
    model: Name
    block_size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    router: RouterConfig = RouterConfig()
    attempts_max: Annotated[int, msgspec.Meta(ge=1)] = 3  # a request that loses this many workers is given up
    at_us: int = 0


ControlEvent = PoolConfigured
