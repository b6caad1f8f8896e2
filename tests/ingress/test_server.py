"""The HTTP server: listening, TLS, drain and shutdown."""

import asyncio
import contextlib
import json
import os
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import trustme
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from forebay.events.requests import RequestCancelled
from forebay.ingress.http import server as tls
from forebay.ingress.http.endpoint import Endpoint, TlsFiles
from forebay.ingress.http.server import NotListening, PortTaken, build_server, listen, serve_until_drained
from forebay.runtime.errors import ConfigError
from tests.harness import fork_server
from tests.harness.fork_server import ForkedProcess
from tests.harness.local import free_ports
from tests.ingress.conftest import EMBED, NAME, TEXT, Scene, error, make_scene
from tests.system import PATIENCE_S, until

ROUNDS = 2
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def bound(port: int) -> socket.socket:
    """Return a socket that is bound and does not listen, as several sockets can be."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    return made


def test_a_second_listener_is_rejected_before_the_first_serves() -> None:
    port = free_ports(1)
    with listen("127.0.0.1", port), pytest.raises(PortTaken, match=f"127.0.0.1:{port} .*choose another --port"):
        listen("127.0.0.1", port)
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_server_that_cannot_listen_does_not_call_on_started(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    port = free_ports(1)
    announced: list[bool] = []

    async def serve() -> None:
        server = build_server(FastAPI(), lambda: announced.append(True))
        await server.serve(sockets=[late])

    with bound(port) as late, bound(port) as first, asyncio.Runner(loop_factory=loop) as runner:
        first.listen()
        with pytest.raises(PortTaken, match="cannot serve HTTP"):
            runner.run(serve())
    assert announced == []


def test_a_server_ends_when_its_listening_socket_fails() -> None:
    async def serve() -> None:
        def fail() -> None:
            os.close(listener.detach())  # uvloop, too, closes a listening socket that failed

        await build_server(FastAPI(), fail).serve(sockets=[listener])

    listener = listen("127.0.0.1", free_ports(1))
    with (
        asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner,
        pytest.raises(NotListening, match="no longer served"),
    ):
        runner.run(serve())


@pytest.mark.parametrize("loop", LOOPS)
def test_responses_are_sent_without_delay(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def serve() -> bool:
        server = build_server(FastAPI(), started.set)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await started.wait()
        _, writer = await asyncio.open_connection(*listener.getsockname())
        await until(lambda: len(server.server_state.connections) == 1)
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        no_delay = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        server.should_exit = True
        await serving
        return bool(no_delay)

    listener = listen("127.0.0.1", free_ports(1))
    started = asyncio.Event()
    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(serve())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_of_two_services_on_the_same_port_exits() -> None:
    for _ in range(ROUNDS):
        port = free_ports(1)
        command = ["up", "--port", str(port), "--workers", "1"]
        pair = [fork_server.start(*command, stderr=subprocess.PIPE) for _ in range(2)]
        try:
            # Each ends its output: the loser by its exit, the winner by the last line of its announcement.
            ends = [last_line(process) for process in pair]
            assert sorted(line != "" for line in ends) == [False, True], ends
            loser = pair[ends.index("")]
            assert loser.wait(PATIENCE_S) == 2
            assert loser.stderr is not None
            output = loser.stderr.read().splitlines()
            assert len(output) == 1
            holder = pair[1 - ends.index("")].pid
            text = f"forebay: cannot listen on 127.0.0.1:{port} (Address already in use by process {holder}, "
            assert output[0].startswith(text)
        finally:
            for process in pair:
                process.kill()
                process.communicate()


def last_line(process: ForkedProcess) -> str:
    """Return the line that a service prints once it serves, empty if its process ends without it."""
    assert process.stdout is not None
    return next((line for line in process.stdout if "stop with Ctrl-C" in line), "")


@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize("parts", [(b"",), (b"bo", b"dy")])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_head_does_not_wait_for_its_body(
    loop: Callable[[], asyncio.AbstractEventLoop], parts: tuple[bytes, ...], *, is_delayed: bool
) -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]})
        if is_delayed:
            await head_received.wait()
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    async def request() -> bytes:
        server = build_server(app, started.set)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await started.wait()
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            head_received.set()
            rest = await reader.read()
            writer.close()
        server.should_exit = True
        await serving
        return head + rest

    listener = listen("127.0.0.1", free_ports(1))
    started, head_received = asyncio.Event(), asyncio.Event()
    with asyncio.Runner(loop_factory=loop) as runner:
        response = runner.run(request())
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part)
    assert response.startswith(b"HTTP/1.1 200 OK\r\nx-a: b\r\n")
    assert response.endswith(b"\r\n\r\n" + chunks + b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("address", "has_key", "allowed", "is_open"),
    [
        ("127.0.0.1", False, False, False),
        ("::1", False, False, False),
        ("::ffff:127.0.0.1", False, False, False),
        ("0.0.0.0", True, False, False),
        ("0.0.0.0", True, True, False),
        ("192.168.1.2", False, True, True),
        ("::", False, True, True),
    ],
)
def test_other_machines_need_a_key_or_permission(address: str, has_key: bool, allowed: bool, is_open: bool) -> None:
    endpoint = Endpoint(address, 8000, allow_anonymous=allowed)
    assert endpoint.is_open(address, has_key=has_key) is is_open


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.2"])
def test_an_open_address_is_rejected(address: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {address} is not a loopback address.*--api-key.*--allow-anonymous"):
        Endpoint(address, 8000).is_open(address, has_key=False)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


def write(authority: trustme.CA, folder: Path) -> TlsFiles:
    """Write a new certificate for 127.0.0.1 and its private key."""
    folder.mkdir()
    issued = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return TlsFiles(folder / "cert.pem", folder / "key.pem")


def test_connections_that_never_finish_their_handshake_count_towards_the_limit(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "REFUSED_MAX", 0)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the event loop of every service
        runner.run(_silent_connections(write(authority, tmp_path / "a"), trusted))


async def _silent_connections(files: TlsFiles, trusted: ssl.SSLContext) -> None:
    async def closed(reader: asyncio.StreamReader) -> bool:
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        return True

    async with make_scene() as scene, scene.served(files, connections_max=3) as (port, _):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        ends = [asyncio.create_task(closed(reader)) for reader, _ in silent]
        await until(lambda: sum(end.done() for end in ends) == 2)
        assert scene.metric('forebay_ingress_refused_total{code="connections_exhausted"} 2.0')
        for _, writer in silent:
            writer.close()
        async with httpx.AsyncClient(verify=trusted) as client, asyncio.timeout(PATIENCE_S):
            response: httpx.Response | None = None
            while response is None:
                with contextlib.suppress(httpx.TransportError):  # until the server notices that they are closed
                    response = await client.get(f"https://127.0.0.1:{port}/live")
        assert response.status_code == httpx.codes.OK
        await asyncio.gather(*ends)


@pytest.mark.parametrize("joined", [False, True])
async def test_the_openai_client_uses_https(authority: trustme.CA, tmp_path: Path, joined: bool) -> None:
    files = write(authority, tmp_path / "a")
    if joined:
        both = tmp_path / "both.pem"
        both.write_bytes((tmp_path / "a/key.pem").read_bytes() + (tmp_path / "a/cert.pem").read_bytes())
        files = TlsFiles(both)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    async with make_scene(api_keys=("key",)) as scene, scene.served(files) as (port, _):
        http_client = openai.DefaultAsyncHttpxClient(verify=trusted)
        base_url = f"https://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="key", http_client=http_client) as client:
            pending = asyncio.create_task(client.completions.create(model=NAME, prompt="a"))
            request = await scene.next_request()
            scene.reply(request.request_id, " b")
            assert (await pending).choices[0].text == " b"
            page = {"origin": f"https://127.0.0.1:{port}", "sec-fetch-site": "same-origin"}
            assert [one.id async for one in client.models.list(extra_headers=page)] == [NAME]


def served_serial(port: int) -> int:
    """Return the number of the certificate that a new connection gets."""
    return x509.load_pem_x509_certificate(ssl.get_server_certificate(("127.0.0.1", port)).encode()).serial_number


@pytest.mark.parametrize("loop", LOOPS)
def test_a_renewed_certificate_is_served_to_new_connections(
    loop: Callable[[], asyncio.AbstractEventLoop],
    authority: trustme.CA,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner, caplog.at_level("WARNING", "forebay"):
        runner.run(_renewals(authority, tmp_path))
    messages = [one.getMessage() for one in caplog.records if "--ssl-certfile" in one.getMessage()]
    assert [message.partition(": ")[2] for message in messages] == [
        "expected a certificate and its private key in PEM format; the previous certificates stay in use",
        "the private key does not belong to the certificate; the previous certificates stay in use",
        f"No such file or directory; check --ssl-certfile {tmp_path}/a/cert.pem --ssl-keyfile {tmp_path}/a/key.pem; "
        "the previous certificates stay in use",
    ]


async def _renewals(authority: trustme.CA, folder: Path) -> None:
    files = write(authority, folder / "a")
    renewed = write(authority, folder / "b")
    numbers = [x509.load_pem_x509_certificate(one.certfile.read_bytes()).serial_number for one in (files, renewed)]
    whole, key = renewed.certfile.read_bytes(), (folder / "b/key.pem").read_bytes()
    async with make_scene() as scene, scene.served(files) as (port, _):

        async def serials(count: int = 1) -> list[int]:
            return [await asyncio.to_thread(served_serial, port) for _ in range(count)]

        assert await serials() == numbers[:1]
        files.certfile.write_bytes(whole[: len(whole) // 2])
        assert await serials(2) == numbers[:1] * 2
        files.certfile.write_bytes(whole)
        assert await serials(2) == numbers[:1] * 2
        (folder / "a/key.pem").unlink()
        assert await serials() == numbers[:1]
        (folder / "a/key.pem").write_bytes(key)
        assert await serials(2) == numbers[1:] * 2
        assert scene.metric("forebay_ingress_certificate_unusable_total 3.0")


def test_unusable_files_are_rejected(authority: trustme.CA, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(authority, tmp_path / name)
    cert, key, foreign, missing = (tmp_path / name for name in ("a/cert.pem", "a/key.pem", "b/key.pem", "none"))
    encrypted = tmp_path / "encrypted.pem"
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    encrypted.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    for pair, text in (
        ((missing, key), f"cannot read {missing}: No such file or directory"),
        ((cert, missing), f"cannot read {missing}: No such file or directory"),
        ((cert, foreign), "the private key does not belong to the certificate"),
        ((cert, None), "expected a certificate and its private key in PEM format"),
        ((key, cert), "expected a certificate and its private key in PEM format"),
        ((cert, encrypted), "the private key is encrypted"),
    ):
        with pytest.raises(ConfigError) as caught:
            TlsFiles(*pair)
        assert text in str(caught.value)
        assert f"--ssl-certfile {pair[0]}" in str(caught.value)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("localhost", "http://localhost:8000"),
        ("10.0.0.5", "http://10.0.0.5:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
    ],
)
def test_url_for_processes_of_this_machine(host: str, url: str) -> None:
    assert Endpoint(host, 8000).own_url == url


LONG_S = 3600.0
STREAM = {"model": NAME, "prompt": "hi", "max_tokens": 9, "stream": True}
SHUTTING_DOWN = {
    "message": "the server is shutting down",
    "type": "server_error",
    "param": None,
    "code": "shutting_down",
}


class Served(NamedTuple):
    """A client of an ingress that serves on a socket, and the task that serves."""

    client: httpx.AsyncClient
    serving: "asyncio.Task[None]"

    def start_request(self, **changes: Any) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.client.post(TEXT, json={**STREAM, **changes}))


@asynccontextmanager
async def served(scene: Scene, drain_s: float) -> AsyncIterator[Served]:
    listener, port = scene.listen()
    server = build_server(scene.app)
    interrupt, drain = scene.front.slot.interrupt_all, scene.front.drain
    serving = asyncio.create_task(serve_until_drained(server, listener, drain, interrupt, drain_s))
    await until(lambda: server.started)
    # A client that gives up would end a request that the server failed to end.
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None) as client:
        try:
            yield Served(client, serving)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def data_of(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]


async def test_streams_in_flight_complete_and_new_requests_are_rejected(scene: Scene) -> None:
    async with served(scene, LONG_S) as one:
        streaming, whole = one.start_request(), one.start_request(stream=False)
        requests = [await scene.next_request() for _ in range(2)]
        scene.front.drain.begin()
        for path in ("/ready", "/health", "/v1/models"):
            refused = await one.client.get(path)
            assert (refused.status_code, refused.json()["error"]) == (503, SHUTTING_DOWN)
            assert refused.headers["connection"] == "close"
            assert int(refused.headers["retry-after"]) >= 1
        refused = await one.start_request()
        assert error(refused) == (503, "shutting_down")
        assert (await one.client.get("/live")).status_code == 200
        for request in requests:
            scene.emit_text(request.request_id, " good")
            scene.end(request.request_id)
        assert data_of(await streaming)[-1] == "[DONE]"
        assert (await whole).json()["choices"][0]["text"] == " good"
        await one.serving
    assert scene.requests(RequestCancelled) == []


async def test_requests_in_flight_at_the_end_of_the_drain_fail_and_are_cancelled(scene: Scene) -> None:
    """A stream that has begun is not cancelled, because its client may resume it at another ingress."""
    async with served(scene, 0.0) as one:
        streaming, whole = one.start_request(), one.start_request(stream=False)
        embedding = asyncio.create_task(one.client.post(EMBED, json={"model": NAME, "input": "hi"}))
        requests = [await scene.next_request() for _ in range(3)]
        first = next(request for request in requests if request.sampling.max_tokens == 9)
        scene.emit_text(first.request_id, " good")
        scene.front.drain.begin()
        responses = [await streaming, await whole, await embedding]
        await one.serving
    cut = [response for response in responses if response.status_code == 200]
    assert {json.loads(data_of(response)[-1])["error"]["code"] for response in cut} <= {"shutting_down"}
    others = [response for response in responses if response.status_code != 200]
    assert {error(response) for response in others} == {(503, "shutting_down")}
    cancelled = {event.request_id: event.reason for event in scene.requests(RequestCancelled)}
    unread = [request.request_id for request in requests if request is not first]
    assert cancelled == dict.fromkeys(unread, "the server is shutting down")


async def test_an_interrupted_stream_ends_with_an_error_event(scene: Scene) -> None:
    async def begin() -> None:
        scene.emit_text((await scene.next_request()).request_id, " good")

    async with served(scene, LONG_S) as one:
        beginning = asyncio.create_task(begin())
        async with one.client.stream("POST", TEXT, json=STREAM) as response:
            await beginning
            lines = response.aiter_lines()
            assert await anext(lines) == "id: 0-1-0"
            assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == " good"
            scene.front.drain.begin()
            scene.front.drain.hurry()
            rest = [line.removeprefix("data: ") async for line in lines if line]
        assert [json.loads(line) for line in rest] == [{"error": SHUTTING_DOWN}], "without an id"
        await one.serving
    assert not scene.requests(RequestCancelled), "the client may resume the stream at another ingress"


async def test_a_second_signal_ends_streams_at_once_with_an_error(scene: Scene) -> None:
    async with served(scene, LONG_S) as one:
        streaming = one.start_request()
        await scene.next_request()
        scene.front.drain.begin()
        one.serving.cancel()
        assert (await streaming).json()["error"] == SHUTTING_DOWN
        with pytest.raises(asyncio.CancelledError):
            await one.serving


@pytest.mark.timeout(25)  # less than the 30 s after which an ingress ends a request by itself
async def test_a_stalled_client_does_not_delay_the_shutdown(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forebay.ingress.drain.CLOSE_S", 0.01)
    async with served(scene, 0.0) as one:
        streaming = one.start_request()
        request = await scene.next_request()
        monkeypatch.setattr(scene.group.replies, "interrupt_all", lambda _: None)
        scene.front.drain.begin()
        await one.serving
        with contextlib.suppress(httpx.TransportError):
            await streaming
    assert "Traceback" not in caplog.text
    assert [event.request_id for event in scene.requests(RequestCancelled)] == [request.request_id]


async def test_an_idle_ingress_ends_at_once(scene: Scene) -> None:
    async with served(scene, LONG_S) as one:
        assert (await one.client.get("/ready")).status_code == 200  # and keeps its connection
        scene.front.drain.begin()
        await one.serving


async def test_a_request_that_is_still_arriving_at_the_end_of_the_drain_gets_503(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing interrupts a request without a response on the log, so uvicorn cancels it."""
    monkeypatch.setattr("forebay.ingress.drain.CLOSE_S", 0.01)

    async with served(scene, 0.0) as one:
        reader, writer = await asyncio.open_connection(one.client.base_url.host, one.client.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        writer.write(b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{")
        await until(lambda: scene.front.drain.in_flight == 1)
        scene.front.drain.begin()
        await one.serving
        head, body = (await reader.read()).split(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 503")
    assert json.loads(body)["error"]["type"] == "server_error"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
