"""A service as the engine of a worker on a real log: responses, cache reports and failures."""

import asyncio
import functools
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from forebay.events.base import pack_u32, unpack_u64
from forebay.events.control import Command
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared
from forebay.events.progress import FirstTokenEmitted, RequestFailed, RequestFinished
from forebay.events.requests import Sampling
from forebay.events.tokens import Embedded, ResponseEnded, TokenChunk, TokensEmitted
from forebay.events.topics import TOKENS
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.workers.engine import EngineError, EngineRefused
from forebay.workers.engines import service_engine
from forebay.workers.engines.service_engine import ServiceEngine
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.runtime.metrics import WorkerMetrics
from forebay.workers.runtime.worker import Worker
from forebay.workers.service import Cache, Refused, Request, endpoint, service, service_of
from tests.workers.conftest import Scene, until

NOWHERE = Path("no-model-directory")


def engine_of(
    cls: type, model: Path = NOWHERE, *, loras: dict[str, Path] | None = None, **options: Any
) -> ServiceEngine:
    """A service made of a class that only this test has."""
    cls.__module__ = f"tests.{cls.__name__}"  # or each would need a name of its own
    made = service_of(service(**{"namespace": "test", "component": "it", **options})(cls))
    assert made is not None
    settings = EngineSettings(model=model, model_name="model", block_size=4, kv_blocks=64, loras=loras or {})
    return ServiceEngine(made, settings)


@asynccontextmanager
async def serving(scene: Scene, engine: ServiceEngine) -> AsyncIterator[tuple[Worker, Callable[..., Any]]]:
    worker = scene.worker(engine=engine)
    async with scene.serving(worker):
        yield worker, functools.partial(scene.ask, max_tokens=50)


async def ended(scene: Scene, name: str) -> Any:
    await until(lambda: scene.end(name))
    return scene.end(name)


class Echo:
    """Service that repeats the prompt; one token waits for the test."""

    gate: asyncio.Event

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = self.running_max = 0
        self.closed: list[str] = []
        self.requests: list[Request] = []

    @endpoint()
    async def generate(self, request: Request) -> AsyncGenerator[int]:
        self.requests.append(request)
        self.running += 1
        self.running_max = max(self.running, self.running_max)
        try:
            for token in request.token_ids:
                yield token
                await self.gate.wait()
        finally:
            self.running -= 1
            self.closed.append(request.request_id)


async def test_response_is_the_output_of_generate(scene: Scene) -> None:
    engine = engine_of(Echo)
    async with serving(scene, engine) as (worker, send):
        assert (worker.spec.engine, worker.spec.max_num_seqs, worker.spec.tasks) == ("test.it", 64, ("generate",))
        assert not worker.spec.kv_events
        await send("whole", [5, 6, 7], lora_name="", cache_namespace="mine", priority=3)
        await send("cut", [5, 6, 7], max_tokens=2)
        whole, cut = await ended(scene, "whole"), await ended(scene, "cut")
        await until(lambda: scene.loads()[-1].running == 0)
    assert (scene.output("whole"), whole.finish_reason) == ([5, 6, 7], "stop")
    assert (scene.output("cut"), cut.finish_reason) == ([5, 6], "length")
    assert (whole.usage.prompt_tokens, whole.usage.output_tokens) == (3, 3)
    assert [type(event) for event in scene.progress()].count(FirstTokenEmitted) == 2
    request = engine.instance.requests[0]
    assert (request.cache_namespace, request.priority) == ("mine", 3)
    assert request.sampling == Sampling(max_tokens=50, temperature=0.0)
    assert scene.kv() == []


class Calls:
    """Service with an endpoint for calls, which yields the parts of the payload."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    @endpoint()
    async def generate(self, request: Request) -> AsyncGenerator[int]:
        yield 1

    @endpoint()
    async def parts(self, request: Request) -> AsyncGenerator[Any]:
        self.requests.append(request)
        for part in request.payload:
            if part == "refuse":
                raise Refused("no such part")
            yield part * 100_000 if part == "long" else part


def a_call(payload: str, name: str = "test.it.parts", **changes: Any) -> dict[str, Any]:
    return {"task": "call", "endpoint": name, "payload": payload, **changes}


def values_of(scene: Scene, name: str) -> list[str]:
    return [one for chunk in scene.chunks(name) for one in chunk.objects]


async def test_a_call_yields_values_that_count_as_tokens(scene: Scene) -> None:
    engine = engine_of(Calls)
    async with serving(scene, engine) as (worker, send):
        assert (worker.spec.tasks, worker.spec.endpoints) == (("generate",), ("test.it.parts",))
        await send("a", [5, 6], **a_call('[{"x": 1}, 2]'))
        await send("none", [], **a_call("[]"))
        a, none = await ended(scene, "a"), await ended(scene, "none")
    assert values_of(scene, "a") == ['{"x":1}', "2"]
    assert (a.finish_reason, a.usage.prompt_tokens, a.usage.output_tokens) == ("stop", 2, 2)
    assert (none.finish_reason, none.usage.output_tokens) == ("stop", 0)
    assert engine.instance.requests[0].token_ids == (5, 6)
    assert 'endpoint="test.it.parts",outcome="ok"} 2.0' in metrics(worker)


@pytest.mark.parametrize(
    ("fields", "status", "code", "yielded"),
    [
        (a_call('[1, "refuse"]'), 400, "invalid_request", ["1"]),
        (a_call("7"), 500, "engine_error", []),
        (a_call("no JSON"), 500, "engine_error", []),
        (a_call('["long"]'), 500, "engine_error", []),
        (a_call("[]", "test.it.other"), 400, "unsupported_task", []),
        (a_call("[]", "test.it.generate"), 400, "unsupported_task", []),
    ],
)
async def test_a_call_that_fails(
    scene: Scene, fields: dict[str, Any], status: int, code: str, yielded: list[str]
) -> None:
    async with serving(scene, engine_of(Calls)) as (_, send):
        await send("a", [], **fields)
        error = (await ended(scene, "a")).error
    assert ((error.status, error.code), values_of(scene, "a")) == ((status, code), yielded)


async def test_a_later_attempt_repeats_a_call_only_without_values(scene: Scene) -> None:
    chunk = TokenChunk(request_id="a", attempt=1, first_index=0, token_ids=pack_u32([0]), objects=("1",))
    await scene.append(TOKENS, 3, TokensEmitted(worker_id="w0", worker_epoch=0, owner_epoch=0, chunks=(chunk,)))
    async with serving(scene, engine_of(Calls)) as (_, send):
        await send("a", [], **a_call("[1, 2]", attempt=2))
        await send("b", [], **a_call("[1, 2]", attempt=2))
        error, again = (await ended(scene, "a")).error, await ended(scene, "b")
    assert (error.status, error.code) == (502, "response_interrupted")
    assert (values_of(scene, "a"), values_of(scene, "b"), again.error) == (["1"], ["1", "2"], None)


async def test_no_record_of_values_exceeds_the_limit_of_brokers(scene: Scene) -> None:
    large = "x" * 200_000
    async with serving(scene, engine_of(Calls)) as (_, send):
        for name in "abc":
            await send(name, [], **a_call(msgspec.json.encode([large] * 4).decode()))
        for name in "abc":
            await ended(scene, name)
    assert max(len(record.value) for record in scene.records(TOKENS, 3)) < service_engine.BATCH_BYTES_MAX + 4_096
    assert [len(values_of(scene, name)) for name in "abc"] == [4, 4, 4]


async def test_stop_tokens_end_the_response_and_are_not_emitted(scene: Scene) -> None:
    async with serving(scene, engine_of(Echo)) as (_, send):
        await send("a", [5, 6, 7], sampling=Sampling(max_tokens=9, stop_token_ids=(6,)))
        await send("b", [6, 5, 6], sampling=Sampling(max_tokens=9, stop_token_ids=(6,), min_tokens=2))
        assert (await ended(scene, "a")).finish_reason == "stop"
        assert (await ended(scene, "b")).finish_reason == "stop"
    assert (scene.output("a"), scene.output("b")) == ([5], [6, 5])


async def test_concurrency_is_bounded_and_the_queue_is_fair(scene: Scene) -> None:
    engine = engine_of(Echo, max_num_seqs=2)
    async with serving(scene, engine) as (_, send):
        engine.instance.gate.clear()
        for name in "abcd":
            await send(name, [1, 2])
        await until(lambda: scene.loads() and (scene.loads()[-1].running, scene.loads()[-1].waiting) == (2, 2))
        engine.instance.gate.set()
        for name in "abcd":
            await ended(scene, name)
        assert engine.instance.running_max == 2
        # In the order of arrival. Two of them run at once, so they may end in any order.
        assert [request.request_id for request in engine.instance.requests] == list("abcd")


async def test_cancelling_closes_the_generator_and_lets_the_next_one_run(scene: Scene) -> None:
    engine = engine_of(Echo, max_num_seqs=1)
    async with serving(scene, engine) as (_, send):
        engine.instance.gate.clear()
        for name in "abc":
            await send(name, [1, 2])
        await until(lambda: scene.output("a") == [1])
        for name in ("b", "a"):
            await scene.cancel(name)
        await until(lambda: scene.output("c") == [1])
        assert engine.instance.closed == ["a"]
        assert engine.instance.requests[0].cancelled
        engine.instance.gate.set()
        await ended(scene, "c")
    assert [event.request_id for event in scene.tokens(ResponseEnded)] == ["c"]
    assert engine.instance.closed == ["a", "c"]


async def test_generator_that_ignores_cancellation_is_closed(scene: Scene) -> None:
    class Stubborn:
        closed = False

        @endpoint()
        async def generate(self, _: Request) -> AsyncGenerator[int]:
            try:
                while True:
                    try:
                        yield 1
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        continue
            finally:
                Stubborn.closed = True

    async with serving(scene, engine_of(Stubborn)) as (_, send):
        await send("a", [1])
        await until(lambda: scene.output("a"))
        await scene.cancel("a")
        await until(lambda: Stubborn.closed)
    assert scene.tokens(ResponseEnded) == []


class FailingService:
    @endpoint()
    async def generate(self, request: Request) -> AsyncGenerator[Any]:
        for token in request.token_ids:
            match token:
                case 90:
                    raise RuntimeError("the model\nis gone")
                case 91:
                    raise Refused("no such voice")
                case 92:
                    yield 1.5
                case 93:
                    yield -1
                case 94:
                    yield "text"
                case 95:
                    yield request.text
                case 96:
                    raise RuntimeError
                case _:
                    yield token


@pytest.mark.parametrize(
    ("prompt", "status", "code", "message"),
    [
        ([1, 90], 500, "engine_error", "test.it.generate failed: RuntimeError: the model is gone"),
        ([1, 91], 400, "invalid_request", "no such voice"),
        ([92], 500, "engine_error", "TypeError: expected token ids (int) or text (str), got float"),
        ([93], 500, "engine_error", "ValueError: -1 is not a token id"),
        ([94], 500, "engine_error", "there is no tokenizer.json in no-model-directory"),
        ([95], 400, "invalid_request", "test.it has no tokenizer: there is no tokenizer.json in its model directory"),
        ([96], 500, "engine_error", "test.it.generate failed: RuntimeError"),
    ],
)
async def test_exception_of_generate_fails_only_its_request(
    scene: Scene, prompt: list[int], status: int, code: str, message: str
) -> None:
    async with serving(scene, engine_of(FailingService)) as (worker, send):
        await send("bad", prompt)
        failed = await ended(scene, "bad")
        await send("good", [7, 8])
        await ended(scene, "good")
        shown = metrics(worker)
    assert (failed.error.status, failed.error.code) == (status, code)
    assert message in failed.error.message
    assert scene.output("bad") == [token for token in prompt if token < 90]
    assert scene.output("good") == [7, 8]
    assert [event.request_id for event in scene.progress(RequestFailed)] == ["bad"]
    outcome = "failed" if status == 500 else "refused"
    assert f'forebay_endpoint_requests_total{{endpoint="test.it.generate",outcome="{outcome}"}} 1.0' in shown
    assert 'forebay_endpoint_requests_total{endpoint="test.it.generate",outcome="ok"} 1.0' in shown


def metrics(worker: Worker) -> str:
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(worker))
    return generate_latest(registry).decode()


@pytest.mark.parametrize(
    ("changes", "status", "why"),
    [
        ({"task": "embed"}, 400, "test.it has no endpoint embed"),
        ({"lora_name": "poet"}, 404, "test.it has not loaded the adapter poet"),
        ({"sampling": Sampling(max_tokens=1, logprobs=1)}, 400, "test.it does not support logprobs"),
    ],
)
async def test_unsupported_requests_are_refused(scene: Scene, changes: dict[str, Any], status: int, why: str) -> None:
    async with serving(scene, engine_of(Echo)) as (_, send):
        await send("a", [1], **changes)
        failed = await ended(scene, "a")
    assert (failed.error.status, failed.error.message) == (status, why)


async def test_queue_is_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_engine, "WAITING_MAX", 1)
    engine = engine_of(Echo, max_num_seqs=1)
    async with serving(scene, engine) as (_, send):
        engine.instance.gate.clear()
        for name in "abc":
            await send(name, [1, 2])
        failed = await ended(scene, "c")
        engine.instance.gate.set()
        await ended(scene, "b")
    assert (failed.error.status, failed.error.code) == (503, "engine_overloaded")
    assert scene.output("b") == [1, 2]


async def test_text_becomes_the_tokens_of_the_model(scene: Scene) -> None:
    class Shout:
        @endpoint()
        async def generate(self, request: Request) -> AsyncGenerator[str]:
            for word in request.text.split():
                yield f"{word.upper()} "

    model = Model(DEFAULT_MODEL)
    async with serving(scene, engine_of(Shout, DEFAULT_MODEL)) as (_, send):
        await send("a", model.encode("hello dear log"))
        assert (await ended(scene, "a")).finish_reason == "stop"
    assert model.tokenizer.decode(scene.output("a")) == "HELLO DEAR LOG "


async def test_a_generator_that_awaits_nothing_does_not_stop_the_others(scene: Scene) -> None:
    class Endless:
        @endpoint()
        async def generate(self, request: Request) -> AsyncGenerator[int]:
            while True:
                yield request.token_ids[0]

    async with serving(scene, engine_of(Endless)) as (_, send):
        await send("long", [1], max_tokens=1 << 20)
        await until(lambda: scene.output("long"))
        await send("short", [2], max_tokens=3)
        assert (await ended(scene, "short")).finish_reason == "length"
        assert scene.end("long") is None


async def test_vectors_of_a_service_that_embeds(scene: Scene) -> None:
    class Embedder:
        @endpoint()
        async def embed(self, request: Request) -> list[float]:
            return [0.5 * token for token in request.token_ids if token]

    async with serving(scene, engine_of(Embedder)) as (worker, send):
        assert worker.spec.tasks == ("embed",)
        await send("a", [1, 3], task="embed")
        assert (await ended(scene, "a")).finish_reason == "stop"
        await send("none", [0], task="embed")
        failed = await ended(scene, "none")
    (vector,) = scene.tokens(Embedded)
    assert struct.unpack("<2f", vector.vector) == (0.5, 1.5)
    assert failed.error.message == "test.it.embed failed: ValueError: got an empty vector, expected at least one number"


class Remembering:
    """Service that caches and reports the blocks of every prompt."""

    cache: Cache

    @endpoint()
    async def generate(self, request: Request) -> AsyncGenerator[int]:
        held = set(self.cache.held())
        known = [block for block in request.sequence_hashes if block in held]
        self.cache.hit(request, 4 * len(known))
        new = [block for block in request.sequence_hashes if block not in held]
        self.cache.stored(new, known[-1] if known else None)
        yield 1

    @endpoint()
    async def clear_kv_blocks(self, command: Command) -> None:
        self.cache.removed(self.cache.held()[:1])
        self.cache.cleared()


async def test_service_reports_its_cache(scene: Scene) -> None:
    engine = engine_of(Remembering, kv_events=True)
    async with serving(scene, engine) as (worker, send):
        assert worker.spec.kv_events
        first = await send("a", list(range(8)))
        await ended(scene, "a")
        second = await send("b", [*range(8), *range(8)])
        usage = (await ended(scene, "b")).usage
        assert usage.cached_tokens == 8
        engine.reset()  # an epoch begins with what is held
        assert list(engine.held(0)) == unpack_u64(second.sequence_hashes)
        with pytest.raises(ValueError, match="a block hash must be an unsigned"):
            engine.instance.cache.stored([-1])
        assert await engine.command(Command(action="clear_kv_blocks")) == ()
        await until(lambda: len(scene.kv()) == 4)
        assert engine.held(0) == ()
    stored, more, removed, _ = scene.kv()
    assert [type(event) for event in scene.kv()] == [BlocksStored, BlocksStored, BlocksRemoved, CacheCleared]
    blocks = unpack_u64(second.sequence_hashes)
    assert unpack_u64(stored.sequence_hashes) == blocks[:2] == unpack_u64(first.sequence_hashes)
    assert (unpack_u64(more.sequence_hashes), more.parent_hash) == (blocks[2:], blocks[1])
    assert unpack_u64(removed.sequence_hashes) == blocks[:1]
    assert [event.cached_tokens for event in scene.progress(FirstTokenEmitted)] == [0, 8]
    assert [event.cached_tokens for event in scene.progress(RequestFinished)] == [0, 8]


class Commanded:
    def __init__(self) -> None:
        self.did: list[str] = []

    @endpoint()
    async def generate(self, request: Request) -> AsyncGenerator[int]:
        yield 1

    @endpoint()
    async def load_lora(self, command: Command) -> None:
        if "bad" in command.lora_name:
            raise OSError(f"no adapter in {command.lora_path}")
        if "big" in command.lora_name:
            raise Refused("its rank is 4, not 8")
        self.did.append(f"load {command.lora_name} from {command.lora_path}")

    @endpoint("unload_lora")
    async def forget(self, command: Command) -> None:
        self.did.append(f"unload {command.lora_name}")


async def test_commands_are_the_control_endpoints(scene: Scene) -> None:
    engine = engine_of(Commanded, loras={"first": Path("a")})
    async with serving(scene, engine) as (worker, send):
        assert worker.spec.loras == ("first",)
        assert await engine.command(Command(action="load_lora", lora_name="poet", lora_path="dir")) == ("first", "poet")
        assert await engine.command(Command(action="load_lora", lora_name="poet", lora_path="dir")) == ("first", "poet")
        await send("a", [1], lora_name="poet")
        assert (await ended(scene, "a")).error is None
        assert await engine.command(Command(action="unload_lora", lora_name="first")) == ("poet",)
        assert await engine.command(Command(action="list_loras")) == ("poet",)
        for name, why in (("bad", "test.it.load_lora: OSError: no adapter in x"), ("big", "its rank is 4, not 8")):
            with pytest.raises(EngineRefused, match=why):
                await engine.command(Command(action="load_lora", lora_name=name, lora_path="x"))
        with pytest.raises(
            EngineRefused, match=r"test\.it has no endpoint sleep; endpoints are unload_lora, generate, load_lora"
        ):
            await engine.command(Command(action="sleep"))
        assert await engine.command(Command(action="list_loras")) == ("poet",)
    assert engine.instance.did == ["load first from a", *["load poet from dir"] * 2, "unload first"]


async def test_hooks_are_awaited_in_order(scene: Scene) -> None:
    calls: list[str] = []

    class Hooked(Echo):
        async def start(self, settings: EngineSettings) -> None:
            calls.append(f"start {settings.model_name}")

        async def check(self) -> None:
            calls.append("check")

        async def stop(self) -> None:
            calls.append(f"stop {self.closed}")
            raise RuntimeError("it may not even stop well")

    engine = engine_of(Hooked)
    async with serving(scene, engine) as (_, send):
        await until(lambda: "check" in calls)
        engine.instance.gate.clear()
        await send("a", [1, 2])
        await until(lambda: scene.output("a"))
    assert calls[0] == "start model"
    assert calls[-1] == "stop ['a']"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("start", r"test\.it failed to start: RuntimeError: there is no GPU"),
        ("check", "test.it is broken: RuntimeError: there is no GPU"),
    ],
)
async def test_a_hook_that_fails_breaks_the_engine(scene: Scene, name: str, why: str) -> None:
    async def fails(_: object) -> None:
        raise RuntimeError("there is no GPU")

    engine = engine_of(type("Broken", (Echo,), {name: fails}))
    with pytest.raises(EngineError, match=why):
        await engine.start(scene.spec())
        await engine.check()
    await engine.stop()


async def test_failed_start_of_a_service_has_a_reason(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(
        EngineError, match=r"tokenizer\.json is not a valid tokenizer: EOF while parsing an object at line"
    ):
        await engine_of(Echo, tmp_path).start(scene.spec())
    with pytest.raises(EngineError, match="a service has one rank, got 2: start more workers instead"):
        await engine_of(Echo).start(scene.spec(dp_size=2))
    with pytest.raises(EngineError, match=r"failed to start: test\.it has no endpoint load_lora"):
        await engine_of(Echo, loras={"poet": Path("x")}).start(scene.spec())
