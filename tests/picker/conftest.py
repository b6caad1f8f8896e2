"""A picker on a real log, called by gRPC as Envoy does. The test plays gateway, router and servers."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import msgspec
import pytest

from forebay.events.fleet import WorkerLease, WorkerSpec
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import DestinationSelected
from forebay.events.topics import PROGRESS
from forebay.events.versions import EVENTS_VERSION
from forebay.picker.messages import FULL_DUPLEX, METHOD, ProcessingRequest, ProcessingResponse
from forebay.picker.server import build_server
from forebay.picker.servers import Fallback, FallbackMode
from forebay.transport.redis.leases import embedded_leases
from tests.ingress.conftest import CHAT, NAME, Scene, make_scene
from tests.system import until

SERVERS = "10.0.0.1:8000", "10.0.0.2:8000"


class PickerScene:
    """Channel to a picker, and the scene of its ingress half."""

    def __init__(self, scene: Scene, channel: Any, fallback: Fallback, leases: Any) -> None:
        self.scene = scene
        self.fallback = fallback
        self.leases = leases
        self._channel = channel

    def call(self) -> "Call":
        return Call(open_call(self._channel))

    async def send(self, body: Any, **headers: Any) -> "Call":
        """Send a request to the picker, and return the call before its answer."""
        call = self.call()
        await call.headers(**headers)
        await call.body(body if isinstance(body, bytes) else json.dumps(body).encode())
        return call

    async def picked(self, body: Any, **changes: Any) -> tuple["Call", RequestSubmitted]:
        """Send a request, select the first server for it, and read what the gateway sends there."""
        call = await self.send(body)
        request = await self.scene.next_request()
        self.select(request, **changes)
        await call.read_request()
        return call, request

    def select(self, request: RequestSubmitted, at: int = 0, **changes: Any) -> None:
        fields: dict[str, Any] = {"worker_id": f"w{at}", "worker_epoch": 7 + at, "rank": 0, "owner_epoch": 3}
        fields |= {"endpoint": SERVERS[at], "attempt": 1 + at, **changes}
        self.scene.send(DestinationSelected(request_id=request.request_id, **fields))

    def progress(self) -> list[Any]:
        return self.scene.events(PROGRESS)

    async def reported(self, *kinds: type) -> list[Any]:
        """Wait for progress events, and return them. They are all that was reported."""
        await until(lambda: len(self.progress()) >= len(kinds))
        assert [type(one) for one in self.progress()] == list(kinds)
        return self.progress()

    async def lease(self, at: int, *, draining: bool = False, **changes: Any) -> None:
        sizes: dict[str, Any] = {"block_size": 4, "kv_blocks_total": 9, "max_num_seqs": 9, "max_num_batched_tokens": 9}
        spec = WorkerSpec(**{"worker_id": f"w{at}", "model": NAME, "endpoint": SERVERS[at], **sizes, **changes})
        payload = msgspec.msgpack.encode(WorkerLease(spec=spec, draining=draining))
        self.leases.acquire(NAME, spec.worker_id, "t", payload, 60_000)
        await self.fallback.poll()

    def count(self, event: str) -> float:
        return self.scene.registry.get_sample_value("forebay_picker_requests_total", {"event": event}) or 0.0


class Call:
    """One request of the gateway to the picker, and what the picker has answered."""

    def __init__(self, call: Any) -> None:
        self.grpc = call
        self.destination = ""
        self.sent: Any = None  # the body that the server gets
        self.answer = b""  # what the client gets

    async def write(self, **message: Any) -> None:
        await self.grpc.write(ProcessingRequest(**message))

    async def headers(
        self, path: str = CHAT, subset: Sequence[str] = (), mode: int = FULL_DUPLEX, *, ends: bool = False, **more: str
    ) -> None:
        named = {":path": path, ":method": "POST", **{name.replace("_", "-"): value for name, value in more.items()}}
        headers = {"headers": {"headers": raw(named)}, "end_of_stream": ends}
        texts = [{"string_value": one} for one in subset]
        field = {"key": "x-gateway-destination-endpoint-subset", "value": {"list_value": {"values": texts}}}
        hint = {"filter_metadata": [{"key": "envoy.lb.subset_hint", "value": {"fields": [field]}}]}
        modes = {"request_body_mode": mode, "response_body_mode": mode}
        await self.write(request_headers=headers, metadata_context=hint, protocol_config=modes)

    async def body(self, body: bytes) -> None:
        half = len(body) // 2
        await self.write(request_body={"body": body[:half]})
        await self.write(request_body={"body": body[half:], "end_of_stream": True})

    async def read_request(self) -> None:
        """Read the server and the body that the gateway sends to it."""
        first = (await self.grpc.read()).request_headers.response
        (header,) = first.header_mutation.set_headers
        assert (header.header.key, first.clear_route_cache) == ("x-gateway-destination-endpoint", True)
        self.destination = header.header.raw_value.decode()
        sent, ends = b"", False
        while not ends:
            part = (await self.grpc.read()).request_body.response.body_mutation.streamed_response
            sent, ends = sent + part.body, part.end_of_stream
        self.sent = json.loads(sent)

    async def rejected(self) -> tuple[int, str]:
        """Return status and code of the error that the client gets instead of an answer."""
        found = (await self.grpc.read()).immediate_response
        return found.status.code, json.loads(found.body)["error"]["code"]

    async def begin(self, status: int = 200, kind: str = "text/event-stream", served: str = "", **more: str) -> None:
        """Send the headers of the server's answer."""
        headers = {":status": str(status), "content-type": kind, **more}
        field = {"key": "upstream.address", "value": {"string_value": served}}
        attributes = [{"key": "envoy.filters.http.ext_proc", "value": {"fields": [field] if served else []}}]
        await self.write(response_headers={"headers": {"headers": raw(headers)}}, attributes=attributes)
        assert (await self.grpc.read()).HasField("response_headers")

    async def pass_on(self, *parts: bytes, ends: bool = True) -> bytes:
        """Send parts of the server's answer, and return what the client gets of it, once it has ended."""
        for number, part in enumerate(parts, 1):
            await self.write(response_body={"body": part, "end_of_stream": ends and number == len(parts)})
        while ends:
            found = (await self.grpc.read()).response_body.response.body_mutation.streamed_response
            self.answer += found.body
            if found.end_of_stream:
                break
        return self.answer


def open_call(channel: Any) -> Any:
    name = f"/{METHOD[0]}/{METHOD[1]}"
    open_stream = channel.stream_stream(name, ProcessingRequest.SerializeToString, ProcessingResponse.FromString)
    return open_stream()


def raw(headers: dict[str, str]) -> list[dict[str, Any]]:
    return [{"key": name, "raw_value": value.encode()} for name, value in headers.items()]


@asynccontextmanager
async def make_picker(mode: FallbackMode = "random") -> AsyncIterator[PickerScene]:
    async with make_scene(ignore_unknown_fields=True) as scene:
        owner = scene.only.owner.owner
        assert owner is not None
        scene.only.owner.owner = msgspec.structs.replace(owner, events_version=EVENTS_VERSION)
        leases = embedded_leases()
        fallback = Fallback(scene.models, leases, mode, scene.registry)
        server, port = build_server(fallback, "127.0.0.1", 0)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield PickerScene(scene, channel, fallback, leases)
        finally:
            await server.stop(None)


@pytest.fixture
async def picker() -> AsyncIterator[PickerScene]:
    async with make_picker() as made:
        yield made
