"""Connection to a broker for requests that need little CPU time.

aiokafka opens the connection and authenticates. Its reader needs two tasks, two timers and four iterations of the event
loop per response. So the transport is taken over from it, with a protocol that passes each response to the future of
its request. The connection has one timer, however many requests it sends.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import TypeVar

from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import CorrelationIdError, IncompatibleBrokerVersion, KafkaConnectionError, RequestTimedOutError

from forebay.transport.kafka.protocol import VERSIONS, ResponseInvalid, header

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SIZE_AND_ID = Struct(">ii")
_SIZE_BYTES = 4
_IDS = 1 << 31  # correlation ids, which begin again at 0


class BrokerConnection(asyncio.Protocol):
    """Sends requests on the transport of `opened`, which aiokafka has opened and which has no request in flight."""

    def __init__(self, opened: AIOKafkaConnection, timeout_s: float) -> None:
        self.is_open = True
        self._opened = opened
        self._timeout_s = timeout_s
        self._client_id = opened._client_id.encode()
        self._loop = asyncio.get_running_loop()
        self._last_id = 0
        self._pending: deque[tuple[int, float, asyncio.Future[bytes]]] = deque()  # with the time at which they expire
        self._timer: asyncio.TimerHandle | None = None
        self._kept = bytearray()  # the beginning of a response
        self._transport = opened._writer.transport
        self._aiokafkas = self._transport.get_protocol()
        self._transport.set_protocol(self)

    def version_of(self, key: int) -> int:
        """Return the version in which to send a request. Raises IncompatibleBrokerVersion."""
        lowest, highest = self._opened._versions.get(key, (0, -1))
        for version in VERSIONS[key]:
            if lowest <= version <= highest:
                return version
        raise IncompatibleBrokerVersion(
            f"the broker supports the versions {lowest} to {highest} of request {key}, expected one of {VERSIONS[key]}"
        )

    async def request(self, key: int, version: int, body: bytes, decode: Callable[[bytes], T]) -> T:
        """Send a request. Raises KafkaError if no valid response arrived; the broker may have executed the request."""
        if not self.is_open:
            raise KafkaConnectionError("the connection to the broker is closed")
        self._last_id = (self._last_id + 1) % _IDS
        expires_s = self._loop.time() + self._timeout_s
        response: asyncio.Future[bytes] = self._loop.create_future()
        self._pending.append((self._last_id, expires_s, response))
        if self._timer is None:
            self._timer = self._loop.call_at(expires_s, self._expire)
        self._transport.write(header(key, version, self._last_id, self._client_id, len(body)) + body)
        payload = await response
        try:
            return decode(payload)
        except ResponseInvalid as error:
            logger.warning("closing a connection to a broker: %s", error)
            self._close(error, CloseReason.OUT_OF_SYNC)
            raise

    def data_received(self, data: bytes) -> None:
        """Pass complete responses on. Most arrive alone and in one piece."""
        kept = self._kept
        buffer: bytes | bytearray = data
        if kept:
            kept += data
            buffer = kept
        at = 0
        while len(buffer) - at >= _SIZE_AND_ID.size:
            size, correlation_id = _SIZE_AND_ID.unpack_from(buffer, at)
            end = at + _SIZE_BYTES + size
            if len(buffer) < end:
                break
            if not self._respond(correlation_id, bytes(buffer[at + _SIZE_AND_ID.size : end])):
                return
            at = end
        if buffer is kept:
            del kept[:at]
        else:
            kept += buffer[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._aiokafkas.connection_lost(exc)
        self._close(KafkaConnectionError(f"the connection to the broker was lost: {exc or 'the broker closed it'}"))

    def _respond(self, correlation_id: int, payload: bytes) -> bool:
        """Pass a response to its request. Return False if it belongs to none, which closes the connection."""
        if not self._pending or self._pending[0][0] != correlation_id:
            expected = self._pending[0][0] if self._pending else "none"
            text = f"the broker responded to request {correlation_id}, expected {expected}"
            self._close(CorrelationIdError(text), CloseReason.OUT_OF_SYNC)
            return False
        _, _, response = self._pending.popleft()
        if not response.done():  # done if its task was cancelled
            response.set_result(payload)
        return True

    def _expire(self) -> None:
        """Close the connection if its oldest request has expired."""
        self._timer = None
        if not self._pending:
            return
        expires_s = self._pending[0][1]
        if self._loop.time() >= expires_s:
            text = f"the broker did not respond within {self._timeout_s:g} s"
            self._close(RequestTimedOutError(text), CloseReason.CONNECTION_TIMEOUT)
        else:
            self._timer = self._loop.call_at(expires_s, self._expire)

    def _close(self, error: Exception, reason: CloseReason = CloseReason.CONNECTION_BROKEN) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, deque()
        for _, _, response in pending:
            if not response.done():
                response.set_exception(error)
        self._opened.close(reason=reason, exc=error)
