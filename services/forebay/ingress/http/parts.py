"""Run a client's request that is several requests on the log: its choices, or the inputs of an embedding request."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from forebay.ingress.errors import ApiError
from forebay.ingress.ingress import Ingress
from forebay.ingress.prepare import PreparedRequest
from forebay.ingress.response_fold import ResponseFold, was_rejected
from forebay.ingress.streams import Stream, interruption

PARTS_IN_FLIGHT_MAX = 64  # per client request, so that other requests are interleaved
DISCONNECTED = "client disconnected"

# Gets the stream of a part, and the JSON objects that its step returned. The part's output waits in its stream until
# this returns.
OnStep = Callable[[Stream, list[bytes]], Awaitable[None]]


class PartRunner:
    """Submits the parts of one client request, and folds their output into one response. If a part fails, all end.

    Args:
        parts: the parts, in the order of `ids`.

    Attributes:
        interrupt_reason: reason with which parts in flight are cancelled if `run` is cancelled.
    """

    def __init__(
        self, ingress: Ingress, fold: ResponseFold, ids: Sequence[str], parts: Sequence[PreparedRequest]
    ) -> None:
        self.interrupt_reason = DISCONNECTED
        self._ingress = ingress
        self._fold = fold
        self._ids = ids
        self._parts = parts
        self._capacity = asyncio.Semaphore(PARTS_IN_FLIGHT_MAX)

    async def run(self, on_step: OnStep) -> None:
        """Run all parts until the response is complete. If cancelled, cancel the parts in flight.

        Args:
            on_step: called after each step of the fold.

        Raises:
            ApiError: a part failed or was interrupted.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._parts)):
                    group.create_task(self._run_part(index, on_step))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run_part(self, index: int, on_step: OnStep) -> None:
        async with self._capacity:
            try:
                stream = await self._ingress.submit(self._ids[index], self._parts[index])
                await self._follow(stream, index, on_step)
            except ApiError as error:
                if self._fold.error is None:
                    self._fold.fail(error)
                raise

    async def _follow(self, stream: Stream, index: int, on_step: OnStep) -> None:
        """Fold the output of a submitted part until it is complete."""
        ingress, fold, request_id = self._ingress, self._fold, self._ids[index]
        try:
            while fold.error is None and not fold.is_part_over(index):
                await stream.ready()
                has_ended = stream.ended is not None  # perhaps before its append was acknowledged
                await on_step(stream, fold.step(stream, index))
                if has_ended:
                    break
                if stream.interrupt_reason is not None:
                    self.interrupt_reason = stream.interrupt_reason
                    raise interruption(stream.interrupt_reason)
            if was_rejected(stream):
                ingress.metrics.rejected(fold.endpoint)
            if fold.error is not None:
                raise ingress.observe(fold.error)
        finally:
            ingress.replies.close(request_id)
            if stream.ended is None:
                stopped = "stop" if fold.is_part_over(index) else ""
                ingress.cancel(request_id, stopped or fold.cancel_reason or self.interrupt_reason)
