"""Send the vectors of one embedding request to an HTTP client."""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay import runtime
from forebay.ingress.errors import ApiError, deadline_exceeded
from forebay.ingress.http.response import DISCONNECTED, TIMED_OUT, wait_for_disconnect
from forebay.ingress.ingress import GRACE_S, Ingress
from forebay.ingress.openai.embeddings import part_id
from forebay.ingress.prepare import PreparedRequest
from forebay.ingress.response_fold import EmbeddingFold, was_rejected
from forebay.ingress.streams import interruption

INPUTS_IN_FLIGHT_MAX = 64  # per client request, so that other requests are interleaved


class EmbeddingResponse(Response):
    """ASGI response with a list of vectors.

    Args:
        ingress: the ingress.
        fold: the response, still empty.
        inputs: one prepared request per input, in order.
    """

    def __init__(self, ingress: Ingress, fold: EmbeddingFold, inputs: list[PreparedRequest]) -> None:
        self.status_code = 200
        self.background = None
        self._ingress = ingress
        self._fold = fold
        self._inputs = inputs
        self._body = b""
        self._capacity = asyncio.Semaphore(INPUTS_IN_FLIGHT_MAX)
        self._interrupt_reason = DISCONNECTED

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Cancel requests in flight if the client gets no complete response."""
        metrics, fold, began_s = self._ingress.metrics, self._fold, runtime.monotonic_s()
        metrics.inflight.inc()
        status = "error"
        try:
            if not await self._wait(receive):
                status = "cancelled"
                metrics.disconnected.inc()
                return
            await self._send(send)
            status = "success"
            metrics.duration.observe(runtime.monotonic_s() - began_s)
            metrics.input_tokens.observe(fold.prompt_tokens)
        except ApiError as error:
            metrics.errors.labels(error.code).inc()
            await error.send(send, fold.request_id)
        finally:
            metrics.inflight.dec()
            metrics.ended(fold.endpoint, stream=False, status=status)

    async def _wait(self, receive: Receive) -> bool:
        """Wait for the complete response. Return False if the client disconnected. Raises ApiError."""
        loop, timeout_s = asyncio.get_running_loop(), self._ingress.settings.timeout_s
        work = loop.create_task(self._run_inputs())
        watch = loop.create_task(wait_for_disconnect(receive, lambda _: None))
        try:
            await asyncio.wait((work, watch), timeout=timeout_s + GRACE_S, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif not watch.done():
                self._interrupt_reason = TIMED_OUT
                raise deadline_exceeded(timeout_s)
            return work.done()
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _run_inputs(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._inputs)):
                    group.create_task(self._run_input(index))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run_input(self, index: int) -> None:
        ingress, fold = self._ingress, self._fold
        request_id = part_id(fold.request_id, index)
        async with self._capacity:
            stream = await ingress.submit(request_id, self._inputs[index])
            try:
                while stream.ended is None and fold.error is None:
                    await stream.ready()
                    self._body = b"".join(fold.step(stream, index)) or self._body
                    if stream.ended is None and stream.interrupt_reason is not None:
                        self._interrupt_reason = stream.interrupt_reason
                        raise interruption(stream.interrupt_reason)
                if was_rejected(stream):
                    ingress.metrics.rejected(fold.endpoint)
                if fold.error is not None:
                    raise ingress.observe(fold.error)
            finally:
                ingress.replies.close(request_id)
                if stream.ended is None:
                    ingress.cancel(request_id, fold.cancel_reason or self._interrupt_reason)

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self._body)).encode()),
            (b"x-request-id", self._fold.request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})
