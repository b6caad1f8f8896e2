"""Explain requests and derive the status of a group in one child process, which is started at the first request.

Re-deriving decisions takes a second or more of CPU time. The child process opens the log itself. The ingress kills it
if it exceeds the time limit or when the ingress stops. It exits on its own if the ingress process has died.
"""

import msgspec

from forebay.ingress.child_process import ChildProcess, SharedChild
from forebay.ingress.errors import ApiError
from forebay.ingress.explain_worker import AnyRequest, ExplainRequest, LogSource, StatusRequest
from forebay.replay.status import GroupStatus

LIMIT_S = 30.0  # about ten thousand decisions after a snapshot; `forebay explain` has no limit
CHILD = "forebay.ingress.explain_worker"
HINT = "`forebay explain` and `forebay status` have no time limit if they read the log themselves"


class Explainer:
    """Reads one log in a child process: explains the routing of requests, and derives the status of its group.

    The explainer starts the process, and passes requests to it one at a time.

    Args:
        source: location of the log; None for a log in memory, which cannot be explained.
    """

    def __init__(self, source: LogSource | None, limit_s: float = LIMIT_S) -> None:
        self._child: SharedChild | None = None
        if source is not None:
            child = ChildProcess(CHILD, msgspec.json.encode(source))
            work = "requests are being explained"
            self._child = SharedChild(child, limit_s=limit_s, work=work, code="explain", hint=HINT)

    async def explain(self, request_id: str, partition: int) -> bytes:
        """Return the explanation of a request, as JSON of `forebay.replay.explain.explanation`.

        Raises ApiError: 501 for a log in memory, 503 if too many requests wait, 404 for an unknown request, 504 if the
        time limit is exceeded, or an error of the child process.
        """
        return await self._request(ExplainRequest(request_id, partition))

    async def status(self, group: str, partition: int) -> GroupStatus:
        """Return the status of a group, derived from the log. Raises ApiError as `explain`, but never 404."""
        return msgspec.json.decode(await self._request(StatusRequest(group, partition)), type=GroupStatus)

    async def _request(self, request: AnyRequest) -> bytes:
        if self._child is None:
            text = "the log is in memory and cannot be explained; start the server with --log FILE"
            raise ApiError(501, "not_recorded", text)
        return await self._child.request(request)

    async def close(self) -> None:
        """Kill the child process. Later calls of `explain` start no other process."""
        if self._child is not None:
            await self._child.close()
