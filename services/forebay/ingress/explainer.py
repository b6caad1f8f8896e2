"""Explain requests and derive the status of a group in one child process, which is started at the first request.

Re-deriving decisions takes a second or more of CPU time. The child process opens the log itself.
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
    """Explains requests and derives the status of one log. For a log in memory, `source` is None and calls fail."""

    def __init__(self, source: LogSource | None, limit_s: float = LIMIT_S) -> None:
        self._child: SharedChild | None = None
        if source is not None:
            child = ChildProcess(CHILD, msgspec.json.encode(source))
            work = "requests are being explained"
            self._child = SharedChild(child, limit_s=limit_s, work=work, code="explain", hint=HINT)

    async def explain(self, request_id: str, partition: int | None) -> bytes:
        """Return the explanation of a request of a group, or of any, as JSON of `forebay.replay.explain.explanation`.

        Raises ApiError: 501 for a log in memory, 404 for an unknown request, 409 if an owner with other decision rules
        decided about it, or an error of `SharedChild.request`.
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
        if self._child is not None:
            await self._child.close()
