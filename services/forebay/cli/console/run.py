"""Run `forebay console`, and the console of `forebay up --console`, which ends with its parent.

`forebay.ingress.child_process` describes the messages of the parent; the first one has the settings of the console.
"""

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import click
import msgspec

from forebay.cli.command import ConsoleCommand
from forebay.cli.common.credentials import require_token
from forebay.cli.common.errors import explained, fail, run_service
from forebay.cli.common.logs import LoggingOptions
from forebay.cli.common.tables import bar
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.policies.alternative import FIELDS
from forebay.console.app import serve_console, tls_of
from forebay.console.console import Console
from forebay.console.settings import ConsoleSettings, SourceKind
from forebay.ingress.child_process import ChildConnection
from forebay.ingress.explain_worker import LogSource
from forebay.ingress.http.server import listen
from forebay.journal.groups import groups_of
from forebay.processes.notices import announce
from forebay.processes.service import until_signal
from forebay.replay.policies import require_allowed
from forebay.runtime.files import read_text
from forebay.transport.sqlite.log import SqliteLog

QUIET = ("forebay.live", "forebay.transport")
VARIABLE = "FOREBAY_CONSOLE_TOKEN"
WHAT_IF = "forebay.cli.console.what_if"
TOKEN_BYTES = 16
TOKEN_FILE_CHARS_MAX = 1 << 20
PROGRESS_S = 0.25


def run_console(command: ConsoleCommand) -> None:
    command.logs.start(QUIET)
    command.recording.require_one_source()
    with explained():
        settings = asyncio.run(_settings_of(command))
        tls_of(settings)
    serve_until_signal(settings)


def serve_until_signal(settings: ConsoleSettings, port_option: str = "--port") -> None:
    """Serve a console until SIGINT or SIGTERM. An error ends the command."""
    with explained():
        listener = listen(settings.host, settings.port, port_option)
    console = Console(settings, WHAT_IF)

    def on_started() -> None:
        announce(f"console of {settings.group} in {settings.name}")
        announce(f"open {console_url(settings)}")

    run_service(until_signal(_serve(console, listener, on_started)))


def beside(log: Path, group: str, port: int, ingress_url: str, policies: tuple[str, ...]) -> ConsoleSettings:
    """Return the settings of a console beside `forebay up`. Raises ConfigError if the given token is invalid."""
    return ConsoleSettings(
        source=LogSource(path=str(log.absolute()), policies=policies),
        name=str(log),
        group=group,
        port=port,
        token=console_token(None),
        ingress_url=ingress_url,
        fields=tuple(FIELDS),
    )


def console_url(settings: ConsoleSettings) -> str:
    """Return the address of the page. Browsers do not send its fragment, which contains the token."""
    scheme = "http" if settings.certfile is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{settings.port}/#token={settings.token}"


async def _serve(console: Console, listener: socket.socket, on_started: Callable[[], None]) -> None:
    """Serve a console, and show the progress of the first pass over the log."""
    showing = asyncio.create_task(_show_progress(console))
    try:
        await serve_console(console, listener, on_started)
    finally:
        showing.cancel()


async def _show_progress(console: Console) -> None:
    with bar() as progress:
        task = progress.add_task("reading the log", total=None)
        while not (state := await console.catalog.state()).is_complete and not state.error:
            total = state.log_end_offset - state.begin_offset
            progress.update(task, completed=state.end_offset - state.begin_offset, total=total or None)
            await asyncio.sleep(PROGRESS_S)


async def _settings_of(options: ConsoleCommand) -> ConsoleSettings:
    """Return the settings of a console that shows a log. Raises LogError or ConfigError if that is impossible."""
    recording, custom = options.recording, allowed_policies(options.allow_policy)
    async with recording.source() as log:
        placed = await groups_of(log)
        group = await recording.group_among(log, placed)
        await require_allowed(log, placed[group], custom)
        kind: SourceKind = "kafka"
        if isinstance(log, SqliteLog):
            kind = "file" if log.recording is None else "recording"
    path = None if recording.log is None else str(recording.log.absolute())
    kafka = None if recording.kafka is None else recording.settings()
    return ConsoleSettings(
        source=LogSource(path=path, kafka=kafka, policies=tuple(custom)),
        name=recording.name,
        kind=kind,
        group=group,
        partition=placed[group],
        cache_dir=_cache_dir(options.cache_dir, is_file=path is not None),
        host=options.host,
        port=options.port,
        allow_hosts=tuple(options.allow_host or ()),
        certfile=_text(options.ssl_certfile),
        keyfile=_text(options.ssl_keyfile),
        token=console_token(options.token_file),
        ingress_url=_checked_url(options.ingress),
        fields=tuple(FIELDS),
        trace_url=_trace_url(options.trace_url),
    )


def _trace_url(url: str) -> str:
    if url and (urlsplit(url).scheme not in ("http", "https") or "{trace_id}" not in url):
        fail(
            f"--trace-url {url}: expected an address with {{trace_id}}, such as http://127.0.0.1:16686/trace/{{trace_id}}"
        )
    return url


def _cache_dir(given: Path | None, *, is_file: bool) -> str | None:
    if given is not None:
        return str(given.absolute())
    if is_file:
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(cache) / "forebay")


def console_token(file: Path | None) -> str:
    """Return the token of clients: from a file, the environment, or random. Raises ConfigError if it is invalid."""
    if file is not None:
        where = f"--token-file {file}"
        return require_token(where, read_text(where, file, TOKEN_FILE_CHARS_MAX).strip())
    text = os.environ.get(VARIABLE, "")
    return require_token(VARIABLE, text) if text else secrets.token_urlsafe(TOKEN_BYTES)


def _checked_url(url: str | None) -> str:
    if url is None:
        return ""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        fail(f"--url {url}: expected an address such as http://127.0.0.1:8000")
    return url.rstrip("/")


def _text(path: Path | str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def main() -> None:
    """Serve the console of `forebay up` until the parent ends."""
    connection = ChildConnection()
    connection.end_with_parent()
    LoggingOptions().start(QUIET)
    try:
        serve_until_signal(msgspec.json.decode(connection.setup, type=ConsoleSettings), "--console-port")
    except click.exceptions.Exit as error:  # the message is printed; no command runs here
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
