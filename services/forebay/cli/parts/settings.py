"""What `forebay up` is told, apart from the code that does it: other commands start without an HTTP server."""

from dataclasses import dataclass, field
from pathlib import Path

from forebay.cli.parts.engines import EngineChoice
from forebay.events.control import Role, RouterConfig
from forebay.ingress.media_refs import MediaSettings
from forebay.live.retention import Limits


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
class Embedded:
    """The settings of a system in one process.

    Attributes:
        log: its file, None for memory.
        engine: what every worker runs; the ingress serves its model and adapters.
        roles: the role of each worker, by its name.
        taints: the labels of each worker, by its name.
        kv_events: whether workers tell what they have cached.
        routing_hints: whether clients may say where their requests go.
        admin_token: what clients of the admin API send; empty without an admin API.
        allow_hosts: names that the header `Host` of a request may have beside those of the loopback address.
        media: from where images and videos may be fetched.
        body_bytes_max: bytes of a request body beside images and videos.
        media_body_bytes_max: bytes of a whole request body, if the model takes images or videos.
        tool_call_parser: finds tool calls in answers; `reasoning_parser` likewise reasoning.
        lease_ttl_s: a worker silent for this long is lost.
        timeout_s: for a whole request.
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
    routing_hints: bool
    admin_token: str = field(repr=False)
    allow_hosts: tuple[str, ...]
    tool_call_parser: str
    reasoning_parser: str
    media: MediaSettings
    body_bytes_max: int
    media_body_bytes_max: int
    lease_ttl_s: float
    timeout_s: float
    snapshot_every: int
    snapshot_age_s: float
    log_limits: Limits
