"""Explain requests and derive the status of a group in one child process, which is started at the first request.

Re-deriving decisions takes a second or more of CPU time. The child process opens the log itself. The ingress kills it
if it exceeds the time limit or when the ingress stops. It exits on its own if the ingress process has died.
"""

import asyncio

import msgspec

from forebay.ingress.child_process import ChildProcess
from forebay.ingress.errors import ApiError
from forebay.ingress.explain_worker import (
    AnyRequest,
    ExplainRequest,
    ExplainResponse,
    LogSource,
    StatusRequest,
)
from forebay.replay.status import GroupStatus

LIMIT_S = 30.0  # about ten thousand decisions after a snapshot; `forebay replay explain` has no limit
CHILD = "forebay.ingress.explain_worker"
CALLERS_MAX = 8  # concurrent requests, including the one being explained


class Explainer:
    """Reads one log in a child process: explains the routing of requests, and derives the status of its group.

    The explainer starts the process, and passes requests to it one at a time.

    Args:
        source: location of the log; None for a log in memory, which cannot be explained.
        limit_s: maximum seconds to explain one request.
    """

    def __init__(self, source: LogSource | None, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._child = None if source is None else ChildProcess(CHILD, msgspec.json.encode(source))
        self._lock = asyncio.Lock()
        self._callers = 0
        self._closed = False

    async def explain(self, request_id: str, partition: int) -> bytes:
        """Return the explanation of a request, as JSON of `forebay.replay.explain.explanation`.

        Args:
            request_id: id of the request to explain.
            partition: partition of the control topics of its group.

        Raises:
            ApiError: 501 for a log in memory, 503 if too many requests wait, 404 for an unknown request, 504 if the
                time limit is exceeded, or an error of the child process.
        """
        return await self._request(ExplainRequest(request_id, partition))

    async def status(self, group: str, partition: int) -> GroupStatus:
        """Return the status of a group, derived from the log.

        Args:
            group: name of the group.
            partition: partition of its control topics.

        Raises:
            ApiError: as `explain`, but never 404.
        """
        return msgspec.json.decode(await self._request(StatusRequest(group, partition)), type=GroupStatus)

    async def _request(self, request: AnyRequest) -> bytes:
        if self._child is None:
            text = "the log is in memory and cannot be explained; start the server with --log FILE"
            raise ApiError(501, "not_recorded", text)
        if self._callers >= CALLERS_MAX:
            raise ApiError(503, "explain_busy", f"{CALLERS_MAX} requests are already being explained; try again later")
        self._callers += 1
        try:
            response = await self._run(self._child, request)
        finally:
            self._callers -= 1
        if response.content is msgspec.UNSET:
            raise ApiError(response.status, response.code, response.message)
        return bytes(response.content)

    async def close(self) -> None:
        """Kill the child process. Later calls of `explain` start no other process."""
        self._closed = True
        if self._child is not None:
            await self._child.kill()

    async def _run(self, child: ChildProcess, request: AnyRequest) -> ExplainResponse:
        is_sent = False
        try:
            async with asyncio.timeout(self._limit_s), self._lock:
                if self._closed:
                    raise EOFError
                is_sent = True
                return msgspec.json.decode(await child.exchange(msgspec.json.encode(request)), type=ExplainResponse)
        except TimeoutError as error:
            if not is_sent:
                raise ApiError(503, "explain_busy", "other requests are being explained; try again later") from error
            text = f"the answer took longer than {self._limit_s:g} s; `forebay replay explain` and `forebay status`"
            text += " have no time limit if they read the log themselves"
            raise ApiError(504, "explain_timeout", text) from error
        except (OSError, EOFError) as error:
            raise ApiError(
                503, "explain_failed", "the process that explains requests ended; see the server's log for the reason"
            ) from error
