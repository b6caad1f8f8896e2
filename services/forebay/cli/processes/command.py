"""Commands that run a system: `up`, and the services of a distributed system."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from forebay.cli.common.cluster_options import LOOPBACK, ClusterOptions, MetricsPortOption, ServiceOptions
from forebay.cli.common.logs import AccessLogOption, LoggingOptions
from forebay.cli.common.options import Argument, Option
from forebay.cli.console.command import PORT as CONSOLE_PORT
from forebay.cli.policies.allowed import AllowPolicyOption
from forebay.cli.policies.router_options import RouterOptions
from forebay.cli.processes.engine_options import EngineOptions
from forebay.cli.processes.http_options import HttpOptions
from forebay.cli.processes.options import (
    DrainOption,
    KvEventsOption,
    LorasOption,
    ModelNameOption,
    ModelOption,
    PoolRoutingOption,
    RevisionOption,
    SnapshotOptions,
)
from forebay.cli.processes.tier_options import TierOptions
from forebay.cli.processes.up_models import ModelsOptions, WorkerOptions
from forebay.cli.processes.upstream_options import UpstreamOptions
from forebay.transport.base import LogSync
from forebay.workers import PROCESSES_MAX

DRAIN_S = 7.0  # of `up`: with the time to send errors and close, within the 10 s that `docker stop` allows
LeaseTtlOption = Annotated[float, Option(min=0.1, help="Seconds without a lease renewal after which a worker is lost.")]


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options that set where the log is kept, and which records are removed from it."""

    PANEL: ClassVar = "Log"

    log: Annotated[Path | None, Option(help="Log file. Default: the log is kept in memory.")] = None
    log_max_size: Annotated[
        str | None,
        Option(
            help="Maximum log size, such as 500MB. The oldest records are removed, up to a snapshot. Default: 10GB for"
            " a file, 1GB in memory."
        ),
    ] = None
    log_max_age: Annotated[str | None, Option(help="Maximum age of records, such as 12h or 7d. Default: no limit.")] = (
        None
    )
    log_sync: Annotated[
        LogSync,
        Option(
            help="full: an acknowledged record survives a power loss, because each commit waits for the disk. normal:"
            " a power loss may remove the newest records."
        ),
    ] = "normal"


@dataclass(frozen=True, slots=True)
class ConsoleBesideOptions:
    PANEL: ClassVar = "Console"

    console: Annotated[bool, Option("--console", help="Serve a web page that shows this system. Requires --log.")] = (
        False
    )
    console_port: Annotated[int, Option(min=1, max=65535, help="HTTP port of the console.")] = CONSOLE_PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class UpCommand:
    """Serve an OpenAI-compatible API with a KV-aware router and workers in one process."""

    RUN: ClassVar = "processes.up:run_up"
    BASIC: ClassVar = (
        "model model_name engine engine_args workers prefill_workers decode_workers port host api_key log "
        "console router_mode kv_tier config"
    )

    router: RouterOptions
    http: HttpOptions
    port: Annotated[int, Option(min=1, max=65535, help="HTTP port.")] = 8000
    host: Annotated[str, Option(help="Address to listen on. Other machines need an API key.")] = "127.0.0.1"
    workers: WorkerOptions
    log: LogOptions
    taint: Annotated[
        list[str] | None,
        Option(
            "--taint", help="Worker label that requests may require or prefer; mock-2:LABEL for one worker. Repeatable."
        ),
    ] = None
    allow_policy: AllowPolicyOption = None
    kv_events: KvEventsOption = True
    lease_ttl_s: LeaseTtlOption = 3.0
    drain_s: DrainOption = DRAIN_S
    snapshots: SnapshotOptions
    console: ConsoleBesideOptions
    access_log: AccessLogOption = True
    logs: LoggingOptions
    models: ModelsOptions
    tiers: TierOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressCommand:
    """Serve the OpenAI API and the Kafka API of a distributed system.

    Without --model and --model-name, all models are served that have ready workers. Their tokenizers and chat templates
    come from the topic `models`.
    """

    RUN: ClassVar = "processes.ingress:run_ingress"
    BASIC: ClassVar = (
        "kafka redis namespace model model_name port host api_key api_key_file ssl_certfile admin_api ingress_id config"
    )

    addresses: ClusterOptions
    port: Annotated[int, Option(min=1, max=65535, help="HTTP port.")] = 8000
    host: Annotated[str, Option(help="Address to listen on. Other machines need an API key.")] = LOOPBACK
    ingress_id: Annotated[str, Option("--id", help="Unique ingress id. Default: host name and process id.")] = ""
    model: ModelOption = None
    revision: RevisionOption = None
    model_name: ModelNameOption = ""
    block_size: Annotated[
        int | None, Option(min=1, help="Tokens per KV block. Default: the block size of the model's pool.")
    ] = None
    lora: LorasOption = None
    reply_topic: Annotated[
        list[str] | None,
        Option(
            help="Topic pattern that Kafka clients may use as reply-topic; * matches any characters. Repeatable. "
            "Default: NAMESPACE.replies.*."
        ),
    ] = None
    allow_policy: AllowPolicyOption = None
    drain_s: DrainOption = 60.0
    access_log: AccessLogOption = True
    http: HttpOptions
    logs: LoggingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCommand:
    """Run a router of a distributed system.

    Further routers stand by or share the groups. Requires Faust: pip install 'forebay[router]'.
    """

    RUN: ClassVar = "processes.router:run_router"
    BASIC: ClassVar = "kafka redis namespace router_mode router_policy_config router_id metrics_port config"
    REQUIRES: ClassVar = ("router", "faust")

    router: RouterOptions
    addresses: ClusterOptions
    allow_policy: AllowPolicyOption = None
    router_id: Annotated[str, Option("--id", help="Display name of the router. Default: host name and process id.")] = (
        ""
    )
    pool_routing: PoolRoutingOption = None
    take_over_at_last_snapshot: Annotated[
        bool,
        Option(
            "--take-over-at-last-snapshot",
            help="Continue from the last snapshot of a group whose journal this router cannot derive. The decisions"
            " after the snapshot are given up. The router first prints how many these are.",
        ),
    ] = False
    snapshots: SnapshotOptions
    service: ServiceOptions
    logs: LoggingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """Run a worker of a distributed system."""

    RUN: ClassVar = "processes.worker:run_worker"
    BASIC: ClassVar = (
        "kafka redis namespace model model_name engine engine_args role pool upstream upstream_kv_events "
        "kv_tier worker_id metrics_port config"
    )

    addresses: ClusterOptions
    worker_id: Annotated[
        str, Option("--id", help="Worker id, unique in its group. Default: host name and process id.")
    ] = ""
    pool: Annotated[
        str, Option(help="Pool to join. Default: the pool of the service class, else the role, else 'default'.")
    ] = ""
    dp_start_rank: Annotated[int, Option(min=0, max=1 << 20, help="First data-parallel rank of the worker.")] = 0
    taint: Annotated[list[str] | None, Option(help="Worker label that requests may require or prefer. Repeatable.")] = (
        None
    )
    kv_events: KvEventsOption = True
    kv_host: Annotated[
        str | None,
        Option(help="Address from which other workers fetch KV. Default: the local address of the route to Kafka."),
    ] = None
    drain_s: Annotated[
        float, Option(min=0.0, max=86_400.0, help="Seconds to finish requests in flight after SIGTERM.")
    ] = 30.0
    lease_ttl_s: Annotated[
        float, Option(min=0.1, help="Seconds without a lease renewal after which the worker is lost.")
    ] = 3.0
    service: ServiceOptions
    logs: LoggingOptions
    upstream: UpstreamOptions
    engine: EngineOptions
    tiers: TierOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """Run the workers of a service class, one process per worker.

    Other options are passed to `forebay worker`.
    """

    RUN: ClassVar = "processes.serve:run_serve"

    service: Annotated[str, Argument(metavar="FILE.py:Class", help="Class decorated with @service.")]
    workers: Annotated[
        int | None,
        Option(
            min=1,
            max=PROCESSES_MAX,
            help="Number of worker processes. Default: the number that the service class declares.",
        ),
    ] = None
    worker_id_prefix: Annotated[
        str, Option("--id", help="Prefix of the worker ids; a number follows. Default: host name and process id.")
    ] = ""
    metrics_port: MetricsPortOption = None
    options: Annotated[
        list[str] | None, Argument("[OPTIONS OF WORKER]", takes_options=True, help="Options of `forebay worker`.")
    ] = None
