"""Commands that run a system: `up`, and the services of a distributed system."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from forebay.cli.command import CONSOLE_PORT
from forebay.cli.common.cluster_options import (
    LOOPBACK,
    ClusterOptions,
    KafkaOptions,
    MetricsPortOption,
    ServiceOptions,
)
from forebay.cli.common.credentials import (
    AdminTokenFileOption,
    ApiKeyFileOption,
    ApiKeysOption,
    api_keys,
    required_token,
)
from forebay.cli.common.extras import require_extra
from forebay.cli.common.logs import AccessLogOption, LoggingOptions
from forebay.cli.common.options import Argument, Option
from forebay.cli.policies.allowed import AllowPolicyOption
from forebay.cli.policies.router_options import RouterOptions
from forebay.cli.processes.engine_options import EngineOptions
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
from forebay.ingress.body_limits import MEDIA_BYTES_MAX, TEXT_BYTES_MAX
from forebay.ingress.key_file import read_keys
from forebay.ingress.media.tokens import MediaSettings
from forebay.processes.names import names
from forebay.runtime.errors import ConfigError
from forebay.runtime.files import FILE_BYTES_MAX, read_text
from forebay.transport.base import LogSync
from forebay.workers import PROCESSES_MAX

if TYPE_CHECKING:
    from forebay.ingress.http.endpoint import Endpoint
    from forebay.ingress.settings import IngressSettings
    from forebay.live.spans import SpanSettings
    from forebay.processes.worker import Upstream

UPSTREAMS_MAX = 64  # each has a worker in this process
DRAIN_S = 7.0  # of `up`: with the time to send errors and close, within the 10 s that `docker stop` allows
LeaseTtlOption = Annotated[float, Option(min=0.1, help="Seconds without a lease renewal after which a worker is lost.")]


@dataclass(frozen=True, slots=True)
class UpstreamOptions:
    PANEL: ClassVar = "Servers that already run"

    upstream: Annotated[
        list[str] | None,
        Option(
            metavar="URL",
            help="Server that already runs, as http://host:port, instead of an engine in this process. Repeatable.",
        ),
    ] = None
    upstream_kv_events: Annotated[
        list[str] | None,
        Option(
            metavar="ZMQ",
            help="KV events of a server as tcp://host:port, or tcp://host:port,tcp://host:port with its replay socket."
            " One per --upstream, in the same order; - for none. Repeatable.",
        ),
    ] = None
    upstream_api_key_file: Annotated[Path | None, Option(help="File with the API key of the servers.")] = None
    allow_shared_cache: Annotated[
        bool,
        Option(
            "--allow-shared-cache",
            help="Send requests with a cache salt also to servers that cannot separate their cache.",
        ),
    ] = False

    def upstreams(self) -> "tuple[Upstream, ...]":
        """Return the servers; empty without --upstream. Raises ConfigError if an option is invalid."""
        urls, events = self.upstream or [], self.upstream_kv_events or []
        if not urls:
            for flag, value in (
                ("--upstream-kv-events", events),
                ("--upstream-api-key-file", self.upstream_api_key_file),
                ("--allow-shared-cache", self.allow_shared_cache),
            ):
                if value:
                    raise ConfigError(f"{flag} requires --upstream URL")
            return ()
        # Imported here, because --help does not wait for the client.
        from forebay.processes.worker import Upstream  # noqa: PLC0415

        if len(urls) > UPSTREAMS_MAX:
            raise ConfigError(f"--upstream: got {len(urls)} servers, the maximum of one process is {UPSTREAMS_MAX}")
        if events and len(events) != len(urls):
            raise ConfigError(
                f"--upstream-kv-events: got {len(events)} values for {len(urls)} servers; give one per --upstream, and"
                " - for none"
            )
        for url in urls:
            _require_url(url)
        return tuple(
            Upstream(url.rstrip("/"), *_sockets(text))
            for url, text in zip(urls, events or ["-"] * len(urls), strict=True)
        )

    def api_key(self) -> str:
        """Return the API key of the servers; empty if there is none. Raises ConfigError if the file cannot be read."""
        file = self.upstream_api_key_file
        if file is None:
            return ""
        key = read_text(f"--upstream-api-key-file {file}", file, FILE_BYTES_MAX).strip()
        if not key or not all("!" <= character <= "~" for character in key):
            raise ConfigError(f"--upstream-api-key-file {file}: expected one key of visible ASCII characters")
        return key


def _require_url(url: str) -> None:
    """Raise ConfigError if `url` is not the base address of an HTTP server."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isprintable()
    except ValueError:
        valid = False
    if valid and parts.username is not None:
        raise ConfigError("--upstream: the address has a user name or password; use --upstream-api-key-file instead")
    if not valid or parts.query or parts.fragment or parts.path.strip("/"):
        hint = "; leave out /v1" if valid and parts.path.strip("/") == "v1" else ""
        raise ConfigError(f"--upstream {url}: expected http://host:port{hint}")


def _sockets(text: str) -> tuple[str, str]:
    """Return the addresses of KV events and replays, or empty texts. Raises ConfigError if one is invalid."""
    if text == "-":
        return "", ""
    events, comma, replay = text.partition(",")
    for address in (events, replay) if comma else (events,):
        if not address.startswith(("tcp://", "ipc://")):
            raise ConfigError(
                f"--upstream-kv-events {text}: expected tcp://host:port of the KV events, or that and"
                " after a comma tcp://host:port of their replay"
            )
    return events, replay


def _bytes_max(media: str) -> Any:
    text = f"Maximum bytes of a request body {media} images and videos. Larger bodies get 413."
    return Option(min=1_024, max=1 << 30, help=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    PANEL: ClassVar = "HTTP API"

    api_key: ApiKeysOption = field(default=None, repr=False)
    api_key_file: ApiKeyFileOption = None
    allow_anonymous: Annotated[
        bool, Option("--allow-anonymous", help="Serve other machines without an API key, if there is none.")
    ] = False
    ssl_certfile: Annotated[Path | None, Option(help="Serve HTTPS with this certificate, a PEM file.")] = None
    ssl_keyfile: Annotated[
        Path | None, Option(help="Private key of the certificate. Default: the key in --ssl-certfile.")
    ] = None
    grpc_port: Annotated[
        int | None,
        Option(min=1, max=65535, help="Serve the KServe API by gRPC on this port. Requires the extra `kserve`."),
    ] = None
    cors_allow_origin: Annotated[
        list[str] | None,
        Option(
            metavar="ORIGIN", help="Origin whose web pages may use the API, as https://app.example, or *. Repeatable."
        ),
    ] = None
    routing_hints: Annotated[
        bool, Option("--routing-hints", help="Accept worker, priority, session and policy class from clients.")
    ] = False
    ignore_unknown_fields: Annotated[
        bool, Option("--ignore-unknown-fields", help="Ignore unknown fields of request bodies. Default: reject them.")
    ] = False
    admin_api: Annotated[
        bool,
        Option(
            "--admin-api", help="Serve the admin API: commands, busy thresholds and disaggregation. Requires a token."
        ),
    ] = False
    admin_port: Annotated[
        int | None,
        Option(min=1, max=65535, help="Serve the admin API only on this port of 127.0.0.1. Requires a token."),
    ] = None
    admin_token_file: AdminTokenFileOption = None
    allow_host: Annotated[list[str] | None, Option(help="Additional allowed value of the Host header. Repeatable.")] = (
        None
    )
    tool_call_parser: Annotated[
        str, Option(help="Tool call parser: auto (by the model card), none, or a parser name.")
    ] = "auto"
    reasoning_parser: Annotated[
        str, Option(help="Reasoning parser: auto (by the model card), none, or a parser name.")
    ] = "auto"
    media_allow_host: Annotated[
        list[str] | None,
        Option(help="Private host from which images may be fetched, or * for all, in tests. Repeatable."),
    ] = None
    body_bytes_max: Annotated[int, _bytes_max("without")] = TEXT_BYTES_MAX
    media_body_bytes_max: Annotated[int, _bytes_max("with")] = MEDIA_BYTES_MAX
    timeout_s: Annotated[float, Option(min=0.001, max=86_400, help="Timeout of a request in seconds.")] = 600.0

    def settings(self, **others: Any) -> "IngressSettings":
        """Return the settings of an ingress, with `others` by field. Raises ConfigError if an option is invalid."""
        # Imported here, so that other commands do not wait for an HTTP server to load.
        from forebay.ingress.http.guards import allowed_origins  # noqa: PLC0415
        from forebay.ingress.settings import IngressSettings  # noqa: PLC0415

        hosts = names("--media-allow-host", self.media_allow_host)
        return IngressSettings(
            routing_hints=self.routing_hints,
            ignore_unknown_fields=self.ignore_unknown_fields,
            api_keys=api_keys(self.api_key),
            key_file=None if self.api_key_file is None else read_keys(self.api_key_file),
            cors_origins=allowed_origins(tuple(self.cors_allow_origin or ())),
            admin_token=required_token(self.admin_token_file, admin_api=self.admin_api or self.admin_port is not None),
            admin_port=self.admin_port,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            media=MediaSettings(tuple(one for one in hosts if one != "*"), allow_private="*" in hosts),
            body_bytes_max=self.body_bytes_max,
            media_body_bytes_max=self.media_body_bytes_max,
            timeout_s=self.timeout_s,
            **others,
        )

    def endpoint(self, host: str, port: int) -> "Endpoint":
        """Return the address at which an ingress serves HTTP. Raises ConfigError if the certificate cannot be used."""
        from forebay.ingress.http.endpoint import Endpoint, TlsFiles  # noqa: PLC0415

        if self.ssl_certfile is None and self.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile requires --ssl-certfile")
        if self.grpc_port is not None:
            require_extra("kserve", "--grpc-port", "grpc", "google.protobuf")
        return Endpoint(
            host=host,
            port=port,
            allow_hosts=tuple(self.allow_host or ()),
            allow_anonymous=self.allow_anonymous,
            tls=None if self.ssl_certfile is None else TlsFiles(self.ssl_certfile, self.ssl_keyfile),
            grpc_port=self.grpc_port,
        )


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
class SpansOptions:
    PANEL: ClassVar = "Spans"

    otlp: Annotated[
        str | None,
        Option(metavar="URL", help="Export a trace of each request by OTLP, for example to http://localhost:4318."),
    ] = None
    otlp_sample: Annotated[
        float, Option(min=0.0, max=1.0, help="Share of the traces to export, in addition to those that failed.")
    ] = 1.0
    otlp_slow_s: Annotated[
        float | None, Option(min=0.0, help="Also export the traces of requests that took this many seconds or more.")
    ] = None
    otlp_tenant: Annotated[
        list[str] | None, Option(metavar="TENANT", help="Also export all traces of this tenant. Repeatable.")
    ] = None
    otlp_console_url: Annotated[
        str, Option(metavar="URL", help="Address of `forebay console`, to which the spans of requests link.")
    ] = ""

    def settings(self) -> "SpanSettings | None":
        """Return the settings of the export; None without --otlp. Raises ConfigError if the URL is invalid."""
        if self.otlp is None:
            return None
        from forebay.live.spans import SpanSettings  # noqa: PLC0415 - --help does not wait for the core

        try:
            parts = urlsplit(self.otlp)
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.username is None
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(f"--otlp {self.otlp}: expected http://host:port of a receiver, without a password")
        url = self.otlp if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"
        tenants = frozenset(self.otlp_tenant or ())
        console_url = self.otlp_console_url.rstrip("/")
        return SpanSettings(url, self.otlp_sample, self.otlp_slow_s, tenants, console_url)


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
    spans: SpansOptions
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
    require_key: Annotated[
        bool,
        Option(
            "--require-key",
            help="Reject clients without an API key, also of the Kafka API, whose requests then need a signature.",
        ),
    ] = False
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
class PickerCommand:
    """Run an external processor, by which Envoy sends each request to the server that the router selects.

    All models are served whose workers represent servers (`forebay worker --upstream`). Requires the extra `picker`.
    """

    RUN: ClassVar = "processes.picker:run_picker"
    BASIC: ClassVar = "kafka redis namespace port host fallback picker_id metrics_port config"
    REQUIRES: ClassVar = ("picker", "grpc")

    addresses: ClusterOptions
    port: Annotated[int, Option(min=1, max=65535, help="gRPC port.")] = 9002
    host: Annotated[str, Option(help="Address to listen on, also for metrics. It has no authentication.")] = LOOPBACK
    metrics_port: MetricsPortOption = None
    picker_id: Annotated[str, Option("--id", help="Unique picker id. Default: host name and process id.")] = ""
    fallback: Annotated[
        Literal["random", "503"],
        Option(help="Without a router, send requests to a random ready server, or reject them with status 503."),
    ] = "random"
    body_bytes_max: Annotated[int, _bytes_max("without")] = TEXT_BYTES_MAX
    timeout_s: Annotated[float, Option(min=0.001, max=86_400, help="Timeout of a request in seconds.")] = 600.0
    drain_s: DrainOption = 60.0
    logs: LoggingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCommand:
    """Run a router of a distributed system.

    Further routers stand by or share the groups.
    """

    RUN: ClassVar = "processes.router:run_router"
    BASIC: ClassVar = "kafka redis namespace router_mode router_policy_config router_id metrics_port config"

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
class IndexerCommand:
    """Serve the prefix index and the load of all models of a distributed system to other programs.

    The indexer only reads the log, and nothing in serving depends on it. Several indexers share the models. Requires
    the extra `indexer`.
    """

    RUN: ClassVar = "processes.indexer:run_indexer"
    REQUIRES: ClassVar = ("indexer", "faust")

    kafka: KafkaOptions
    port: Annotated[int, Option(min=1, max=65535, help="HTTP port.")] = 8200
    host: Annotated[str, Option(help="Address to listen on. The API has no authentication.")] = LOOPBACK
    allow_policy: AllowPolicyOption = None
    logs: LoggingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCommand:
    """Write the ledger of a distributed system: what each tenant has used.

    It only reads the log, and appends to the topic `usage`. A second one may run at the same time.
    """

    RUN: ClassVar = "processes.ledger:run_ledger"

    kafka: KafkaOptions
    every_s: Annotated[
        float, Option(min=0.1, max=3_600.0, help="Seconds between two records of a model that serves requests.")
    ] = 60.0
    service: ServiceOptions
    logs: LoggingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SpansCommand:
    """Export the spans of a distributed system from its log, to a receiver of OpenTelemetry.

    It only reads the log, and appends its position to the topic `spans`. Requires the extra `otlp`.
    """

    RUN: ClassVar = "processes.spans:run_spans"
    REQUIRES: ClassVar = ("otlp", "opentelemetry.proto")

    spans: SpansOptions
    kafka: KafkaOptions
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
    embedding_cache_size: Annotated[
        str | None,
        Option(help="Maximum size of cached embeddings of images, such as 500MB. Role encode only. Default: 1GB."),
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
