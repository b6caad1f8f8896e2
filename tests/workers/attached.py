"""Attached engines in tests, and a server whose responses a test writes, also such as no server should send."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from aiohttp import web

from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.workers.engines.attached.engine import AttachedEngine, AttachedSettings
from forebay.workers.engines.attached.server import ServerInfo, UpstreamServer
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.kv_events.zmq_feed import KvSource
from tests.engines.driven import Driven, driven
from tests.harness.local import free_ports
from tests.harness.openai_server import OpenAiServer
from tests.workers.engine_setup import SPEC

MODEL = Model(DEFAULT_MODEL)
decode = partial(MODEL.tokenizer.decode, skip_special_tokens=False)
HOST = "127.0.0.1"
CUT = None  # closes the connection
HANG = ...  # sends nothing more
Event = Any  # a dictionary, bytes, CUT or HANG


def chunk(token_ids: Any = None, text: str = "", reason: Any = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": reason, **more}
    return {"choices": [choice if token_ids is None else {**choice, "token_ids": token_ids}]}


class Reply(NamedTuple):
    """Response that is no stream of events, in place of a stream."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}


class OddServer:
    """Server whose responses a test sets. Use it as an async context manager.

    Attributes:
        replies: status and parts of the body, by path. Other paths are not found.
        streams: events of the next streams, or replies. Each part is sent on its own.
        refuses: fields of a request that the server rejects.
    """

    def __init__(self, owner: str = "vllm") -> None:
        models = {"data": [{"id": "m", "owned_by": owner, "root": "/root", "max_model_len": 64}]}
        self.replies: dict[str, tuple[int, Sequence[bytes]]] = {
            "/v1/models": (200, [json.dumps(models).encode()]),
            "/health": (200, []),
        }
        self.completion: Any = chunk([7])
        self.streams: list[Sequence[Event] | Reply] = []
        self.refuses: frozenset[str] = frozenset()
        self.requests: list[dict[str, Any]] = []
        self.trace_contexts: list[str] = []  # of each request for a completion; empty for none
        self._sockets: set[int] = set()
        self._port = free_ports(1)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    @property
    def connections(self) -> int:
        return len(self._sockets)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self._port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self._sockets.add(request.transport.get_extra_info("peername")[1])
        body = await request.json() if request.can_read_body else {}
        if unknown := self.refuses & body.keys():
            error = {"loc": ["body", *unknown], "msg": "Extra inputs are not permitted"}
            return web.json_response({"detail": [error]}, status=422)
        if request.path == "/v1/completions":
            self.trace_contexts.append(request.headers.get("traceparent", ""))
        if request.path == "/v1/completions" and body["stream"]:
            self.requests.append(body)
            return await self._stream(request)
        if request.path == "/v1/completions" and not isinstance(self.completion, bytes):
            return web.json_response(self.completion)
        status, parts = self.replies.get(request.path, (404, []))
        if request.path == "/v1/completions":
            status, parts = 200, [self.completion]
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0)  # the client reads each part on its own
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        stream = self.streams.pop(0)
        if isinstance(stream, Reply):
            return web.Response(status=stream.status, body=stream.body, headers=dict(stream.headers))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in stream:
            if event is CUT:
                assert request.transport is not None
                request.transport.abort()
                return response
            if event is HANG:
                await asyncio.Event().wait()
            data = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
            await response.write(data)
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        await asyncio.sleep(0)  # the end of the response follows on its own
        return response


def prefix_space(file: Path) -> None:
    """Change a tokenizer.json so that the first word of a text has other tokens."""
    tokenizer = json.loads(file.read_text())
    tokenizer["pre_tokenizer"]["add_prefix_space"] = True
    file.write_text(json.dumps(tokenizer))


async def described(url: str, name: str = "") -> ServerInfo:
    server = UpstreamServer(url)
    try:
        return await server.describe(name)
    finally:
        await server.close()


async def attached_to(
    server: OpenAiServer | OddServer, settings: EngineSettings | None = None, **options: Any
) -> AttachedEngine:
    source = None
    if isinstance(server, OpenAiServer) and server.events is not None:
        source = KvSource(server.kv_events, server.kv_replay)
    attached = AttachedSettings(
        url=server.url,
        info=await described(server.url),
        encode=MODEL.encode,
        decode=decode,
        context_tokens=MODEL.context_tokens,
        kv_events=source,
        **options,
    )
    return AttachedEngine(settings or EngineSettings(model=DEFAULT_MODEL, model_name="m"), attached)


@asynccontextmanager
async def attached(
    server: OpenAiServer | OddServer, settings: EngineSettings | None = None, **options: Any
) -> AsyncIterator[Driven]:
    async with driven(await attached_to(server, settings, **options), SPEC) as one:
        yield one
