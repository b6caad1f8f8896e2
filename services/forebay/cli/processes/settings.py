"""Settings of `forebay up`, in their own module, so that other commands do not import an HTTP server."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.cli.processes.engines import EngineChoice
from forebay.cli.processes.options import SnapshotOptions
from forebay.core.routing.policies import CustomPolicies
from forebay.events.control import Role, RouterConfig
from forebay.live.owner.retention import RetentionLimits

if TYPE_CHECKING:
    from forebay.ingress.http.endpoint import Endpoint
    from forebay.ingress.settings import IngressSettings


@dataclass(frozen=True, slots=True)
class Workers:
    """Number of workers that `forebay up` runs, by role.

    Attributes:
        aggregated: workers that compute prompts and responses.
        prefill: workers that compute prompts only.
        decode: workers that generate responses. The prompt is computed by a prefill worker or by the decode worker.
    """

    aggregated: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill workers may compute the prompts."""
        return self.decode > 0

    def roles(self, engine: EngineChoice) -> dict[str, Role]:
        """Return the role of each worker by its id."""
        kinds: tuple[tuple[str, Role, int], ...] = (
            (engine.label.lower(), "aggregated", self.aggregated),
            ("prefill", "prefill", self.prefill),
            ("decode", "decode", self.decode),
        )
        return {f"{name}-{number}": role for name, role, count in kinds for number in range(count)}


@dataclass(frozen=True, slots=True)
class EmbeddedSettings:
    """Settings of `forebay up`.

    Attributes:
        log: path of the log file; None keeps the log in memory.
        engine: engine of every worker. The ingress serves the model and the adapters of this engine.
        router: configuration of the router.
        policies: custom policies that the owner may run.
        roles: role of each worker by its id.
        taints: taints (labels) of each worker by its id.
        kv_events: whether workers report the contents of their caches.
        ingress: settings of the ingress, without the block size, which the engine reports.
        endpoint: address at which the ingress serves HTTP.
        drain_s: maximum seconds to wait for requests in flight after a signal.
        lease_ttl_s: seconds without a lease renewal after which a worker is lost.
        snapshots: when the owner takes a snapshot.
        log_limits: maximum size and age of the log.
    """

    log: Path | None
    engine: EngineChoice
    router: RouterConfig
    policies: CustomPolicies
    roles: dict[str, Role]
    taints: dict[str, tuple[str, ...]]
    kv_events: bool
    ingress: "IngressSettings"
    endpoint: "Endpoint"
    drain_s: float
    lease_ttl_s: float
    snapshots: SnapshotOptions
    log_limits: RetentionLimits
