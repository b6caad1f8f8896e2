"""Connections, signal handling and metrics of the processes of a distributed system."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import redis
from prometheus_client import CollectorRegistry
from redis.backoff import NoBackoff
from redis.retry import Retry

from forebay.processes.metrics_server import Probe, metrics_served
from forebay.processes.passwords import without_passwords
from forebay.processes.shutdown import (
    AT_ONCE_S,
    CLOSE_S,
    HURRY_S,
    SIGNALS,
    STOP_S,
    end_within,
    ending_within,
    on_second_signal,
)
from forebay.runtime.errors import cause_of, prefixed
from forebay.transport.base import LogError
from forebay.transport.kafka.log import FLUSH_S, KafkaLog, KafkaMetrics
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import TopicCounts, count_topics
from forebay.transport.redis.leases import LeaseKind, RedisLeases

REDIS_TIMEOUT_S = 0.5  # a renewal that hangs is retried long before the lease expires


@dataclass(frozen=True, slots=True)
class Cluster:
    """Addresses that one process uses: of Kafka, of Redis, and of its own metrics server."""

    kafka: KafkaSettings
    redis_url: str
    metrics_host: str
    metrics_port: int | None


def leases_at(url: str, namespace: str, kind: LeaseKind = "worker") -> RedisLeases:
    """Return a client for the leases of a namespace in Redis, as `redis_at`."""
    return RedisLeases(redis_at(url), namespace, kind)


def redis_at(url: str) -> redis.Redis:
    """Return a client of Redis, which connects later. Raises ConfigError for a bad URL."""
    with prefixed(f"--redis {without_passwords(url)}"):
        return redis.Redis.from_url(
            url,
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),
        )


@asynccontextmanager
async def connected(
    cluster: Cluster, registry: CollectorRegistry, probes: Mapping[str, Probe] | None = None
) -> AsyncIterator[tuple[KafkaLog, TopicCounts]]:
    """Open the log of a service, and serve its metrics and probes while the body runs.

    Raises LogError if a topic is missing, the log cannot be opened, or it failed while the body ran. Such a failure
    cancels the body.
    """
    counts = await count_topics(cluster.kafka)  # a client of Kafka would wait for a missing topic
    log = await KafkaLog.open(cluster.kafka)
    whole = asyncio.current_task()
    assert whole is not None

    def end(_: LogError) -> None:
        whole.cancel()

    log.on_failure = end
    try:
        KafkaMetrics(log, registry)
        with metrics_served(cluster.metrics_host, cluster.metrics_port, registry, probes):
            yield log, counts
    except asyncio.CancelledError:
        if log.failure is None:
            raise
        raise log.failure from None
    finally:
        log.on_failure = None
        with ending_within(FLUSH_S + CLOSE_S, "the service ended, because the broker does not respond"):
            await log.close()


async def until_signal(
    *parts: Awaitable[None],
    stop: Callable[[], Awaitable[None]] | None = None,
    stop_s: float = STOP_S,
    hurry: Callable[[], object] | None = None,
) -> None:
    """Run tasks until SIGINT or SIGTERM, or until a task ends. If a task fails, raise its error, the first of a group.

    The first signal calls `stop`, to stop the service in order, and cancels the tasks after `stop_s`; without `stop`,
    at once. A second signal cancels the tasks, or calls `hurry`, so that they end sooner. The process ends within
    `stop_s + CLOSE_S` seconds, after a second signal within `AT_ONCE_S` or `HURRY_S`, even if a task hangs.
    """
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, signalled.set)
    tasks = [asyncio.ensure_future(part) for part in parts]
    waiting = asyncio.create_task(signalled.wait())
    try:
        await _first(tasks, waiting, None)
        is_signal = signalled.is_set()
        signalled.clear()
        # Replaces the handlers of the loop. Without any handler, a signal would end the process at this moment.
        second, within_s = (signalled.set, AT_ONCE_S) if hurry is None else (hurry, HURRY_S)
        on_second_signal(lambda: loop.call_soon_threadsafe(second), within_s)
        if is_signal:
            end_within((0.0 if stop is None else stop_s) + CLOSE_S, "a signal")
        if stop is not None:
            if waiting.done():
                waiting = asyncio.create_task(signalled.wait())
            await stop()
            await _first(tasks, waiting, stop_s)
    finally:
        waiting.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(waiting, *tasks, return_exceptions=True)


async def _first(tasks: "Sequence[asyncio.Future[None]]", waiting: "asyncio.Task[Any]", within_s: float | None) -> None:
    """Wait for a signal or for the end of one task. Raises the error of that task."""
    await asyncio.wait([*tasks, waiting], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise cause_of(error)
