"""`forebay worker`: one mock engine, as a process of its own."""

import asyncio
import contextlib
import logging
import math
import os
import socket
import uuid
from pathlib import Path
from typing import Annotated

import typer
from prometheus_client import CollectorRegistry

from forebay.cli.cluster import (
    KAFKA,
    LOOPBACK,
    NAMESPACE,
    REDIS,
    Cluster,
    KafkaOption,
    MetricsHostOption,
    MetricsPortOption,
    NamespaceOption,
    PropertiesOption,
    RedisOption,
    VerboseOption,
    connected,
    kafka_settings,
    leases_at,
    run_service,
    start_logging,
    until_signal,
)
from forebay.cli.errors import explained, fail
from forebay.cli.part_options import (
    DpSizeOption,
    DpStartRankOption,
    KvEventsOption,
    LorasOption,
    TaintsOption,
    names,
)
from forebay.core.engine_model import EngineConfig
from forebay.events.fleet import WorkerSpec
from forebay.ingress.model import DEFAULT_MODEL, Model, model_name_of, speaking_vocabulary
from forebay.transport.base import LeaseError, Leases
from forebay.transport.directory import Directory
from forebay.transport.kafka_topics import TopicPlan, count_topics, create_topics
from forebay.workers.lease_keeper import LeaseKeeper
from forebay.workers.metrics import WorkerMetrics
from forebay.workers.mock_engine import MockEngine
from forebay.workers.worker import Worker

logger = logging.getLogger(__name__)

ASK_TTL_MS = 6_000


def worker(
    kafka: KafkaOption = KAFKA,
    redis: RedisOption = REDIS,
    namespace: NamespaceOption = NAMESPACE,
    kafka_config: PropertiesOption = None,
    worker_id: Annotated[str, typer.Option(help="Unique in its group; host and process when empty.")] = "",
    pool: Annotated[str, typer.Option(help="The pool that it joins.")] = "default",
    model: Annotated[Path | None, typer.Option(help="Model directory; the default model when left out.")] = None,
    model_name: Annotated[str, typer.Option(help="Name in the API; the directory's name when empty.")] = "",
    speedup: Annotated[float, typer.Option(help="How much faster than the modelled GPU.")] = 1.0,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a KV block.")] = 64,
    kv_blocks: Annotated[int, typer.Option(min=1, help="KV blocks.")] = 16_384,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one engine step.")] = 8_192,
    dp_size: DpSizeOption = 1,
    dp_start_rank: DpStartRankOption = 0,
    taint: TaintsOption = None,
    lora: LorasOption = None,
    kv_events: KvEventsOption = True,
    lease_ttl_s: Annotated[float, typer.Option(min=0.1, help="Silent for this long, it is lost.")] = 30.0,
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = LOOPBACK,
    verbose: VerboseOption = False,
) -> None:
    """Run one mock worker of a distributed system."""
    start_logging(verbose=verbose)
    if not math.isfinite(speedup) or speedup <= 0:
        fail(f"--speedup must be a positive number, not {speedup}")
    with explained():
        loaded = Model(model or DEFAULT_MODEL)
        settings = kafka_settings(kafka, namespace, kafka_config)
        taints, loras = names("--taint", taint), names("--lora", lora)
    config = EngineConfig(
        block_size=block_size,
        kv_blocks_total=kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        vocabulary=speaking_vocabulary(loaded.tokenizer),
    )
    spec = WorkerSpec(
        worker_id=worker_id or f"{socket.gethostname()}-{os.getpid()}",
        model=model_name_of(model, model_name),
        pool=pool,
        block_size=block_size,
        kv_blocks_total=kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        dp_size=dp_size,
        dp_start_rank=dp_start_rank,
        taints=taints,
        loras=loras,
        kv_events=kv_events,
    )
    engine = MockEngine(config, dp_size=dp_size, dp_start_rank=dp_start_rank, speedup=speedup)
    run_service(_run(Cluster(settings, redis, metrics_host, metrics_port), spec, engine, lease_ttl_s))


async def _run(cluster: Cluster, spec: WorkerSpec, engine: MockEngine, lease_ttl_s: float) -> None:
    registry = CollectorRegistry()
    counts = await count_topics(cluster.kafka)
    if spec.pool not in counts.pools:
        await create_topics(cluster.kafka, TopicPlan(slots=max(counts.pools.values())), [spec.pool])
    leases = leases_at(cluster.redis_url, cluster.kafka.namespace)
    async with connected(cluster, registry) as log:
        directory = Directory(log)
        await directory.start()
        typer.echo(f"forebay: worker {spec.worker_id} asks to join {spec.model}, pool {spec.pool}")
        partition = await _placed(directory, leases, spec.model)
        directory.close()
        keeper = LeaseKeeper(leases, ttl_s=lease_ttl_s)
        keeper.start()
        token = uuid.uuid4().hex
        worker = Worker(log, keeper, spec, engine, token=token, group=spec.model, partition=partition)
        registry.register(WorkerMetrics(worker))
        try:
            await until_signal(worker.run())
        finally:
            await keeper.stop()


async def _placed(directory: Directory, leases: Leases, group: str) -> int:
    """The partition of the group, asked for until a router has given it one."""
    asked = True
    while (partition := directory.partition_of(group)) is None:
        try:
            await asyncio.to_thread(leases.ask, group, ASK_TTL_MS)
        except LeaseError as error:
            if asked:
                logger.warning("the group %s cannot be asked for, trying again: %s", group, error)
            asked = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_TTL_MS / 3000):
                await directory.placed(group)
    return partition
