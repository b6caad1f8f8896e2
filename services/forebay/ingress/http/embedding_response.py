"""The vectors of one HTTP request on their way: its parts are submitted, awaited, and dropped when the client goes."""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay import runtime
from forebay.ingress.errors import ApiError
from forebay.ingress.http.response import DISCONNECTED, TIMED_OUT
from forebay.ingress.ingress import GRACE_S, Ingress
from forebay.ingress.openai.embeddings import EmbeddingBody, embeddings, part_id, vector_of
from forebay.ingress.prepare import PreparedRequest
from forebay.ingress.streams import interruption, was_rejected

ENDPOINT = "embeddings"
AT_ONCE = 64  # parts of one request under way: the others' requests come between them


class EmbeddingResponse(Response):
    """Sends one list of vectors."""

    def __init__(self, ingress: Ingress, request_id: str, body: EmbeddingBody, parts: list[PreparedRequest]) -> None:
        self.status_code = 200
        self.background = None
        self._ingress = ingress
        self._request_id = request_id
        self._body = body
        self._parts = parts
        self._room = asyncio.Semaphore(AT_ONCE)
        self._reason = DISCONNECTED

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; whatever happens, nothing is left running."""
        metrics, began_s = self._ingress.metrics, runtime.monotonic_s()
        prompt_tokens = sum(part.prompt_tokens for part in self._parts)
        metrics.inflight.inc()
        status = "error"
        try:
            vectors = await self._gather(receive)
            if vectors is None:
                status = "cancelled"
                metrics.disconnected.inc()
                return
            await self._send(send, embeddings(self._body, vectors, prompt_tokens))
            status = "success"
            metrics.duration.observe(runtime.monotonic_s() - began_s)
            metrics.input_tokens.observe(prompt_tokens)
        except ApiError as error:
            metrics.refused.labels(error.code).inc()
            await error.send(send, self._request_id)
        finally:
            metrics.inflight.dec()
            metrics.ended(ENDPOINT, stream=False, status=status)

    async def _gather(self, receive: Receive) -> list[bytes] | None:
        """The vectors, None when the client left. Raises ApiError."""
        loop = asyncio.get_running_loop()
        working = loop.create_task(self._vectors())
        leaving = loop.create_task(_left(receive))
        wait_s = self._ingress.settings.timeout_s + GRACE_S
        try:
            done, _ = await asyncio.wait((working, leaving), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if working in done:
                return working.result()
            if leaving in done:
                return None
            self._reason = TIMED_OUT
            raise ApiError(504, "deadline_exceeded", f"no answer within {self._ingress.settings.timeout_s:g} s")
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _vectors(self) -> list[bytes]:
        tasks: list[asyncio.Task[bytes]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(self._one(index)) for index in range(len(self._parts))]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, index: int) -> bytes:
        ingress, request_id = self._ingress, part_id(self._request_id, index)
        async with self._room:
            stream = await ingress.submit(request_id, self._parts[index])
            try:
                while stream.ended is None and stream.interrupt_reason is None:
                    await stream.ready()
                    stream.take()  # an embedding says no tokens; those of a wrong engine are not waited for
                if stream.ended is None:
                    self._reason = stream.interrupt_reason or self._reason
                    raise interruption(stream.interrupt_reason)
                if was_rejected(stream):
                    ingress.metrics.rejected(ENDPOINT)
                if stream.ended.error is not None:
                    raise ingress.to_api_error(stream.ended.error)
                return vector_of(stream)
            finally:
                ingress.replies.close(request_id)
                if stream.ended is None:
                    ingress.cancel(request_id, self._reason)

    async def _send(self, send: Send, body: bytes) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", self._request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
