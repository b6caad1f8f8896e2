"""An ingress on a real log. The test plays router and worker."""

import asyncio
import contextlib
import copy
import functools
import json
import socket
import sqlite3
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry, generate_latest
from starlette.types import ASGIApp

from forebay.events.base import Event, pack_u32
from forebay.events.codec import decode, encode
from forebay.events.control import WorkerCommanded
from forebay.events.rendering import Rendering
from forebay.events.request_ids import part_ids
from forebay.events.requests import RequestCancelled, RequestSubmitted, RouteQueried, Sampling
from forebay.events.tokens import (
    AttemptStarted,
    CommandResponse,
    PrefilledBy,
    RequestLocated,
    ResponseEnded,
    ResponseError,
    TokenChunk,
    TokenEvent,
    TokenLogprob,
    TokensEmitted,
    Usage,
)
from forebay.events.topics import CONTROL, REQUESTS, TOKENS, Topic
from forebay.ingress.front import Front
from forebay.ingress.http.app import IngressApp, build_app
from forebay.ingress.http.endpoint import TlsFiles
from forebay.ingress.http.protocol import ConnectionLimits
from forebay.ingress.http.server import Server, build_server, listen
from forebay.ingress.loaded_model import LoadedModel
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.parsers.selection import ParserFactory
from forebay.ingress.response_fold import ResponseFold, fold_of
from forebay.ingress.settings import IngressSettings
from forebay.runtime.errors import ConfigError
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.harness.memory_log import fail_commits, memory_log
from tests.harness.only_model import OnlyModel
from tests.system import until

NAME = "test-model"
SLOT = 4
MODULE_LOOP = pytest.mark.asyncio(loop_scope="module")
BODY_MAX = 200_000
CHAT, TEXT, EMBED, ROUTE = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/route"
RESPONSES = "/v1/responses"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "Hello there"}]
ADMIN_TOKEN = "token-of-tests"
HEADERS = {"authorization": f"Bearer {ADMIN_TOKEN}", "content-type": "application/json"}


class Scene:
    """HTTP client of an ingress, and methods that play router and worker on its log."""

    loaded: LoadedModel
    model: Model

    def __init__(self, log: SqliteLog, db: sqlite3.Connection, registry: CollectorRegistry, only: OnlyModel) -> None:
        self.log = log
        self._db = db
        self.registry = registry
        self.only = only
        self.models = only.models
        self.front = only.models.front
        self.group = only.models.group(NAME)
        self._answered = 0

    @functools.cached_property
    def app(self) -> IngressApp:
        return build_app(self.models, self.registry)

    @functools.cached_property
    def client(self) -> httpx.AsyncClient:
        return client_of(self.app, headers=HEADERS)

    def fail_commits(self) -> None:
        fail_commits(self._db)

    def events(self, topic: Topic, kind: type | None = None, after: int = 0) -> list[Any]:
        """Return the events of a topic from an offset on, of one type if given."""
        found = [decode(topic, record.value) for record in self.log.records(topic.name, 0, after, 10_000)]
        return [event for event in found if kind is None or isinstance(event, kind)]

    def requests(self, kind: type | None = None) -> list[Any]:
        return self.events(REQUESTS, kind)

    async def next_request(self) -> RequestSubmitted:
        await until(lambda: len(self.requests(RequestSubmitted)) > self._answered)
        request: RequestSubmitted = self.requests(RequestSubmitted)[self._answered]
        self._answered += 1
        return request

    async def next_query(self, count: int = 1) -> RouteQueried:
        """Wait for `count` route queries and return the last one."""
        await until(lambda: len(self.requests(RouteQueried)) >= count)
        query: RouteQueried = self.requests(RouteQueried)[count - 1]
        return query

    def control(self, event: Event) -> None:
        """Append an event to `control`."""
        self.log.append_soon([Draft(CONTROL.name, 0, encode(CONTROL, event))])

    def send(self, event: TokenEvent) -> None:
        """Append an event to the reply slot; its default group is that of the ingress, its key that of the request."""
        if not event.group:
            event = msgspec.structs.replace(event, group=NAME)
        if isinstance(event, TokensEmitted):
            chunks = [msgspec.structs.replace(one, reply_key=self._key_of(one.request_id)) for one in event.chunks]
            event = msgspec.structs.replace(event, chunks=tuple(chunks))
        else:
            name = event.command_id if isinstance(event, CommandResponse) else event.request_id
            event = msgspec.structs.replace(event, reply_key=self._key_of(name))
        self.log.append_soon([Draft(TOKENS.name, SLOT, encode(TOKENS, event))])

    def _key_of(self, name: str) -> int:
        keys: dict[str, int] = {one.command_id: one.nonce for one in self.events(CONTROL, WorkerCommanded)}
        asked = self.requests(RequestSubmitted) + self.requests(RouteQueried)
        keys |= {one.request_id: one.reply_key for one in asked}
        return keys.get(name, 0)

    def emit_text(self, name: str, text: str, *, first: int = 0, attempt: int = 1, worker: str = "w1") -> int:
        """Emit the tokens of a text and return the index after them."""
        token_ids = self.model.encode(text)
        return self.emit(name, token_ids, first=first, attempt=attempt, worker=worker)

    def emit(
        self,
        name: str,
        token_ids: list[int],
        *,
        first: int = 0,
        attempt: int = 1,
        worker: str = "w1",
        owner: int = 1,
        logprobs: tuple[TokenLogprob, ...] = (),
        prefilled: PrefilledBy | None = None,
    ) -> int:
        """Emit tokens and return the index after them."""
        packed = pack_u32(token_ids)
        chunk = TokenChunk(
            request_id=name,
            attempt=attempt,
            first_index=first,
            token_ids=packed,
            logprobs=logprobs,
            prefilled=prefilled,
        )
        self.send(TokensEmitted(worker_id=worker, worker_epoch=1, owner_epoch=owner, chunks=(chunk,)))
        return first + len(token_ids)

    def end(
        self, name: str, *, reason: Any = "length", attempt: int = 1, cached: int = 0, output: int = 1, owner: int = 1
    ) -> None:
        usage = Usage(prompt_tokens=9, output_tokens=output, cached_tokens=cached)
        ended = ResponseEnded(request_id=name, attempt=attempt, owner_epoch=owner, finish_reason=reason, usage=usage)
        self.send(ended)

    def reply(self, name: str, text: str, *, first: int = 0, **end: Any) -> int:
        """Emit the tokens of a text, end the response successfully, and return the number of tokens."""
        output = self.emit_text(name, text, first=first)
        self.end(name, output=output, **end)
        return output

    def locate(self, request: RequestSubmitted, earlier: int, slot: int = SLOT) -> None:
        """Play the owner, which knows the idempotency key of a request from the request at the offset `earlier`."""
        event = RequestLocated(
            request_id=request.request_id,
            partition=0,
            offset=earlier,
            owner_epoch=1,
            group=NAME,
            reply_key=request.reply_key,
        )
        self.log.append_soon([Draft(TOKENS.name, slot, encode(TOKENS, event))])

    def start(self, path: str, body: Any, **headers: str) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.client.post(path, json=body, headers=headers))

    def refuse(self, name: str, status: int, code: str, *, attempt: int = 0, owner: int = 1) -> None:
        """End a response with an error."""
        error = ResponseError(status=status, code=code, message=f"because of {code}")
        self.send(
            ResponseEnded(request_id=name, attempt=attempt, owner_epoch=owner, finish_reason="error", error=error)
        )

    def start_attempt(self, name: str, attempt: int, *, owner: int = 1) -> None:
        """Start a later attempt, or the same attempt under a later owner."""
        self.send(AttemptStarted(request_id=name, attempt=attempt, owner_epoch=owner, worker_id="w2"))

    async def cancelled(self) -> RequestCancelled:
        """Wait for a cancellation and return the first one."""
        await until(lambda: self.requests(RequestCancelled))
        event: RequestCancelled = self.requests(RequestCancelled)[0]
        return event

    def listen(self) -> tuple[socket.socket, int]:
        """Return a listening socket on a free port, and the port."""
        for port in range(18_900, 19_400):
            with contextlib.suppress(ConfigError):
                return listen("127.0.0.1", port), port
        raise AssertionError("no port is free")

    @asynccontextmanager
    async def served(self, tls: TlsFiles | None = None, **limits: Any) -> AsyncIterator[tuple[int, Server]]:
        """Serve over TCP with these limits of connections; yield the port and the server."""
        listener, port = self.listen()
        metrics = self.front.metrics
        limited = ConnectionLimits(metrics.reject, **limits)
        server = build_server(self.app, lambda: None, limited, tls, metrics.certificate_unusable.inc)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield port, server
        finally:
            server.should_exit = True
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            await serving

    @asynccontextmanager
    async def http_client(self, **headers: str) -> AsyncIterator[tuple[httpx.AsyncClient, Server]]:
        """Serve over TCP; yield a client that sends only these headers, and the server."""
        async with (
            self.served() as (port, server),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, headers=headers) as client,
        ):
            yield client, server

    @asynccontextmanager
    async def openai_client(self, key: str = "x") -> AsyncIterator[openai.AsyncOpenAI]:
        """Serve over TCP; yield a client of OpenAI's library."""
        async with (
            self.served() as (port, _),
            openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0) as client,
        ):
            yield client

    def refusals(self) -> Counter[str]:
        """Return the number of requests that got an error, by error code."""
        (metric,) = self.front.metrics.errors.collect()
        return Counter({one.labels["code"]: int(one.value) for one in metric.samples if one.name.endswith("_total")})

    def metric(self, line: str) -> bool:
        return any(found.startswith(line) for found in generate_latest(self.registry).decode().splitlines())


def client_of(app: ASGIApp, **options: Any) -> httpx.AsyncClient:
    """Return a client of an application without a server."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20, **options)


def chat(**changes: Any) -> dict[str, Any]:
    """Return a body for `CHAT`."""
    return {"model": NAME, "messages": HELLO, "max_tokens": 50, **changes}


def text(**changes: Any) -> dict[str, Any]:
    """Return a body for `TEXT`."""
    return {"model": NAME, "prompt": "Hello", "max_tokens": 50, **changes}


def error(response: httpx.Response) -> tuple[int, str]:
    """Return the status and error code of a response in the format of OpenAI or Anthropic."""
    found = response.json()["error"]
    return response.status_code, found["details"]["error_code"] if "details" in found else found["code"]


def events(response: httpx.Response) -> list[Any]:
    """Return the decoded events of a stream, with the last one, [DONE], as text."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def event_ids(response: httpx.Response) -> list[str]:
    """Return the ids of the events of a stream."""
    return [line.removeprefix("id: ") for line in response.text.split("\n") if line.startswith("id: ")]


def begun_fold(model: Model, request_id: str = "a", **fields: Any) -> ResponseFold:
    """Return a fold that has begun, of a text completion unless the fields of its rendering differ."""
    rendering = Rendering(**{"api": "completions", "model": NAME, "created_s": 7, "prompt_tokens": 3, **fields})
    first = RequestSubmitted(
        request_id=part_ids(request_id, rendering.parts)[0],
        model=NAME,
        token_ids=b"",
        sequence_hashes=b"",
        reply_slot=SLOT,
        timeout_us=1,
        tie_seed=0,
        sampling=Sampling(max_tokens=9),
        rendering=rendering,
    )
    fold = fold_of(first, rendering, model, ParserFactory(model))
    assert fold.begin(request_id) == []
    return fold


@functools.cache
def default_model() -> Model:
    """Return the default model, which takes 60 ms to load."""
    return Model(DEFAULT_MODEL)


@asynccontextmanager
async def make_scene(
    model: Model | None = None,
    *,
    wrap: Callable[[SqliteLog], Any] = lambda log: log,
    is_placed: bool = True,
    **changes: Any,
) -> AsyncIterator[Scene]:
    """Yield a scene with these settings, whose ingress uses the log that `wrap` returns."""
    log, db = memory_log()
    registry = CollectorRegistry()
    fields: dict[str, Any] = {
        "model_name": NAME,
        "block_size": 4,
        "reply_slot": SLOT,
        "body_bytes_max": BODY_MAX,
        "timeout_s": 30.0,
        "incarnation": "ingress",
        "admin_token": "",  # the 20 routes of the admin API take half of the time of building an application
    }
    settings = IngressSettings(ingress_id="i1", **{**fields, **changes})
    model = model or copy.copy(default_model())  # a test may change attributes of its model
    front = Front(wrap(log), settings, IngressMetrics(registry, NAME), 0, model)
    scene = Scene(log, db, registry, OnlyModel(front, model, 0 if is_placed else None))
    scene.loaded = (await scene.models.only("")).loaded
    scene.model = model
    running = asyncio.create_task(front.run())
    try:
        yield scene
    finally:
        if "client" in vars(scene):
            await scene.client.aclose()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        log.close()


@pytest.fixture(scope="module")
def admin_token() -> str:
    """Return the token of the admin API; empty for no admin API. Modules that test the admin API override this."""
    return ""


@pytest.fixture
async def scene(admin_token: str) -> AsyncIterator[Scene]:
    async with make_scene(admin_token=admin_token) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_scene(admin_token: str) -> AsyncIterator[Scene]:
    """Yield one scene to all tests of a module whose requests have no effect. Mark these tests with `MODULE_LOOP`."""
    async with make_scene(admin_token=admin_token) as made:
        yield made


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    started: list[Process] = []
    start = asyncio.create_subprocess_exec

    async def start_recorded(*arguments: str, **options: Any) -> Process:
        started.append(await start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_recorded)
    return started
