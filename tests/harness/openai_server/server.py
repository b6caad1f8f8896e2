"""HTTP server of the stand-in: the routes of the imitated server."""

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Self, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from forebay.events.requests import Sampling
from forebay.ingress.http.server import Server, listen
from forebay.ingress.model import Model
from tests.harness.local import free_ports
from tests.harness.openai_server.cache import CacheEvent, StandinRequest
from tests.harness.openai_server.engine import Delta, StandInEngine
from tests.harness.openai_server.events import EventPublisher
from tests.harness.openai_server.settings import Counters, Faults, ServerSettings
from tests.harness.openai_server.tokens import structure_of

HOST = "127.0.0.1"
LOGPROB = -0.7  # of the generated token, as with a mock engine; each further token is as much less likely
T = TypeVar("T")


class ApiFailure(Exception):
    """A request is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class StreamCut(Exception):
    """The connection of a stream is closed, by a fault."""


class CompletionBody(msgspec.Struct, kw_only=True):
    """Body of a completion: the fields that the stand-in reads. It accepts others, as the engines do."""

    model: str
    prompt: list[int] | str
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    stream: bool = False
    add_special_tokens: bool = True
    structured_outputs: dict[str, Any] = {}
    return_token_ids: bool = False
    cache_salt: str = ""
    rid: str = ""  # of SGLang
    lora_path: str = ""  # of SGLang
    kv_transfer_params: dict[str, Any] = {}


class OpenAiServer:
    """Stand-in for one server of an engine. Use it as an async context manager, or call `start` and `stop`.

    Args:
        changes: changes of the settings.

    Attributes:
        port: port that the server listens on, also when it is started again.
        events: publisher of KV events; None if there are none.
    """

    def __init__(self, settings: ServerSettings | None = None, **changes: Any) -> None:
        self.settings = msgspec.structs.replace(settings or ServerSettings(), **changes)
        self.faults = Faults()
        self.counters = Counters()
        self.port = 0
        self.events: EventPublisher | None = None
        self._events_port = 0
        self.model = Model(self.settings.model)
        self.engine = self._new_engine()
        self._loras: dict[str, str] = {}  # directories by name
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """URL of the server, without a path."""
        return f"http://{HOST}:{self.port}"

    @property
    def kv_events(self) -> str:
        assert self.events is not None
        return f"tcp://{HOST}:{self._events_port}"

    @property
    def kv_replay(self) -> str:
        """Address of the ROUTER socket that replays KV events."""
        assert self.events is not None
        return f"tcp://{HOST}:{self._events_port + 1}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start with an empty cache and no adapters. Clients can connect when this returns."""
        settings = self.settings
        self.counters = Counters()
        self._loras = {}
        self.engine = self._new_engine()
        if settings.kv_events:
            self._events_port = self._events_port or free_ports(2)
            self.events = EventPublisher(settings.flavor, settings.block_size)
            await self.events.open(self.kv_events, self.kv_replay)
        self.port = self.engine.port = self.port or free_ports(1)
        config = uvicorn.Config(
            self._app(),
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=0,  # requests in flight are cut
        )
        config.load()
        started = asyncio.Event()
        self._server = Server(config, started.set)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listen(HOST, self.port)]))
        await started.wait()

    async def stop(self) -> None:
        """Stop at once. Requests in flight are cut."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        self._server = self._serving = None
        if self.events is not None:
            await self.events.close()
            self.events = None

    def _new_engine(self) -> StandInEngine:
        return StandInEngine(self.settings, self.model, self.counters, lambda: self.faults, self._publish)

    def _publish(self, events: list[CacheEvent]) -> None:
        if self.events is not None:
            self.events.publish(events)

    @property
    def _model_name(self) -> str:
        return self.faults.model_name or self.settings.model_name

    def _app(self) -> Any:
        settings = self.settings
        routes = {"/v1/models": self._models, "/v1/completions": self._complete}
        if settings.flavor == "vllm":
            routes |= {"/health": self._health, "/metrics": self._vllm_metrics, "/reset_prefix_cache": self._clear}
        elif settings.flavor == "sglang":
            routes |= {"/health": self._health, "/server_info": self._sglang_info, "/flush_cache": self._clear}
        if settings.flavor != "plain":
            routes["/tokenize"] = self._tokenize
        if settings.enable_lora:
            prefix = "/v1" if settings.flavor == "vllm" else ""
            routes |= {f"{prefix}/load_lora_adapter": self._load, f"{prefix}/unload_lora_adapter": self._unload}
        if settings.kv_transfer:
            routes["/kv"] = self._kv
        app = Starlette(
            routes=[Route(path, route, methods=["GET", "POST"]) for path, route in routes.items()],
            exception_handlers={ApiFailure: self._fail},
        )

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if self.faults.hang_all:
                await _disconnected(receive)
            else:
                await app(scope, receive, send)

        return serve

    async def _fail(self, _: Request, failure: Exception) -> Response:
        assert isinstance(failure, ApiFailure)
        error = {"message": str(failure), "type": "BadRequestError", "param": None, "code": failure.status}
        body = {"object": "error", **error} if self.settings.flavor == "sglang" else {"error": error}
        return JSONResponse(body, failure.status)

    async def _complete(self, request: Request) -> Response:
        if self.faults.hang:
            await _disconnected(request.receive)
            return Response()
        try:
            if self.faults.status is not None:
                raise ApiFailure(self.faults.status, "the server fails on purpose")
            body = msgspec.json.decode(await request.body(), type=CompletionBody)
            client_id = body.rid or request.headers.get("x-request-id") or uuid.uuid4().hex
            completion = Completion(self, body, client_id, self._lora_of(body))
            if body.stream:
                return StreamingResponse(completion.stream(), media_type="text/event-stream")
            written = await _unless_disconnected(request, completion.response())
        except ApiFailure:
            self.counters.refused += 1
            raise
        return Response() if written is None else JSONResponse(written)

    def _lora_of(self, body: CompletionBody) -> str:
        """Return the name of the adapter that a request names; empty for the base model."""
        other = "" if body.model == self._model_name else body.model
        name = body.lora_path if self.settings.flavor == "sglang" else other  # SGLang's base model has any name
        if name and name not in self._loras:
            raise ApiFailure(404, f"The model `{name}` does not exist. Valid aliases: {self._model_name}.")
        return name

    async def _models(self, _: Request) -> Response:
        flavor, name = self.settings.flavor, self._model_name
        card = {"id": name, "object": "model", "owned_by": flavor}
        if flavor == "plain":
            return JSONResponse({"object": "list", "data": [card]})
        root, longest = str(self.settings.model), self.engine.max_model_len
        cards = [{**card, "root": root, "parent": None, "max_model_len": longest}]
        cards += [{**card, "id": lora, "root": path, "parent": name} for lora, path in self._loras.items()]
        return JSONResponse({"object": "list", "data": cards})

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        tokens = self.model.encode(body["prompt"], special=body["add_special_tokens"])
        return JSONResponse({"count": len(tokens), "max_model_len": self.engine.max_model_len, "tokens": tokens})

    async def _health(self, _: Request) -> Response:
        return Response(status_code=self.faults.health_status or 200)

    async def _vllm_metrics(self, _: Request) -> Response:
        engine, settings = self.engine, self.settings
        values = {
            'num_requests_running{engine="0"}': len(engine.running),
            'num_requests_waiting{engine="0"}': engine.waiting,
            'kv_cache_usage_perc{engine="0"}': engine.usage,
            f'cache_config_info{{block_size="{settings.block_size}",num_gpu_blocks="{settings.kv_blocks}"}}': 1,
        }
        return PlainTextResponse("".join(f"vllm:{name} {value}\n" for name, value in values.items()))

    async def _sglang_info(self, _: Request) -> Response:
        size = self.settings.block_size
        info = {"page_size": size, "max_total_num_tokens": self.engine.blocks * size}
        return JSONResponse(info | {"enable_deterministic_inference": self.settings.is_deterministic})

    async def _clear(self, _: Request) -> Response:
        done = self.engine.reset_prefix_cache()
        if self.settings.flavor == "vllm":
            return JSONResponse({"success": done})
        return PlainTextResponse("Cache flushed.\n" if done else "Flush cache failed.\n", 200 if done else 400)

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        name, path = body["lora_name"], body.get("lora_path", "")
        if not name or not path:
            raise ApiFailure(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self._loras:
            raise ApiFailure(400, f"The lora adapter '{name}' has already been loaded.")
        if not os.path.isdir(path):  # noqa: ASYNC240, PTH112
            raise ApiFailure(404, f"Loading lora {name} failed: No adapter found for {path}")
        self._loras[name] = path
        return JSONResponse({"success": True, "loaded_adapters": self._loras})

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if self._loras.pop(name, None) is None:
            raise ApiFailure(404, f"The lora adapter '{name}' cannot be found.")
        return JSONResponse({"success": True, "loaded_adapters": self._loras})

    async def _kv(self, request: Request) -> Response:
        kv = None if self.faults.lose_kv else self.engine.read(await request.json())
        return JSONResponse({"error": "no such KV"}, 404) if kv is None else JSONResponse({"kv": kv})


class Completion:
    """One request to `/v1/completions`. Raises ApiFailure if the request is invalid."""

    def __init__(self, server: OpenAiServer, body: CompletionBody, client_id: str, lora: str) -> None:
        self._settings = settings = server.settings
        self._model = server.model
        self._engine = server.engine
        self._faults = server.faults
        self._body = body
        self._client_id = client_id
        self._shows_ids = body.return_token_ids and settings.flavor != "plain" and not server.faults.without_token_ids
        self._decoder = server.model.decoder(())
        self._request = StandinRequest(uuid.uuid4().hex, self._read_prompt(), 0, lora, body.cache_salt)
        self._output_tokens = 0
        self._usage: dict[str, Any] = {}

    def _read_prompt(self) -> list[int]:
        prompt, longest = self._body.prompt, self._engine.max_model_len
        if isinstance(prompt, str):
            prompt = self._model.encode(prompt, special=self._body.add_special_tokens)
        elif self._settings.flavor == "plain":
            raise ApiFailure(400, "prompt must be a string")
        if len(prompt) >= longest:
            raise ApiFailure(400, f"This model's maximum context length is {longest} tokens.")
        if not prompt or max(prompt) >= self._model.vocabulary_size:
            raise ApiFailure(400, "The prompt is empty, or out of vocabulary")
        return list(prompt)

    async def stream(self) -> AsyncIterator[str]:
        """Yield the events of a stream. Raises StreamCut if a fault closes the connection."""
        async with aclosing(self._run()) as deltas:
            async for delta in deltas:
                if delta.finish_reason == "error":
                    yield _event({"error": {"message": "Internal server error", "code": 500}})
                    return
                yield _event({"id": self._client_id, "choices": [self._choice(delta.token_ids, delta.finish_reason)]})
                cut = self._faults.cut_after_tokens
                if cut is not None and self._output_tokens >= cut:
                    raise StreamCut
        yield _event({"id": self._client_id, "choices": [], "usage": self._usage})
        yield "data: [DONE]\n\n"

    async def response(self) -> dict[str, Any]:
        """Return the whole response. Raises ApiFailure if the KV of the prompt could not be fetched."""
        deltas = [delta async for delta in self._run()]
        last = deltas[-1]
        if last.finish_reason == "error":
            raise ApiFailure(500, "Internal server error")
        choice = self._choice([token_id for delta in deltas for token_id in delta.token_ids], last.finish_reason)
        return {"choices": [choice], "usage": self._usage, "kv_transfer_params": last.transfer}

    async def _run(self) -> AsyncGenerator[Delta, None]:
        """Yield the output, and update the usage before."""
        body, prompt = self._body, self._request.prompt
        sampling = Sampling(
            max_tokens=min(body.max_tokens, self._engine.max_model_len - len(prompt)),
            min_tokens=body.min_tokens,
            temperature=body.temperature,
            seed=body.seed,
            ignore_eos=body.ignore_eos,
            stop_token_ids=body.stop_token_ids,
            structured=structure_of(body.structured_outputs),
        )
        transfer: Mapping[str, Any] = body.kv_transfer_params if self._settings.kv_transfer else {}
        async with aclosing(self._engine.generate(self._request, self._client_id, sampling, transfer)) as deltas:
            async for delta in deltas:
                self._output_tokens += len(delta.token_ids)
                self._usage = {"prompt_tokens": len(prompt), "completion_tokens": self._output_tokens}
                if self._settings.prompt_tokens_details and self._settings.flavor != "plain":
                    self._usage["prompt_tokens_details"] = {"cached_tokens": delta.cached_tokens}
                yield delta

    def _choice(self, ids: list[int], reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": self._decoder.push(ids), "finish_reason": reason}
        if self._shows_ids:
            choice["token_ids"] = ids
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs(ids, max(1, self._body.logprobs))
        return choice

    def _logprobs(self, ids: list[int], count: int) -> dict[str, Any]:
        """Return the log probabilities of tokens, with the most likely ones: the generated one, then others."""
        top = []
        for token_id in ids:
            others = [other for other in self._engine.vocabulary[:count] if other != token_id]
            likeliest = [token_id, *others[: count - 1]]
            top.append({f"token_id:{other}": LOGPROB * (at + 1) for at, other in enumerate(likeliest)})
        tokens = [f"token_id:{token_id}" for token_id in ids]
        return {"tokens": tokens, "token_logprobs": [LOGPROB] * len(ids), "top_logprobs": top}


def _event(data: dict[str, Any]) -> str:
    return f"data: {msgspec.json.encode(data).decode()}\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of some work; None if the client closes the connection before, which cancels the work."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
