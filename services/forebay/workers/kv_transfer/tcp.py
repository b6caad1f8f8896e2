"""Blocks by plain sockets, for where NIXL is not to be used: the same leases, generations and checksums.

Theory of operation. A reader has one connection a fetch. It names a generation, which only the descriptor told it, a
verb and block numbers; the holder answers with their bytes, and with the generation word as it is after the last byte
was handed to the kernel: bytes of a lease that ended meanwhile end with another word. Whoever leaves closes the
connection, and nobody writes to its slots any more.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from forebay.events.base import pack_u32
from forebay.workers.kv_transfer.descriptor import Place
from forebay.workers.kv_transfer.memory import Arena
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.kv_transfer.offers import Held, Offers

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Numbers
    from forebay.workers.kv_transfer.descriptor import Slots

LOG = logging.getLogger(__name__)

CONNECTIONS_MAX = 64  # of readers at once; more are turned away, and try elsewhere
PATIENCE_S = 30.0  # for a reader to ask, or to take what it asked for
ACCEPT_PAUSE_S = 1.0
TELL_S = 5.0
TELLS_MAX = 256  # under way; more are left to the lease
_ASK = struct.Struct("<QBI")  # generation, verb, how many block numbers follow as u32
_WORD = struct.Struct("<Q")
_READ, _FETCHED, _DROPPED = 1, 2, 3
_MIB = 1 << 20


class TcpCarrier:
    """See `Carrier`."""

    def __init__(self, arena: Arena, offers: Offers, host: str) -> None:
        self.route = b""
        self._arena = arena
        self._offers = offers
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._serving = 0
        self._telling = 0

    async def start(self) -> None:
        """Listen on a port of the kernel's choice."""
        found = await self._loop.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        self._listener = socket.socket(family, kind, protocol)
        try:
            self._listener.setblocking(False)
            self._listener.bind(address)
            self._listener.listen(CONNECTIONS_MAX)
        except OSError:
            self._listener.close()
            raise
        self.route = f"{self._host}:{self._listener.getsockname()[1]}".encode()
        LOG.info("KV is fetched at %s", self.route.decode())
        self._loop.add_reader(self._listener, self._accept, self._listener)

    async def read(self, place: Place, theirs: "Slots", into: "Numbers", *, tell: bool) -> None:
        """Ask for blocks, and look at the word behind them."""
        rows = [self._arena.view(block).data for block in into.tolist()]
        with _told(place):
            async with self._connected(place) as connection:
                numbers = pack_u32(theirs.tolist())
                await self._loop.sock_sendall(connection, _ASK.pack(place.generation, _READ, len(theirs)) + numbers)
                (size,) = _WORD.unpack(await self._receive(connection, _WORD.size))
                if size != len(theirs) * self._arena.block_bytes:
                    raise TransferError(f"{place.agent} holds these blocks no longer", "expired")
                for row in rows:
                    await self._receive_into(connection, row)
                (word,) = _WORD.unpack(await self._receive(connection, _WORD.size))
                if word != place.generation:
                    raise TransferError(f"{place.agent} holds these blocks no longer", "expired")
                if tell:
                    await self._loop.sock_sendall(connection, _ASK.pack(place.generation, _FETCHED, 0))

    def tell(self, place: Place, *, fetched: bool) -> None:
        """By a connection of its own."""
        if self._telling < TELLS_MAX:
            _ = self._spawn(self._tell(place, _FETCHED if fetched else _DROPPED))

    def unanswered(self, place: Place) -> None:
        """Nothing is owed: the connection was closed."""

    def holding(self, offers: int) -> None:
        """Whoever comes is heard anyway."""

    async def close(self) -> None:
        """Listen no more and hang up."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    async def _tell(self, place: Place, verb: int) -> None:
        self._telling += 1
        try:
            async with asyncio.timeout(TELL_S), self._connected(place) as connection:
                await self._loop.sock_sendall(connection, _ASK.pack(place.generation, verb, 0))
        except (OSError, TimeoutError, ValueError) as error:
            LOG.info("%s is left to its lease: %s", place.agent, error)
        finally:
            self._telling -= 1

    @asynccontextmanager
    async def _connected(self, place: Place) -> AsyncIterator[socket.socket]:
        host, _, port = place.route.decode().rpartition(":")
        found = await self._loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as connection:
            connection.setblocking(False)
            await self._loop.sock_connect(connection, address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield connection

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            LOG.warning("no reader can connect: %s", error)
            self._loop.remove_reader(listener)  # out of file descriptors, most likely: trying at once would spin
            self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self._loop.add_reader, listener, self._accept, listener)
            return
        if self._serving >= CONNECTIONS_MAX:
            connection.close()
            return
        self._serving += 1
        self._spawn(self._serve(connection)).add_done_callback(lambda _: self._served(connection))

    def _served(self, connection: socket.socket) -> None:
        self._serving -= 1
        connection.close()  # here, as a task that is cancelled before it begins does nothing

    async def _serve(self, connection: socket.socket) -> None:
        """What one reader asks, until it leaves."""
        with contextlib.suppress(OSError, TimeoutError):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while await self._answer(connection):
                pass

    async def _answer(self, connection: socket.socket) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            asked = await self._receive(connection, _ASK.size)
        generation, verb, count = _ASK.unpack(asked)
        if verb != _READ:
            self._offers.end(generation, "fetched" if verb == _FETCHED else "released")
            return verb in (_FETCHED, _DROPPED)
        held = self._offers.held(generation)
        if held is None or not 0 < count <= len(held.slots):
            await self._loop.sock_sendall(connection, _WORD.pack(0))
            return False
        async with asyncio.timeout(PATIENCE_S):
            numbers = await self._receive(connection, 4 * count)
        return await self._send(connection, held, numbers)

    async def _send(self, connection: socket.socket, held: Held, numbers: bytes) -> bool:
        import numpy  # noqa: PLC0415 - an extra

        slots = numpy.frombuffer(numbers, dtype="<u4")
        if not numpy.isin(slots, held.slots).all():  # others of this worker's blocks are not for this reader
            await self._loop.sock_sendall(connection, _WORD.pack(0))
            return False
        await self._loop.sock_sendall(connection, _WORD.pack(len(slots) * self._arena.block_bytes))
        for slot in slots.tolist():
            row = self._arena.row(slot).data
            for start in range(0, len(row), _MIB):
                async with asyncio.timeout(PATIENCE_S):
                    await self._loop.sock_sendall(connection, row[start : start + _MIB])
        await self._loop.sock_sendall(connection, _WORD.pack(int(self._arena.words[held.word])))
        return True

    async def _receive(self, connection: socket.socket, size: int) -> bytes:
        buffer = bytearray(size)
        await self._receive_into(connection, memoryview(buffer))
        return bytes(buffer)

    async def _receive_into(self, connection: socket.socket, into: memoryview) -> None:
        while into:
            got = await self._loop.sock_recv_into(connection, into)
            if not got:
                raise ConnectionResetError("the other side left")
            into = into[got:]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@contextlib.contextmanager
def _told(place: Place) -> Iterator[None]:
    """What sockets raise, told as ours."""
    try:
        yield
    except OSError as error:
        raise TransferError(f"{place.agent} could not be read from: {error}", "gone") from error
    except ValueError as error:
        raise TransferError(f"the way to {place.agent} is none: {error}", "refused") from error
