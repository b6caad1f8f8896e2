"""Settings of `forebay up`, in their own module, so that other commands do not import an HTTP server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.cli.processes.engine_options import pool_of
from forebay.cli.processes.options import SnapshotOptions
from forebay.events.control import Role, RouterConfig
from forebay.events.pools import PoolRouting
from forebay.transport.base import LogSync

if TYPE_CHECKING:
    from forebay.cli.processes.engines import EngineChoice
    from forebay.console.settings import ConsoleSettings
    from forebay.core.routing.policies import CustomPolicies
    from forebay.ingress.http.endpoint import Endpoint
    from forebay.ingress.settings import IngressSettings
    from forebay.live.owner.retention import RetentionLimits


@dataclass(frozen=True, slots=True)
class Workers:
    """Number of workers that `forebay up` runs, by role.

    Attributes:
        aggregated: workers that compute prompts and responses, by pool.
        prefill: workers that compute prompts only.
        decode: workers that generate responses. The prompt is computed by a prefill worker or by the decode worker.
    """

    aggregated: Mapping[str, int] = field(default_factory=dict)
    prefill: int = 0
    decode: int = 0

    @property
    def count(self) -> int:
        """Number of all workers."""
        return sum(self.aggregated.values()) + self.prefill + self.decode

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill workers may compute the prompts."""
        return self.decode > 0

    def places(self, engine: "EngineChoice") -> "dict[str, WorkerPlace]":
        """Return the role and the pool of each worker by its id."""
        label = engine.label.lower()
        aggregated = [WorkerPlace("aggregated", pool) for pool, count in self.aggregated.items() for _ in range(count)]
        prefill = [WorkerPlace("prefill", pool_of("prefill"))] * self.prefill
        decode = [WorkerPlace("decode", pool_of("decode"))] * self.decode
        kinds = ((label, aggregated), ("prefill", prefill), ("decode", decode))
        return {f"{name}-{number}": place for name, places in kinds for number, place in enumerate(places)}


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Role and pool of a worker."""

    role: Role
    pool: str


@dataclass(frozen=True, slots=True)
class EmbeddedSettings:
    """Settings of `forebay up`.

    Attributes:
        log: path of the log file; None keeps the log in memory.
        engine: engine of every worker. The ingress serves the model and the adapters of this engine.
        router: configuration of the router.
        policies: custom policies that the owner may run.
        places: role and pool of each worker by its id.
        routing: rules for the choice of pools; None keeps those of the log.
        taints: taints (labels) of each worker by its id.
        kv_events: whether workers report the contents of their caches.
        ingress: settings of the ingress, without the block size, which the engine reports.
        endpoint: address at which the ingress serves HTTP.
        drain_s: maximum seconds to wait for requests in flight after a signal.
        lease_ttl_s: seconds without a lease renewal after which a worker is lost.
        snapshots: when the owner takes a snapshot.
        log_limits: maximum size and age of the log.
        log_sync: whether an acknowledged append survives a power loss (`full`), or only the death of the process.
        console: settings of a console in another process; None for no console.
    """

    log: Path | None
    engine: "EngineChoice"
    router: RouterConfig
    policies: "CustomPolicies"
    places: dict[str, WorkerPlace]
    routing: PoolRouting | None
    taints: dict[str, tuple[str, ...]]
    kv_events: bool
    ingress: "IngressSettings"
    endpoint: "Endpoint"
    drain_s: float
    lease_ttl_s: float
    snapshots: SnapshotOptions
    log_limits: "RetentionLimits"
    log_sync: LogSync = "normal"
    console: "ConsoleSettings | None" = None
