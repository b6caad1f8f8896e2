"""HTTP server of the stand-in: the routes of the imitated server."""

import asyncio
import os
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.ingress.http.server import Server, listen
from forebay.ingress.model import Model
from tests.harness.local import free_ports
from tests.harness.openai_server.cache import CacheEvent
from tests.harness.openai_server.completions import (
    ApiFailure,
    Completion,
    CompletionBody,
    LoraBody,
    answer_failure,
    request_id_of,
    validation_failure,
)
from tests.harness.openai_server.engine import StandInEngine
from tests.harness.openai_server.events import EventPublisher
from tests.harness.openai_server.settings import Counters, Faults, ServerSettings

HOST = "127.0.0.1"
SGLANG_VERSION = "0.5.23"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MALFORMED = 'vllm:num_requests_running{engine="0" 1.0\nsglang:num_running_reqs{} one\n'
T = TypeVar("T")


class EngineCollector(Collector):
    def __init__(self, settings: ServerSettings, engine: StandInEngine, counters: Counters, model_name: str) -> None:
        self._settings = settings
        self._engine = engine
        self._counters = counters
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        yield from self._vllm() if self._settings.flavor == "vllm" else self._sglang()

    def _vllm(self) -> Iterable[Metric]:
        engine, counters, settings = self._engine, self._counters, self._settings
        labels = {"engine": "0", "model_name": self._model_name}
        gauges = {
            "num_requests_running": engine.running,
            "num_requests_waiting": engine.waiting,
            "kv_cache_usage_perc": engine.cache.used / engine.cache.total,
        }
        totals = {
            "prefix_cache_queries": counters.prompt_tokens,
            "prefix_cache_hits": counters.cached_tokens,
            "external_prefix_cache_hits": counters.fetched_tokens,
            "prompt_tokens": counters.prompt_tokens,
            "generation_tokens": counters.generated_tokens,
        }
        yield from _families("vllm", labels, gauges, totals)
        blocks = str(settings.kv_blocks)
        info = {"block_size": str(settings.block_size), "num_gpu_blocks": blocks, "num_gpu_blocks_override": blocks}
        yield from _families("vllm", {**info, "engine": "0"}, {"cache_config_info": 1}, {})

    def _sglang(self) -> Iterable[Metric]:
        engine, counters, settings = self._engine, self._counters, self._settings
        labels = {"model_name": self._model_name, "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
        tokens, used = engine.cache.total * settings.block_size, engine.cache.used * settings.block_size
        gauges = {
            "num_running_reqs": engine.running,
            "num_queue_reqs": engine.waiting,
            "token_usage": used / tokens,
            "cache_hit_rate": counters.cached_tokens / max(1, counters.prompt_tokens),
            "max_total_num_tokens": tokens,
            "page_size": settings.block_size,
            "context_len": engine.max_model_len,
        }
        totals = {
            "prompt_tokens": counters.prompt_tokens,
            "generation_tokens": counters.generated_tokens,
            "cached_tokens": counters.cached_tokens,
        }
        yield from _families("sglang", labels, gauges, totals)


def _families(
    engine: str, labels: dict[str, str], gauges: Mapping[str, float], totals: Mapping[str, float]
) -> Iterable[Metric]:
    for values, kind in ((gauges, GaugeMetricFamily), (totals, CounterMetricFamily)):
        for name, value in values.items():
            family = kind(f"{engine}:{name}", name.replace("_", " "), labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family


class OpenAiServer:
    """Stand-in for one server of an engine. Use it as an async context manager, or call `start` and `stop`.

    Args:
        port: port to listen on; 0 for a free one, which the server keeps when it is started again.

    Attributes:
        events: publisher of KV events; None if there are none.
    """

    def __init__(self, settings: ServerSettings | None = None, *, port: int = 0, **changes: Any) -> None:
        self.settings = msgspec.structs.replace(settings or ServerSettings(), **changes)
        self.faults = Faults()
        self.counters = Counters()
        self.port = port
        self.events: EventPublisher | None = None
        self._events_port = self.settings.kv_events_port
        self._model = Model(self.settings.model)
        self.engine = self._new_engine()
        self._loras: dict[str, tuple[str, int]] = {}  # directory and number
        self._loras_loaded = 0
        self._created = int(time.time())
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
        if settings.kv_events and settings.flavor != "plain":
            self._events_port = self._events_port or free_ports(2)
            self.events = EventPublisher(settings.flavor, settings.block_size)
            await self.events.open(self.kv_events, self.kv_replay)
        self.port = self.port or free_ports(1)
        listener = listen(HOST, self.port)
        if self.engine.keeper is not None:
            self.engine.keeper.port = self.port
        config = uvicorn.Config(
            self._hanging(self._app()),
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=0,  # requests in flight are cut
        )
        config.load()
        started = asyncio.Event()
        self._server = Server(config, started.set)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
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

    async def restart(self) -> None:
        """Stop, and start on the same ports with an empty cache, as after a crash."""
        await self.stop()
        await self.start()

    def _new_engine(self) -> StandInEngine:
        return StandInEngine(self.settings, self._model, self.counters, lambda: self.faults, self._publish)

    def _publish(self, events: Sequence[CacheEvent]) -> None:
        if self.events is not None:
            self.events.publish(events)

    @property
    def _model_name(self) -> str:
        return self.faults.model_name or self.settings.model_name

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        flavor = self.settings.flavor

        @app.exception_handler(ApiFailure)
        async def on_failure(_: Request, failure: ApiFailure) -> JSONResponse:
            return answer_failure(flavor, failure)

        @app.exception_handler(RequestValidationError)
        async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
            return answer_failure(flavor, validation_failure(error))

        app.get("/v1/models")(self._models)
        app.post("/v1/completions", response_model=None)(self._complete)
        if flavor != "plain":
            app.get("/health")(self._health)
            app.get("/metrics")(self._metrics)
        if flavor == "vllm":
            self._add_vllm(app)
        elif flavor == "sglang":
            self._add_sglang(app)
        return app

    def _hanging(self, app: ASGIApp) -> ASGIApp:
        """Return the application with the fault `hang_all`."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if self.faults.hang_all:
                await _disconnected(receive)
            else:
                await app(scope, receive, send)

        return serve

    def _add_vllm(self, app: FastAPI) -> None:
        app.post("/reset_prefix_cache")(self._reset_prefix_cache)
        if self.settings.enable_lora:
            app.post("/v1/load_lora_adapter")(self._load_lora)
            app.post("/v1/unload_lora_adapter")(self._unload_lora)
        if self.settings.kv_transfer:
            app.post("/kv")(self._kv)

    def _add_sglang(self, app: FastAPI) -> None:
        app.get("/server_info")(self._sglang_server)
        app.api_route("/flush_cache", methods=["GET", "POST"])(self._flush_cache)
        if self.settings.enable_lora:
            app.post("/load_lora_adapter")(self._load_lora)
            app.post("/unload_lora_adapter")(self._unload_lora)

    async def _complete(self, body: CompletionBody, request: Request) -> Response:
        faults = self.faults
        if faults.hang:
            await _disconnected(request.receive)
            return Response()
        try:
            if faults.status is not None:
                raise ApiFailure(faults.status, "the server fails on purpose", "InternalServerError")
            model_name, lora = self._served(body)
            completion = Completion(
                self.settings,
                self._model,
                self.engine,
                lambda: self.faults,
                body=body,
                request_id=request_id_of(self.settings.flavor, body, request),
                model_name=model_name,
                lora=lora,
            )
            if body.stream:
                return StreamingResponse(completion.stream(), media_type="text/event-stream")
            written = await _unless_disconnected(request, completion.response())
        except ApiFailure:
            self.counters.refused += 1
            raise
        return Response() if written is None else JSONResponse(written)

    def _served(self, body: CompletionBody) -> tuple[str, tuple[str, int] | None]:
        """Return the name of the model or adapter that a request names, and name and number of the adapter."""
        name = body.model or self._model_name
        if self.settings.flavor == "sglang":
            adapter = name.partition(":")[2]
            adapter = adapter or body.lora_path or ""
            if adapter and adapter not in self._loras:
                raise ApiFailure(400, f"Got LoRA adapter that has never been loaded: {adapter}")
            return name, (adapter, self._loras[adapter][1]) if adapter else None
        if name in self._loras:
            return name, (name, self._loras[name][1])
        if name != self._model_name:
            message = f"The model `{name}` does not exist. Valid aliases: {self._model_name}."
            raise ApiFailure(404, message, "NotFoundError", "model")
        return name, None

    async def _models(self) -> JSONResponse:
        flavor, name = self.settings.flavor, self._model_name
        card = {"id": name, "object": "model", "created": self._created, "owned_by": flavor}
        if flavor == "plain":
            return JSONResponse({"object": "list", "data": [card]})
        root = str(self.settings.model) if flavor == "vllm" else name
        longest = self.engine.max_model_len
        cards = [{**card, "root": root, "parent": None, "max_model_len": longest}]
        for lora, (path, _) in self._loras.items():
            cards.append({**card, "id": lora, "root": path, "parent": name, "max_model_len": None})
        return JSONResponse({"object": "list", "data": cards})

    async def _health(self) -> Response:
        return Response(status_code=self.faults.health_status or 200)

    async def _metrics(self) -> Response:
        match self.faults.metrics:
            case "missing":
                return JSONResponse({"detail": "Not Found"}, 404)
            case "malformed":
                return PlainTextResponse(MALFORMED)
            case "ok":
                registry = CollectorRegistry(auto_describe=False)
                registry.register(EngineCollector(self.settings, self.engine, self.counters, self._model_name))
                return PlainTextResponse(generate_latest(registry), media_type=METRICS_TYPE)

    async def _reset_prefix_cache(self) -> JSONResponse:
        return JSONResponse({"success": self.engine.reset_prefix_cache()})

    async def _flush_cache(self) -> Response:
        done = self.engine.reset_prefix_cache()
        text = "Cache flushed.\n" if done else "Flush cache failed.\n"
        return PlainTextResponse(text, 200 if done else 400)

    async def _load_lora(self, body: LoraBody) -> Response:
        name, path = body.lora_name, body.lora_path
        if not name or not path:
            raise ApiFailure(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if name == self._model_name:
            raise ApiFailure(400, f"The lora adapter '{name}' conflicts with a served base model.", "InvalidUserInput")
        if name in self._loras:
            raise ApiFailure(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        if not os.path.isdir(path):  # noqa: ASYNC240, PTH112
            raise ApiFailure(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        self._loras_loaded += 1
        self._loras[name] = path, self._loras_loaded
        return self._loaded(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_lora(self, body: LoraBody) -> Response:
        if body.lora_name not in self._loras:
            raise ApiFailure(404, f"The lora adapter '{body.lora_name}' cannot be found.", "NotFoundError")
        del self._loras[body.lora_name]
        return self._loaded(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _loaded(self, message: str) -> Response:
        if self.settings.flavor == "vllm":
            return PlainTextResponse(message)
        loaded = {name: path for name, (path, _) in self._loras.items()}
        return JSONResponse({"success": True, "error_message": "", "loaded_adapters": loaded})

    async def _kv(self, request: Request) -> JSONResponse:
        keeper = self.engine.keeper
        contents = None if keeper is None or self.faults.lose_kv else keeper.read(await request.json())
        return JSONResponse({"error": "no such KV"}, 404) if contents is None else JSONResponse({"contents": contents})

    async def _sglang_server(self) -> JSONResponse:
        settings, engine = self.settings, self.engine
        info: dict[str, Any] = {
            "model_path": str(settings.model),
            "served_model_name": self._model_name,
            "page_size": settings.block_size,
            "max_running_requests": settings.max_num_seqs,
            "context_length": engine.max_model_len,
            "max_total_num_tokens": engine.cache.total * settings.block_size,
            "kv_events": None,
            "version": SGLANG_VERSION,
        }
        if self.events is not None:
            place = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": self._events_port}
            info["kv_events"] = {**place, "topic": "", "block_size": settings.block_size}
        return JSONResponse(info)


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
