"""gRPC server of the KServe API.

Theory of operation. Each RPC becomes a request to the HTTP application of the ingress, in this process. So API keys,
limits, admission, drain, timeouts, metrics and the access log are the same, and the log has an ordinary request. The
application reads the message of `ModelInfer` as the body of its request, after it has checked the API key.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib.metadata import version
from typing import Any

import grpc.aio
import msgspec
from starlette.types import ASGIApp, Message

from forebay.ingress.access_log import add_fields
from forebay.ingress.admission import IN_FLIGHT_MAX
from forebay.ingress.errors import invalid
from forebay.ingress.front import Front
from forebay.ingress.http.endpoint import Endpoint, TlsFiles
from forebay.ingress.http.guards import JSON, ApiKeyGuard
from forebay.ingress.http.server import ErrorGuard
from forebay.ingress.kserve.messages import CLASSES, SERVICE
from forebay.ingress.kserve.tensors import VERSION, Translated, described, translate
from forebay.ingress.openai.requests import TEXT_PATH
from forebay.runtime.errors import ConfigError
from forebay.transport.certificates import ReloadedTls

STREAM_IN_FLIGHT_MAX = 64  # requests of one ModelStreamInfer
MESSAGE_SLACK = 64 << 10  # bytes by which a message may exceed a body, so that the error of the ingress names the limit
IDLE_MS = 300_000  # a connection without RPCs is closed, because it takes a file descriptor
HANDSHAKE_MS = 60_000
DETAILS_CHARS_MAX = 500  # up to 12 bytes each in trailers, of which clients accept 8 KiB
# Metadata that does not apply to the request to the application, whose body is JSON.
NOT_PASSED = frozenset({"content-encoding", "content-length", "content-type", "host", "transfer-encoding"})
CODES = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "ABORTED", 429: "RESOURCE_EXHAUSTED"}
CODES |= {499: "CANCELLED", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}

Translation = tuple[dict[str, Any], Translated]
OnEvent = Callable[["_Reply", Any], Awaitable[None]]


class _Reply:
    """Response of the application, without the events of a stream.

    Attributes:
        translated: the request; not set if it was rejected before it was read, or is invalid.
    """

    status = 0
    headers: Mapping[bytes, bytes] = {}
    body = b""
    translated: Translated

    @property
    def error(self) -> Any:
        """The error in OpenAI's format; None if there is none."""
        return msgspec.json.decode(self.body)["error"] if self.status >= 400 else None

    async def require_success(self, context: Any) -> None:
        """End the RPC if the response is an error."""
        if (error := self.error) is not None:
            code = CODES.get(self.status, "INVALID_ARGUMENT" if self.status < 500 else "INTERNAL")
            trailers = {"error-code": error["code"]}
            if retry_after := self.headers.get(b"retry-after"):
                trailers["retry-after"] = retry_after.decode()
            await context.abort(grpc.StatusCode[code], error["message"][:DETAILS_CHARS_MAX], tuple(trailers.items()))

    def response(self, **parameters: bool) -> dict[str, Any]:
        found = msgspec.json.decode(self.body)
        return self.translated.response(found["choices"][0], found, **parameters)


class _Service:
    """Methods of `GRPCInferenceService`. Each returns the fields of its response."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = ErrorGuard(app, front.metrics.reject)
        self._key_check = ApiKeyGuard(_accept, front.keys, front.metrics.reject)
        self._left: set[asyncio.Task[None]] = set()  # requests whose clients have left, until the application ends them

    async def server_live(self, _: Any, context: Any) -> dict[str, Any]:
        return {"live": (await self._serve(context, "/live")).status == 200}

    async def server_ready(self, _: Any, context: Any) -> dict[str, Any]:
        return {"ready": (await self._serve(context, "/ready")).status == 200}

    async def server_metadata(self, _: Any, context: Any) -> dict[str, Any]:
        del context
        return {"name": "forebay", "version": version("forebay")}

    async def model_ready(self, request: Any, context: Any) -> dict[str, Any]:
        found = await self._serve(context, f"/v1/models/{request.name}")
        if found.status != 404:
            await found.require_success(context)
        is_known = found.status == 200 and request.version in ("", VERSION)
        return {"ready": is_known and (await self._serve(context, "/ready")).status == 200}

    async def model_metadata(self, request: Any, context: Any) -> dict[str, Any]:
        await (await self._serve(context, f"/v1/models/{request.name}")).require_success(context)
        return {"name": request.name, "versions": [VERSION], "platform": "forebay", **described()}

    async def model_infer(self, requests: AsyncIterator[Any], context: Any) -> dict[str, Any]:
        async def read() -> Translation:
            if (request := await anext(requests, None)) is None:
                raise invalid("ModelInfer got no request; send one")
            return translate(request, may_stream=False)

        reply = await self._serve(context, TEXT_PATH, read)
        await reply.require_success(context)
        return reply.response()

    async def model_stream_infer(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Answer the requests of a stream at the same time."""
        await (await self._serve(context, TEXT_PATH, app=self._key_check)).require_success(context)
        free, writing = asyncio.Semaphore(STREAM_IN_FLIGHT_MAX), asyncio.Lock()

        async def write(response: dict[str, Any], message: str = "") -> None:
            async with writing:
                await context.write({"error_message": message, "infer_response": response})

        async with asyncio.TaskGroup() as tasks:
            async for request in requests:
                await free.acquire()
                answering = tasks.create_task(self._answer(request, context, write))
                answering.add_done_callback(lambda _: free.release())

    async def _answer(self, request: Any, context: Any, write: Callable[..., Awaitable[None]]) -> None:
        """Write the responses to a request. The parameter `triton_final_response` of the last one is true."""
        ended: dict[str, Any] = {}
        final = {"key": "triton_final_response", "value": {"bool_param": True}}
        failed, unread = {"model_name": request.model_name, "id": request.id, "parameters": [final]}, [request]
        del request  # it may have megabytes, and the response may take minutes

        async def read() -> Translation:
            return translate(unread.pop(), may_stream=True)

        async def fail(error: Any) -> None:
            await write(failed, error["message"])

        async def on_event(reply: _Reply, found: Any) -> None:
            if "error" in found:
                await fail(found["error"])
            elif not found["choices"]:  # the event with the usage, after the one with the finish reason
                await write(reply.translated.response(ended, found, triton_final_response=True))
            elif (choice := found["choices"][0])["finish_reason"] is not None:
                ended.update(choice)
            elif choice["text"] or choice.get("token_ids"):
                await write(reply.translated.response(choice, found, triton_final_response=False))

        reply = await self._serve(context, TEXT_PATH, read, on_event)
        if reply.error is not None:
            await fail(reply.error)
        elif reply.body:
            await write(reply.response(triton_final_response=True))

    async def _serve(
        self,
        context: Any,
        path: str,
        read: Callable[[], Awaitable[Translation]] | None = None,
        on_event: OnEvent | None = None,
        app: ASGIApp | None = None,
    ) -> _Reply:
        """Return the response of the application to a request with the metadata of an RPC.

        If the client leaves, the application handles the request as one whose connection was closed.

        Args:
            read: returns the request of a POST.
            on_event: called with each event of a stream.
        """
        reply, gone, unread = _Reply(), asyncio.Event(), [read] if read else []
        given = [(name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str)]
        headers = [(name.encode(), value.encode()) for name, value in given if name not in NOT_PASSED]
        headers += [(b"host", b"localhost"), *([(b"content-type", JSON.encode())] if read else [])]
        scope: dict[str, Any] = {"type": "http", "method": "POST" if read else "GET", "scheme": "http", "path": path}
        scope |= {"http_version": "2", "query_string": b"", "root_path": "", "headers": headers, "client": None}

        async def receive() -> Message:
            if unread:
                body, reply.translated = await unread.pop()()
                return {"type": "http.request", "body": msgspec.json.encode(body)}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                reply.status, reply.headers = message["status"], dict(message["headers"])
                add_fields(scope, api="kserve")
            elif not reply.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                reply.body += message.get("body", b"")
            else:
                try:
                    for line in message.get("body", b"").split(b"\n"):
                        if line.startswith(b"data: {") and on_event and not gone.is_set():
                            await on_event(reply, msgspec.json.decode(line.removeprefix(b"data: ")))
                except grpc.aio.BaseError:  # the RPC has ended
                    gone.set()

        async def run() -> None:
            await (app or self._app)(scope, receive, send)

        work = asyncio.create_task(run())
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            gone.set()
            self._left.add(work)
            work.add_done_callback(self._left.discard)
            raise
        return reply


async def _accept(*_: Any) -> None:
    """Serve a request with a valid API key, without a response."""


def build_server(app: ASGIApp, front: Front, endpoint: Endpoint) -> grpc.aio.Server:
    """Return a server at the gRPC port of the endpoint, not started yet. Raises ConfigError if it cannot listen."""
    service, message = _Service(app, front), "ModelInferRequest"
    unary, single, stream = (
        grpc.unary_unary_rpc_method_handler,
        grpc.stream_unary_rpc_method_handler,  # so that the message is read after the API key was checked
        grpc.stream_stream_rpc_method_handler,
    )
    methods = {
        "ServerLive": (unary, service.server_live, "Empty", "Live"),
        "ServerReady": (unary, service.server_ready, "Empty", "Ready"),
        "ServerMetadata": (unary, service.server_metadata, "Empty", "ServerMetadata"),
        "ModelReady": (unary, service.model_ready, "ModelRequest", "Ready"),
        "ModelMetadata": (unary, service.model_metadata, "ModelRequest", "ModelMetadata"),
        "ModelInfer": (single, service.model_infer, message, "ModelInferResponse"),
        "ModelStreamInfer": (stream, service.model_stream_infer, message, "ModelStreamInferResponse"),
    }
    handlers = {
        name: made(method, CLASSES[request].FromString, _serializer(response))
        for name, (made, method, request, response) in methods.items()
    }
    options = {
        "grpc.so_reuseport": 0,  # a second process on the port fails
        "grpc.max_receive_message_length": front.settings.body_bytes_max + MESSAGE_SLACK,
        "grpc.max_connection_idle_ms": IDLE_MS,
        "grpc.server_handshake_timeout_ms": HANDSHAKE_MS,
    }
    server = grpc.aio.server(options=tuple(options.items()), maximum_concurrent_rpcs=IN_FLIGHT_MAX)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    address = f"{host}:{endpoint.grpc_port}"
    try:
        if endpoint.tls is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, _credentials(endpoint.tls, front.metrics.certificate_unusable.inc))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address} ({error}); choose another --grpc-port") from error
    return server


def _serializer(name: str) -> Callable[[dict[str, Any]], bytes]:
    return lambda fields: CLASSES[name](**fields).SerializeToString()


def _credentials(tls: TlsFiles, on_unusable: Callable[[], None]) -> grpc.ServerCredentials:
    """Return credentials that follow changes of the files. gRPC asks for them at each new connection, in a thread."""
    reloaded = ReloadedTls(tls.load, tls.files, on_unusable)

    def read() -> grpc.ServerCertificateConfiguration:
        key, chain = (tls.keyfile or tls.certfile).read_bytes(), tls.certfile.read_bytes()
        return grpc.ssl_server_certificate_configuration([(key, chain)])

    return grpc.dynamic_ssl_server_credentials(read(), lambda: read() if reloaded.refresh() else None)
