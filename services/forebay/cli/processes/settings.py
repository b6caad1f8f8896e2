"""What `forebay up` is told, apart from the code that does it: other commands start without an HTTP server."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.cli.processes.engines import EngineChoice
from forebay.events.control import Role, RouterConfig
from forebay.live.owner.retention import RetentionLimits

if TYPE_CHECKING:
    from forebay.ingress.settings import IngressSettings


@dataclass(frozen=True, slots=True)
class Workers:
    """How many workers one process has: `whole` ones, or `prefill` and `decode` ones."""

    whole: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def apart(self) -> bool:
        """Whether prompts may be computed by others than who answers."""
        return self.decode > 0

    def roles(self, engine: EngineChoice) -> dict[str, Role]:
        """The role of each by its name."""
        kinds: tuple[tuple[str, Role, int], ...] = (
            (engine.label.lower(), "aggregated", self.whole),
            ("prefill", "prefill", self.prefill),
            ("decode", "decode", self.decode),
        )
        return {f"{name}-{number}": role for name, role, count in kinds for number in range(count)}


@dataclass(frozen=True, slots=True)
class EmbeddedSettings:
    """The settings of a system in one process.

    Attributes:
        log: its file, None for memory.
        engine: what every worker runs; the ingress serves its model and adapters.
        roles: the role of each worker, by its name.
        taints: the labels of each worker, by its name.
        kv_events: whether workers tell what they have cached.
        ingress: settings of the ingress, without the block size, which the engine reports.
        allow_hosts: names that the header `Host` of a request may have beside those of the loopback address.
        lease_ttl_s: a worker silent for this long is lost.
        snapshot_every: journal records between snapshots.
        snapshot_age_s: between snapshots, when fewer records come.
        log_limits: the size and age of the log, beyond which old records are removed.
    """

    log: Path | None
    engine: EngineChoice
    router: RouterConfig
    roles: dict[str, Role]
    taints: dict[str, tuple[str, ...]]
    kv_events: bool
    ingress: "IngressSettings"
    allow_hosts: tuple[str, ...]
    lease_ttl_s: float
    snapshot_every: int
    snapshot_age_s: float
    log_limits: RetentionLimits
