"""Settings of the owner of one group."""

from dataclasses import dataclass, field

from forebay.core.routing.policies import CustomPolicies
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.pools import PoolRouting


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings of the owner of one group.

    Attributes:
        group: Name of the model, and of the group in the leases. One owner decides for all pools of the model.
        owner_id: Name of this owner in the journal and in heartbeats. No decision depends on it.
        pools: Settings of all pools that may have workers. The owner appends each one to `control` if it differs from
            the settings on the log. If empty, the first lease of each pool configures the pool.
        router: Routing settings of pools that leases configure. The owner appends them to `control` if they differ from
            the settings on the log.
        routing: Rules for the choice of pools. The owner appends them to `control` if they differ from the rules on the
            log. None keeps the rules of the log.
        slots_max: Number of partitions of each work topic. All groups share them.
        policies: Custom policies that the operator allowed, by router mode. The owner writes their names into its
            claim, and rejects requests of pools whose mode names any other custom policy.
        groups: Number of control partitions. Each group can use slots_max / groups slots of a pool.
        snapshot_every: Number of journal records between two snapshots.
        snapshot_age_s: Maximum time between two snapshots in seconds, if at least one record was journalled since.
        poll_s: Interval between two polls of the leases, in seconds.
        heartbeats: Whether the owner appends to `heartbeats`, for ingresses in other processes.
    """

    group: str
    partition: int
    owner_id: str
    pools: tuple[PoolConfigured, ...] = ()
    router: RouterConfig = field(default_factory=RouterConfig)
    routing: PoolRouting | None = None
    policies: CustomPolicies = field(default_factory=dict)
    slots_max: int = 1_024
    groups: int = 1
    snapshot_every: int = 5_000
    snapshot_age_s: float = 300.0
    poll_s: float = 0.5
    heartbeats: bool = False
