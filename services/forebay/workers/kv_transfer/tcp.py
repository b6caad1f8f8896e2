"""Transfer of blocks by plain sockets, without NIXL. Leases, generation words and checksums are as with NIXL.

Theory of operation. A reader opens one connection per fetch. It sends a generation, which it knows only from the
descriptor, a command and block numbers. The holder replies with the bytes of the blocks. When it has passed the last
byte to the kernel, it also sends the generation word. If the lease has ended before that, the word differs. After the
connection is closed, nothing writes to the reader's slots.
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
from forebay.workers.kv_transfer.descriptor import BlockLocation
from forebay.workers.kv_transfer.memory import Arena
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.kv_transfer.offers import HeldOffer, KvOffers

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Numbers
    from forebay.workers.kv_transfer.descriptor import Slots

LOG = logging.getLogger(__name__)

CONNECTIONS_MAX = 64  # concurrent readers; further ones are rejected, and their requests run elsewhere
PATIENCE_S = 30.0  # time for a reader to send its request, or to receive the reply
ACCEPT_PAUSE_S = 1.0
NOTIFY_S = 5.0
NOTIFICATIONS_MAX = 256  # notifications in flight; for further ones the lease ends the offer
_HEADER = struct.Struct("<QBI")  # generation, command, number of u32 block numbers that follow
_WORD = struct.Struct("<Q")
_READ, _FETCHED, _DROPPED = 1, 2, 3
_MIB = 1 << 20


class TcpCarrier:
    """Implementation of `Carrier` with plain TCP sockets.

    Args:
        arena: memory of this worker's blocks.
        offers: offers of this worker, which readers may read.
        host: address to listen on and to advertise.
    """

    def __init__(self, arena: Arena, offers: KvOffers, host: str) -> None:
        self.route = b""
        self._arena = arena
        self._offers = offers
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._serving = 0
        self._notifying = 0

    async def start(self) -> None:
        """Listen on a port that the kernel selects. Raises OSError if the address cannot be used."""
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
        LOG.info("serving KV at %s", self.route.decode())
        self._loop.add_reader(self._listener, self._accept, self._listener)

    async def read(self, place: BlockLocation, theirs: "Slots", into: "Numbers", *, notify: bool) -> None:
        """Request the blocks on a new connection, and check the generation word that the holder sends after them."""
        rows = [self._arena.view(block).data for block in into.tolist()]
        with _as_transfer_errors(place):
            async with self._connected(place) as connection:
                numbers = pack_u32(theirs.tolist())
                await self._loop.sock_sendall(connection, _HEADER.pack(place.generation, _READ, len(theirs)) + numbers)
                (size,) = _WORD.unpack(await self._receive(connection, _WORD.size))
                if size != len(theirs) * self._arena.block_bytes:
                    raise TransferError(f"{place.agent} no longer holds these blocks", "expired")
                for row in rows:
                    await self._receive_into(connection, row)
                (word,) = _WORD.unpack(await self._receive(connection, _WORD.size))
                if word != place.generation:
                    raise TransferError(f"{place.agent} no longer holds these blocks", "expired")
                if notify:
                    await self._loop.sock_sendall(connection, _HEADER.pack(place.generation, _FETCHED, 0))

    def notify(self, place: BlockLocation, *, fetched: bool) -> None:
        """Notify the holder on a separate connection. Above `NOTIFICATIONS_MAX` at a time, send nothing."""
        if self._notifying < NOTIFICATIONS_MAX:
            _ = self._spawn(self._notify(place, _FETCHED if fetched else _DROPPED))

    def unanswered(self, place: BlockLocation) -> None:
        """Do nothing, because the connection of the read was closed."""

    def holding(self, offers: int) -> None:
        """Do nothing, because readers can always connect."""

    async def close(self) -> None:
        """Stop listening and close all connections."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    async def _notify(self, place: BlockLocation, verb: int) -> None:
        self._notifying += 1
        try:
            async with asyncio.timeout(NOTIFY_S), self._connected(place) as connection:
                await self._loop.sock_sendall(connection, _HEADER.pack(place.generation, verb, 0))
        except (OSError, TimeoutError, ValueError) as error:
            LOG.info("cannot notify %s, which keeps the KV until its lease ends: %s", place.agent, error)
        finally:
            self._notifying -= 1

    @asynccontextmanager
    async def _connected(self, place: BlockLocation) -> AsyncIterator[socket.socket]:
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
            LOG.warning("cannot accept a connection for KV, will retry: %s", error)
            self._loop.remove_reader(listener)  # most likely out of file descriptors: an immediate retry would spin
            self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self._loop.add_reader, listener, self._accept, listener)
            return
        if self._serving >= CONNECTIONS_MAX:
            connection.close()
            return
        self._serving += 1
        self._spawn(self._serve(connection)).add_done_callback(lambda _: self._served(connection))

    def _served(self, connection: socket.socket) -> None:
        self._serving -= 1
        connection.close()  # here, because a task that is cancelled before it starts runs none of its code

    async def _serve(self, connection: socket.socket) -> None:
        """Serve the requests of one reader until it disconnects."""
        with contextlib.suppress(OSError, TimeoutError):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while await self._reply(connection):
                pass

    async def _reply(self, connection: socket.socket) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            request = await self._receive(connection, _HEADER.size)
        generation, verb, count = _HEADER.unpack(request)
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

    async def _send(self, connection: socket.socket, held: HeldOffer, numbers: bytes) -> bool:
        import numpy  # noqa: PLC0415 - an extra

        slots = numpy.frombuffer(numbers, dtype="<u4")
        if not numpy.isin(slots, held.slots).all():  # readers may not read other blocks of this worker
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
                raise ConnectionResetError("the other side disconnected")
            into = into[got:]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@contextlib.contextmanager
def _as_transfer_errors(place: BlockLocation) -> Iterator[None]:
    """Convert socket exceptions to TransferError."""
    try:
        yield
    except OSError as error:
        raise TransferError(f"cannot read from {place.agent}: {error}", "gone") from error
    except ValueError as error:
        raise TransferError(f"{place.agent} has an invalid address: {error}", "refused") from error
