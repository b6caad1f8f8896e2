"""Run `forebay` in the test process, which avoids starting a process and its imports.

Use for tests of the output and the exit code of a command. Each command has one test that starts a process.
"""

import io
import json
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.simulate import simulations

PRELOADED = ["forebay.cli.simulate.command", "forebay.cli.simulate.against", "forebay.cli.simulate.sweep"]

Finished = subprocess.CompletedProcess[str]


def forebay(*arguments: object) -> Finished:
    """Run a command. An exception that the command does not handle is raised."""
    given = [str(argument) for argument in arguments]
    with imports_undone():
        run = CliRunner().invoke(app, given, catch_exceptions=False)
    return Finished(given, run.exit_code, run.stdout, run.stderr)


def error_of(*arguments: object, code: int = 2) -> str:
    """Run a command that fails without output. Return its error, in one line unless the usage is wrong."""
    run = forebay(*arguments)
    assert (run.returncode, run.stdout) == (code, ""), run.stdout + run.stderr
    assert run.stderr.count("\n") == 1 or run.stderr.startswith("Usage: "), run.stderr
    return run.stderr.removeprefix("forebay: ").removesuffix("\n")


def json_of(*arguments: object, code: int = 0) -> Any:
    """Run a command with `--json`, and return its decoded output."""
    run = forebay(*arguments, "--json")
    assert run.returncode == code, run.stdout + run.stderr
    return json.loads(run.stdout)


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """Yield the address of an HTTP server that answers every request alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Terminal(io.StringIO):
    """Text that a command takes for a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(columns: int, *arguments: object) -> str:
    """Return what a command prints on a terminal with this many columns, without styles."""
    terminal = Terminal()
    with redirect_stdout(terminal), suppress(SystemExit), patch.dict("os.environ", COLUMNS=str(columns)):
        app([str(argument) for argument in arguments], prog_name="forebay")
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())


@contextmanager
def imports_undone() -> Iterator[None]:
    """Remove modules imported from the current directory, and its entry in the search path."""
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == Path.cwd():
                del sys.modules[name]


def fork_from_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of simulations from a server with the simulator imported, which saves a second for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    warm = SimpleNamespace(get_context=lambda _: context, active_children=multiprocessing.active_children)
    monkeypatch.setattr(simulations, "multiprocessing", warm)
