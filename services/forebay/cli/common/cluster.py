"""Connections, signal handling and metrics of the commands that run a distributed system."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis
import uvloop
from prometheus_client import CollectorRegistry
from redis.backoff import NoBackoff
from redis.retry import Retry

from forebay.cli.common.cluster_options import Cluster
from forebay.cli.common.errors import cause_of, explained, fail
from forebay.cli.common.metrics_server import Probe, metrics_served
from forebay.cli.common.shutdown import CLOSE_S, SIGNALS, STOP_S, end_within, ending_within, on_second_signal
from forebay.cli.common.sources import without_passwords
from forebay.transport.base import LeaseError, LogError
from forebay.transport.kafka.log import FLUSH_S, KafkaLog, KafkaMetrics
from forebay.transport.redis.leases import LeaseKind, RedisLeases
from forebay.workers.engine import EngineError
from forebay.workers.runtime.worker import WorkerReplaced

REDIS_TIMEOUT_S = 0.5  # a renewal that hangs is retried long before the lease expires


def leases_at(url: str, namespace: str, kind: LeaseKind = "worker") -> RedisLeases:
    """Return a client for the leases of a namespace in Redis. It connects later. An invalid URL ends the command."""
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),
        )
    except ValueError as error:
        fail(f"--redis {without_passwords(url)}: {error}")
    return RedisLeases(client, namespace, kind)


def run_service(main: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine of a service until it ends. An error ends the process with a one-line message."""
    with explained(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(main)
        except LeaseError as error:
            fail(str(error))
        except BaseExceptionGroup as error:
            cause = cause_of(error)
            if isinstance(cause, LeaseError):
                fail(str(cause))
            raise (EngineError(str(cause)) if isinstance(cause, WorkerReplaced) else cause) from None


@asynccontextmanager
async def connected(
    cluster: Cluster, registry: CollectorRegistry, probes: Mapping[str, Probe] | None = None
) -> AsyncIterator[KafkaLog]:
    """Open the log of a service, and serve its metrics and probes while the body runs.

    Raises LogError if the log cannot be opened, or if it failed while the body ran; the failure cancels the body.
    """
    log = await KafkaLog.open(cluster.kafka)
    whole = asyncio.current_task()
    assert whole is not None

    def end(_: LogError) -> None:
        whole.cancel()

    log.on_failure = end
    try:
        KafkaMetrics(log, registry)
        with metrics_served(cluster.metrics_host, cluster.metrics_port, registry, probes):
            yield log
    except asyncio.CancelledError:
        if log.failure is None:
            raise
        raise log.failure from None
    finally:
        log.on_failure = None
        with ending_within(FLUSH_S + CLOSE_S, "the service ended, because the broker does not respond"):
            await log.close()


async def until_signal(
    *parts: Awaitable[None], stop: Callable[[], Awaitable[None]] | None = None, stop_s: float = STOP_S
) -> None:
    """Run tasks until SIGINT or SIGTERM, or until a task ends. If a task fails, raise its error.

    The first signal calls `stop`, to stop the service in order, and cancels the tasks after `stop_s`; without `stop`,
    at once. The process ends within `stop_s + CLOSE_S` seconds, after a second signal within `AT_ONCE_S`, even if a
    task hangs.
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
        on_second_signal(lambda: loop.call_soon_threadsafe(signalled.set))
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
        if task.done():
            task.result()
