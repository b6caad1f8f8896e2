"""`forebay chat` in a terminal and between pipes."""

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from tests.cli.in_process import answering, error_of
from tests.cli.up import FOREBAY, PATIENCE_S, running

pytestmark = pytest.mark.timeout(180)
PLAIN_ENVIRONMENT = {**os.environ, "TERM": "xterm", "PYTHONUTF8": "1", "COLUMNS": "120"}
# Makes the terminal the controlling one, so that Ctrl-C is a signal.
IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A program in a terminal. Each `expect` continues after the match of the previous one."""

    def __init__(self, *command: str) -> None:
        self._here, there = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *command],
            stdin=there,
            stdout=there,
            stderr=there,
            env=PLAIN_ENVIRONMENT,
            start_new_session=True,
        )
        os.close(there)
        self._rest = ""

    def type(self, text: str) -> None:
        os.write(self._here, text.encode())

    def expect(self, pattern: str) -> str:
        """Return what the program printed before the pattern."""
        ends_s = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self._rest)) is None:
            if not select.select([self._here], [], [], max(0.0, ends_s - time.monotonic()))[0]:
                self.process.kill()
            try:
                self._rest += os.read(self._here, 65_536).decode(errors="replace")
            except OSError:  # the program has ended
                self.end()
                raise AssertionError(self._rest) from None
        before, self._rest = self._rest[: found.start()], self._rest[found.end() :]
        return before

    def prompt(self) -> str:
        """Wait for the prompt, after which the program reads keys, and return what was printed before."""
        return self.expect(r"\n[^\n]*> ")

    def end(self) -> int:
        code = self.process.wait(PATIENCE_S)
        os.close(self._here)
        return code


class Model(BaseHTTPRequestHandler):
    """Answers by the last message. `closed` is set once a client has closed the connection of an answer."""

    protocol_version = "HTTP/1.1"
    closed = Event()

    def do_GET(self) -> None:
        is_list = self.path == "/v1/models"
        self._whole(200, {"data": [{"id": "one"}, {"id": "two"}]} if is_list else {"odd": 1})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][-1]["content"]
        if text == "refuse":
            self._whole(429, {"error": {"code": "pool_full", "message": "all\nworkers are full"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        deltas = {
            "think": [{"reasoning_content": "so "}, {"reasoning_content": "then"}, {"content": "done"}],
            "attack": [{"content": "a\x1b[2Jb\u202ec\r\u2028"}, {"content": "👩\u200d💻\tx\ny"}],
            "wait": [{"content": "partial"}],
        }.get(text, [{"content": f"{body['model']}:{'|'.join(one['content'] for one in body['messages'])}"}])
        for delta in deltas:
            self._event({"id": "r1", "choices": [{"delta": delta}]})
        if text == "wait":
            assert self.connection.recv(1) == b""  # until the client closes the connection
            self.closed.set()
        elif text == "break":
            self._event({"error": {"code": "worker_lost", "message": "the worker was lost"}})
        self.close_connection = True

    def _event(self, event: Any) -> None:
        self.wfile.write(f": comment\n\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode())

    def _whole(self, status: int, body: Any) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    Model.closed.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def chat(*lines: str, url: str, **options: Any) -> subprocess.CompletedProcess[str]:
    text = "".join(f"{line}\n" for line in lines)
    command = [
        FOREBAY,
        "chat",
        "--url",
        url,
        *(part for name, value in options.items() for part in (f"--{name}", value)),
    ]
    return subprocess.run(command, input=text, capture_output=True, text=True, env=PLAIN_ENVIRONMENT, check=False)


def test_a_conversation_in_a_terminal(tmp_path: Path) -> None:
    with running("--workers", "2", "--log", str(tmp_path / "log.db")) as up:
        terminal = Terminal(FOREBAY, "chat", "--url", up.url)
        terminal.expect(f"forebay-default on {up.url}/?; /model, /explain, /new, /quit; Ctrl-D ends")
        terminal.prompt()
        terminal.type("/explain\r")
        terminal.expect("forebay: there is no answer to explain yet; send a message first")
        terminal.prompt()
        terminal.type("Hello\r")
        terminal.expect("Hello\r\n")
        assert len(terminal.prompt().split()) > 100
        terminal.type("/explain\r")
        terminal.expect(r"routed to mock-\d")
        terminal.expect(r"\*.*mock-\d")
        terminal.expect("verified: journal offsets")
        terminal.prompt()
        terminal.type("/model\r")
        terminal.expect(r"\* forebay-default\r")
        terminal.prompt()
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_ctrl_c_cancels_only_the_answer(url: str) -> None:
    terminal = Terminal(FOREBAY, "chat", "--url", url)
    terminal.prompt()
    terminal.type("not sent")
    terminal.expect("not sent")
    terminal.type(CTRL_C + "\r")  # `input` may notice the signal only with the next key
    terminal.prompt()
    terminal.type("wait\r")
    terminal.expect("partial")
    terminal.type(CTRL_C)
    terminal.expect("forebay: cancelled")
    assert Model.closed.wait(PATIENCE_S)
    terminal.prompt()
    terminal.type("next\r")
    terminal.expect(r"one:wait\|partial\|next")
    terminal.prompt()
    terminal.type("/quit\r")
    assert terminal.end() == 0


def test_reasoning_is_dim_and_control_characters_are_shown(url: str) -> None:
    terminal = Terminal(FOREBAY, "chat", "--url", url)
    terminal.prompt()
    terminal.type("think\r")
    terminal.expect(re.escape("\x1b[2mso then\x1b[0m\r\ndone\r"))
    terminal.prompt()
    terminal.type("attack\r")
    terminal.expect(re.escape("a\\x1b[2Jb\\u202ec\\r\\u2028👩\u200d💻\tx\r\ny\r"))
    terminal.prompt()
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_lines_of_a_pipe_are_messages(url: str) -> None:
    run = chat("a", "", "/model", "think", "/model two", "b", "/new", "c", "/quit", "d", url=url)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "one:a\n* one\n  two\ndone\ntwo:a|one:a|think|done|b\ntwo:c\n"


def test_a_failed_request_is_one_line_and_the_conversation_continues(url: str) -> None:
    run = chat("refuse", "break", "/model three", "/nothing", "/explain", "x", url=url, model="two")
    assert run.returncode == 1
    assert run.stdout == "two:break\ntwo:break|two:break|x\n"
    refused, broken, unknown, command, odd = run.stderr.splitlines()
    assert refused == "forebay: HTTP 429 pool_full: all\\nworkers are full"
    assert broken == "forebay: error in the stream worker_lost: the worker was lost"
    assert unknown == "forebay: unknown model 'three'; models are: one, two"
    assert command == "forebay: unknown command '/nothing'; commands are: /model, /explain, /new, /quit"
    assert odd.startswith(f"forebay: {url} sent an unexpected response (Object missing required field")


def test_a_system_that_cannot_be_used_is_named(url: str) -> None:
    assert error_of("chat", "--url", url, "--model", "x") == "unknown model 'x'; models are: one, two"
    with answering(200, '{"data": []}') as empty:
        assert "serves no model yet" in error_of("chat", "--url", empty, code=1)
    assert "does not respond" in error_of("chat", "--url", "http://127.0.0.1:9")
    assert "--api-key" in error_of("chat", "--url", url, "--api-key", "a b")
