"""Several callers share one child process, which answers one message at a time, within limits."""

import asyncio

import msgspec

from forebay.ingress.child_process import ChildProcess
from forebay.ingress.errors import ApiError

CALLERS_MAX = 8  # concurrent callers, including the one whose message is being answered


class ChildResponse(msgspec.Struct, frozen=True):
    """Message from the child process: a result, or an error for the client.

    Attributes:
        content: the result as JSON; unset for an error.
        code: error code; empty if there is content.
        message: error message; empty if there is content.
    """

    content: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    status: int = 200
    code: str = ""
    message: str = ""


class SharedChild:
    """Passes messages to a child process, one at a time.

    Args:
        child: the process, which answers each message with a `ChildResponse`.
        limit_s: maximum seconds from the call to the answer. After that the process is killed.
        work: what the process does, in the plural, for messages: "requests are being explained".
        code: prefix of error codes.
        hint: sentence that follows the message about an exceeded time limit.
    """

    def __init__(self, child: ChildProcess, *, limit_s: float, work: str, code: str, hint: str) -> None:
        self._child = child
        self._limit_s = limit_s
        self._work = work
        self._code = code
        self._hint = hint
        self._lock = asyncio.Lock()
        self._callers = 0

    async def request(self, message: msgspec.Struct) -> bytes:
        """Return the result for a message as JSON.

        Raises:
            ApiError: 503 if too many callers wait or the process ends, 504 if the time limit is exceeded, or an error
                of the child process.
        """
        if self._callers >= CALLERS_MAX:
            raise ApiError(503, f"{self._code}_busy", f"{CALLERS_MAX} {self._work} already; try again later")
        self._callers += 1
        try:
            response = await self._run(msgspec.json.encode(message))
        finally:
            self._callers -= 1
        if response.content is msgspec.UNSET:
            raise ApiError(response.status, response.code, response.message)
        return bytes(response.content)

    async def close(self) -> None:
        """Kill the child process. Later messages start no other process."""
        await self._child.close()

    async def _run(self, message: bytes) -> ChildResponse:
        is_sent = False
        try:
            async with asyncio.timeout(self._limit_s), self._lock:
                is_sent = True
                return msgspec.json.decode(await self._child.exchange(message), type=ChildResponse)
        except TimeoutError as error:
            if not is_sent:
                raise ApiError(503, f"{self._code}_busy", f"other {self._work}; try again later") from error
            text = f"the answer took longer than {self._limit_s:g} s; {self._hint}"
            raise ApiError(504, f"{self._code}_timeout", text) from error
        except (OSError, EOFError) as error:
            text = "the process that reads the log ended; see the server's log for the reason"
            raise ApiError(503, f"{self._code}_failed", text) from error
