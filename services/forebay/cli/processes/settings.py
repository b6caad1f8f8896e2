"""Settings of `forebay up`, in their own module, so that other commands do not import an HTTP server."""

from collections import Counter
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
    """Number of workers that `forebay up` runs for a model, by role; of aggregated workers, by pool.

    The prompt of a request on a decode worker is computed by that worker or by a prefill worker.
    """

    aggregated: Mapping[str, int] = field(default_factory=dict)
    prefill: int = 0
    decode: int = 0

    @property
    def count(self) -> int:
        return sum(self.aggregated.values()) + self.prefill + self.decode

    def places(self, engine: "EngineChoice", used: Counter[str] | None = None) -> "dict[str, WorkerPlace]":
        """Return the role and the pool of each worker by its id.

        `used` has the number of ids that other models use, by kind. The ids of these workers are added.
        """
        used = Counter() if used is None else used
        label = engine.label.lower()
        aggregated = [WorkerPlace("aggregated", pool) for pool, count in self.aggregated.items() for _ in range(count)]
        prefill = [WorkerPlace("prefill", pool_of("prefill"))] * self.prefill
        decode = [WorkerPlace("decode", pool_of("decode"))] * self.decode
        kinds = ((label, aggregated), ("prefill", prefill), ("decode", decode))
        found: dict[str, WorkerPlace] = {}
        for name, places in kinds:
            found |= {f"{name}-{used[name] + number}": place for number, place in enumerate(places)}
            used[name] += len(places)
        return found


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    role: Role
    pool: str


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """One model of `forebay up`, which has a group of its own.

    Attributes:
        engine: engine of every worker of the model. The ingress serves the model and the adapters of this engine.
        places: by worker id, which is unique among all models.
        routing: rules for the choice of pools; None keeps those of the log.
    """

    engine: "EngineChoice"
    places: dict[str, WorkerPlace]
    routing: PoolRouting | None

    @property
    def name(self) -> str:
        return self.engine.settings.model_name


@dataclass(frozen=True, slots=True)
class EmbeddedSettings:
    """Settings of `forebay up`.

    Attributes:
        log: path of the log file; None keeps the log in memory.
        taints: taints (labels) of each worker by its id.
        ingress: settings without the block size, which the engines report.
        drain_s: maximum time to wait for requests in flight after a signal.
        lease_ttl_s: time without a lease renewal after which a worker is lost.
        log_sync: whether an acknowledged append survives a power loss (`full`), or only the death of the process.
        console: settings of a console in another process; None for no console.
    """

    log: Path | None
    models: tuple[EmbeddedModel, ...]
    router: RouterConfig
    policies: "CustomPolicies"
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
