"""Send the vectors of one embedding request to an HTTP client."""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay import runtime
from forebay.events.request_ids import part_id
from forebay.ingress.access_log import add_fields
from forebay.ingress.errors import ApiError, deadline_exceeded
from forebay.ingress.http.response import TIMED_OUT, PartRunner, wait_for_disconnect
from forebay.ingress.ingress import GRACE_S, Ingress
from forebay.ingress.prepare import PreparedRequest
from forebay.ingress.response_fold import EmbeddingFold
from forebay.ingress.streams import Stream


class EmbeddingResponse(Response):
    """ASGI response to one embedding request. It submits one request per input and sends all vectors together.

    Args:
        ingress: submits and cancels the requests.
        fold: collects the vectors and builds the response.
        inputs: one prepared request per input, in the order of the inputs.
    """

    def __init__(self, ingress: Ingress, fold: EmbeddingFold, inputs: list[PreparedRequest]) -> None:
        self.status_code = 200
        self.background = None
        self._ingress = ingress
        self._fold = fold
        self._body = b""
        ids = [part_id(fold.request_id, index) for index in range(len(inputs))]
        self._runner = PartRunner(ingress, fold, ids, inputs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the inputs and send the vectors, or an error. Cancel requests in flight if an input fails.

        Requests in flight are also cancelled if the client disconnects or the deadline passes.
        """
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
            await error.send(send, fold.client_id)
        finally:
            metrics.inflight.dec()
            metrics.ended(fold.endpoint, stream=False, status=status)
            add_fields(scope, prompt_tokens=fold.prompt_tokens)

    async def _wait(self, receive: Receive) -> bool:
        """Run all inputs. Return False if the client disconnected. Raises ApiError if an input fails or times out."""
        loop, timeout_s = asyncio.get_running_loop(), self._ingress.settings.timeout_s
        work = loop.create_task(self._runner.run(self._on_step))
        watch = loop.create_task(wait_for_disconnect(receive, lambda _: None))
        try:
            await asyncio.wait((work, watch), timeout=timeout_s + GRACE_S, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif not watch.done():
                self._runner.interrupt_reason = TIMED_OUT
                raise deadline_exceeded(timeout_s)
            return work.done()
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _on_step(self, _: Stream, objects: list[bytes]) -> None:
        self._body = b"".join(objects) or self._body

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self._body)).encode()),
            (b"x-request-id", self._fold.client_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})
