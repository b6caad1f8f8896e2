"""`forebay worker`."""

from typing import cast

from forebay.cli.common.errors import explained, run_service
from forebay.cli.common.times import size
from forebay.cli.processes.command import WorkerCommand
from forebay.cli.processes.engine_options import EngineOptions
from forebay.cli.processes.engines import SAME_OPTIONS, choose_engine, reached_at, tiered
from forebay.cli.processes.tier_options import TierOptions
from forebay.events.control import Role
from forebay.processes.engines import EngineChoice
from forebay.processes.names import named, names, process_name
from forebay.processes.worker import Upstream, UpstreamSettings, WorkerSettings, run
from forebay.runtime.errors import ConfigError
from forebay.workers.engines.attached.engine import ROLES


def run_worker(options: WorkerCommand) -> None:
    options.logs.start()
    with explained():
        cluster = options.addresses.cluster(options.service.metrics_host, options.service.metrics_port)
        servers = options.upstream.upstreams()
        settings = WorkerSettings(
            cluster=cluster,
            engine=_attached(options, servers) if servers else _own(options),
            worker_id=_worker_id(options.worker_id, len(servers)),
            pool=options.pool and named("--pool", "pool", options.pool),
            taints=names("--taint", options.taint),
            kv_events=options.kv_events,
            lease_ttl_s=options.lease_ttl_s,
            drain_s=options.drain_s,
        )
    run_service(run(settings))


def _worker_id(given: str, servers: int) -> str:
    """Return a valid id. It is empty if each of the `servers` gives its own."""
    if servers and not given:
        return ""
    return named("--id", "worker", given or process_name())


def _own(options: WorkerCommand) -> EngineChoice:
    """Return the engine of this process. Raises ConfigError if an option is invalid."""
    choice = choose_engine(options.engine).with_settings(dp_start_rank=options.dp_start_rank)
    if (text := options.embedding_cache_size) is not None:
        if options.engine.role != "encode":
            raise ConfigError(f"--embedding-cache-size requires --role encode, got {options.engine.role}")
        choice = choice.with_settings(embedding_cache_bytes=size("--embedding-cache-size", text, 0))
    choice = tiered(choice, options.tiers.settings())
    return reached_at(choice, options.kv_host, options.addresses.kafka)


def _attached(options: WorkerCommand, servers: tuple[Upstream, ...]) -> UpstreamSettings:
    """Return the settings of servers. Raises ConfigError if an option has no effect on them."""
    engine = options.engine
    check_options(engine)
    if options.tiers != TierOptions():
        raise ConfigError("options of KV tiers cannot be combined with --upstream: the server has its own tiers")
    for flag, given in (
        ("--kv-host", options.kv_host is not None),
        ("--dp-start-rank", options.dp_start_rank),
        ("--embedding-cache-size", options.embedding_cache_size is not None),
    ):
        if given:
            raise ConfigError(f"{flag} cannot be combined with --upstream")
    return UpstreamSettings(
        servers=servers,
        model=engine.model,
        revision=engine.revision,
        model_name=engine.model_name,
        role=cast(Role, engine.role),  # `check_options` has checked it
        options={name: getattr(engine, name) for name in SAME_OPTIONS},
        api_key=options.upstream.api_key(),
        allow_shared_cache=options.upstream.allow_shared_cache,
    )


def check_options(options: EngineOptions) -> None:
    """Raise ConfigError if an option of an engine is given that has no effect on a server that already runs."""
    default = EngineOptions()
    used = {"model", "revision", "model_name", "role", *SAME_OPTIONS} - {"dp_size"}
    for name in EngineOptions.__dataclass_fields__:
        if name not in used and getattr(options, name) != getattr(default, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} cannot be combined with --upstream: the server has its own engine options")
    if options.role not in ROLES:
        raise ConfigError(f"--role {options.role}: a server that already runs supports {', '.join(ROLES)}")
