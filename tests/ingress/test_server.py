"""The HTTP server: one process per port, and failures to listen."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable

import pytest
import uvloop
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from forebay.ingress.http.server import NotListening, PortTaken, build_server, listen
from tests.harness import fork_server
from tests.harness.fork_server import ForkedProcess
from tests.harness.local import free_ports
from tests.system import until

PATIENCE_S = 120.0
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
            assert output[0].startswith(f"forebay: cannot listen on 127.0.0.1:{port} ")
        finally:
            for process in pair:
                process.kill()
                process.communicate()


def last_line(process: ForkedProcess) -> str:
    """Return the line that a service prints once it serves, empty if its process ends without it."""
    assert process.stdout is not None
    return next((line for line in process.stdout if "stop with Ctrl-C" in line), "")


@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize("parts", [(b"",), (b"body",), (b"bo", b"dy")])
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
