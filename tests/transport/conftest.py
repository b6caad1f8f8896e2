"""Fixtures and helpers: SQLite logs, and leases on the embedded Redis and on a real one if installed."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import fakeredis
import pytest
import redis

from forebay.transport.base import Draft, Record, Tail
from forebay.transport.redis.leases import RedisLeases
from forebay.transport.sqlite.log import SqliteLog

PATIENCE_S = 20.0
READ_MAX = 100_000
REDIS_SERVER = shutil.which("redis-server")


class Wakes:
    """A wake that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def set(self) -> None:
        self.count += 1


def drafts(count: int, topic: str = "topic", partition: int = 0, first: int = 0) -> list[Draft]:
    """Return `count` drafts whose values are consecutive numbers."""
    return [Draft(topic, partition, str(number).encode()) for number in range(first, first + count)]


def numbers(records: list[Record]) -> list[int]:
    """Return the numbers that `drafts` encoded."""
    return [int(record.value) for record in records]


def stored(log: SqliteLog, topic: str = "topic", partition: int = 0, offset: int = 0) -> list[Record]:
    """Return all records of a partition, from `offset` on."""
    return log.records(topic, partition, offset, READ_MAX)


def drain(tail: Tail, limit: int = READ_MAX) -> list[Record]:
    taken: list[Record] = []
    while len(tail):
        taken += tail.take(limit)
    return taken


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@pytest.fixture(params=["memory", "file"])
def log(request: pytest.FixtureRequest, path: Path) -> Iterator[SqliteLog]:
    """Return an empty log, in memory or in a file."""
    log = SqliteLog.open(None if request.param == "memory" else path)
    yield log
    log.close()


@pytest.fixture(scope="session")
def redis_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start a Redis server for this test run; return its socket."""
    assert REDIS_SERVER is not None
    folder = tmp_path_factory.mktemp("redis")
    socket = folder / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    server = subprocess.Popen([REDIS_SERVER, *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not socket.exists():
            assert server.poll() is None, "redis-server ended"
            assert time.monotonic() < deadline, "redis-server does not listen"
            time.sleep(0.005)
        yield socket
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(params=["fakeredis"] if REDIS_SERVER is None else ["fakeredis", "redis-server"])
def client(request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    """Return a client of an empty Redis, the embedded one or a real one if installed."""
    client: redis.Redis
    if request.param == "fakeredis":
        client = fakeredis.FakeRedis(server=fakeredis.FakeServer())
    else:
        client = redis.Redis(unix_socket_path=str(request.getfixturevalue("redis_socket")))
        client.flushall()
    yield client
    client.close()


@pytest.fixture
def leases(client: redis.Redis) -> RedisLeases:
    return RedisLeases(client, "test")
