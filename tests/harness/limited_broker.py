"""A proxy that makes Apache Kafka offer only the versions of requests that Redpanda offers.

Only the versions are those of Redpanda, not its behavior.
"""

import asyncio
import contextlib
import queue
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from infra.kafka.kafka import HOST, Broker, BrokerError, start, stop
from tests.harness.local import Missing, free_ports

PRODUCE, FETCH, LIST_OFFSETS, API_VERSIONS = 0, 1, 2, 18
# By key of the request: the versions in the source code of Redpanda 25.1, except Fetch, which is that of 26.1.
REDPANDA: Mapping[int, tuple[int, int]] = {
    PRODUCE: (0, 7), FETCH: (4, 13), LIST_OFFSETS: (0, 4), 3: (0, 8), 8: (1, 8), 9: (1, 7), 10: (0, 3), 11: (0, 6),
    12: (0, 4), 13: (0, 4), 14: (0, 4), 15: (0, 5), 16: (0, 4), 17: (0, 1), API_VERSIONS: (0, 3), 19: (0, 6),
    20: (0, 5), 21: (0, 2), 22: (0, 3), 23: (0, 4), 24: (0, 3), 25: (0, 1), 26: (0, 3), 28: (0, 3), 29: (0, 2),
    30: (0, 2), 31: (0, 2), 32: (0, 4), 33: (0, 2), 35: (0, 2), 36: (0, 2), 37: (0, 3), 42: (0, 2), 44: (0, 1),
    45: (0, 0), 46: (0, 0), 47: (0, 0), 48: (0, 1), 49: (0, 1), 61: (0, 0), 65: (0, 0), 66: (0, 0),
}  # fmt: skip
FLEXIBLE_SINCE = 3  # version of ApiVersions with lengths of variable size
UNSUPPORTED_VERSION = 35
STARTED_WITHIN_S = 30.0
_SIZE, _HEADER, _SPAN = struct.Struct(">i"), struct.Struct(">hhi"), struct.Struct(">hhh")


class LimitedBroker:
    """Forwards connections to a broker, and counts the requests by key and version.

    A request in a version that is not offered closes the connection, and is counted in `rejected`.
    """

    def __init__(self, port: int, broker_port: int) -> None:
        self.address = f"{HOST}:{port}"
        self.seen: Counter[tuple[int, int]] = Counter()
        self.rejected: Counter[tuple[int, int]] = Counter()
        self._port, self._broker_port = port, broker_port

    def versions(self, key: int) -> set[int]:
        """Return the versions in which a request was forwarded."""
        return {version for known, version in self.seen if known == key}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serve in a thread, so that a test may block."""
        loops: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

        async def serve() -> None:
            stopped = asyncio.Event()
            server = await asyncio.start_server(self._serve, HOST, self._port)
            loops.put((asyncio.get_running_loop(), stopped))
            await stopped.wait()
            server.close()

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        loop, stopped = loops.get(timeout=STARTED_WITHIN_S)
        try:
            yield
        finally:
            loop.call_soon_threadsafe(stopped.set)
            thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            upstream_reader, upstream = await asyncio.open_connection(HOST, self._broker_port)
            asked: dict[int, int] = {}  # versions of requests for the offered versions, by correlation id
            responding = asyncio.create_task(_respond(upstream_reader, writer, asked))
            try:
                await self._forward(reader, upstream, writer, asked)
            finally:
                responding.cancel()
                upstream.close()
        writer.close()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
        asked: dict[int, int],
    ) -> None:
        while True:
            content = await _frame(reader)
            key, version, correlation_id = _HEADER.unpack_from(content)
            lowest, highest = REDPANDA.get(key, (0, -1))
            is_offered = lowest <= version <= highest
            (self.seen if is_offered else self.rejected)[key, version] += 1
            if not is_offered and key != API_VERSIONS:
                return
            if not is_offered:  # the client asks again, in a version of the response
                spans = _SPAN.pack(API_VERSIONS, *REDPANDA[API_VERSIONS])
                writer.write(_framed(struct.pack(">ihi", correlation_id, UNSUPPORTED_VERSION, 1) + spans))
                continue
            if key == API_VERSIONS:
                asked[correlation_id] = version
            upstream.write(_framed(content))
            await upstream.drain()


async def _respond(upstream: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: dict[int, int]) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            content = await _frame(upstream)
            version = asked.pop(_SIZE.unpack_from(content)[0], None)
            writer.write(_framed(content if version is None else limited(version, content)))
            await writer.drain()
    writer.close()


async def _frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(*_SIZE.unpack(await reader.readexactly(_SIZE.size)))


def _framed(content: bytes) -> bytes:
    return _SIZE.pack(len(content)) + content


def limited(version: int, content: bytes) -> bytes:
    """Return a response to ApiVersions, with its correlation id, that offers only what Redpanda also offers."""
    is_flexible = version >= FLEXIBLE_SINCE
    count, at = _varint(content, 6) if is_flexible else (*_SIZE.unpack_from(content, 6), 10)
    count, tags = (count - 1, b"\0") if is_flexible else (count, b"")
    step = _SPAN.size + len(tags)  # Kafka adds no tagged fields to a span
    spans = []
    for span in range(at, at + count * step, step):
        key, lowest, highest = _SPAN.unpack_from(content, span)
        least, most = REDPANDA.get(key, (0, -1))
        if max(lowest, least) <= min(highest, most):
            spans.append(_SPAN.pack(key, max(lowest, least), min(highest, most)) + tags)
    assert len(spans) < 127, "a longer array has a length of two bytes"
    rest = content[at + count * step :]  # the throttle time, and tagged fields with features of Kafka
    head = bytes([len(spans) + 1]) if is_flexible else _SIZE.pack(len(spans))
    return content[:6] + head + b"".join(spans) + (rest[: _SIZE.size] + tags if is_flexible else rest)


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the unsigned number of variable size at `at`, and the position after it."""
    value = shift = 0
    while content[at] & 0x80:
        value |= (content[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | content[at] << shift, at + 1


@contextlib.contextmanager
def limited_kafka(folder: Path) -> Iterator[LimitedBroker]:
    """Run Apache Kafka in `folder` behind a proxy. Raises Missing."""
    port = free_ports(4)
    own, behind = f"PLAINTEXT://{HOST}:{port}", f"LIMITED://{HOST}:{port + 2}"
    settings = (  # the broker ends transactions over a listener of its own
        f"listeners={own},{behind},CONTROLLER://{HOST}:{port + 1}",
        f"advertised.listeners={own},LIMITED://{HOST}:{port + 3}",
        "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,LIMITED:PLAINTEXT",
    )
    broker = Broker(port, folder, ends_with_starter=True, settings=settings)
    try:
        process = start(broker)
    except BrokerError as error:
        raise Missing(str(error)) from error
    try:
        proxy = LimitedBroker(port + 3, port + 2)
        with proxy.running():
            yield proxy
    finally:
        stop(folder)
        process.wait()
