"""Run `forebay top`."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.console.command import ConsoleOptions
from forebay.cli.console.run import WHAT_IF, given_token, settings_of
from forebay.cli.top.screen import TopApp
from forebay.cli.top.source import Source, SourceError
from forebay.console.app import build_console_app
from forebay.console.console import Console

WITHIN_S = 30.0  # an ingress on Kafka derives the status from the log


def run_top(*, recording: Recording, url: str, token_file: Path | None, allow_policy: list[str] | None) -> None:
    """Run `forebay top`. command.py documents its options."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        fail("forebay top needs a terminal; use `forebay status` in scripts")
    if recording.log is None and recording.kafka is None:
        with explained():
            token = given_token(token_file)
        asyncio.run(_show_server(url.rstrip("/"), token))
        return
    recording.require_one_source()
    with explained():
        asyncio.run(_show_log(recording, ConsoleOptions(allow_policy=allow_policy)))


async def _show_server(url: str, token: str) -> None:
    try:
        client = httpx.AsyncClient(base_url=url, headers=_headers(token), timeout=WITHIN_S)
    except httpx.InvalidURL as error:
        fail(f"--url {url}: {error}; expected a URL such as http://127.0.0.1:8100")
    async with client:
        source = Source(client)
        try:
            await source.connect()
        except SourceError as error:
            fail(str(error))
        await TopApp(source).run_async()


async def _show_log(recording: Recording, options: ConsoleOptions) -> None:
    async with log_client(recording, options) as client:
        await TopApp(Source(client)).run_async()


@asynccontextmanager
async def log_client(recording: Recording, options: ConsoleOptions) -> AsyncIterator[httpx.AsyncClient]:
    """Follow a log as a console does, and yield a client of it. Requests stay in this process.

    Raises:
        LogError: the log cannot be read.
        Unusable: an option is invalid.
    """
    settings = await settings_of(recording, options)
    console = Console(settings, WHAT_IF)
    transport = httpx.ASGITransport(build_console_app(console, None))
    following = asyncio.create_task(console.run())
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url=f"http://{settings.host}", headers=_headers(settings.token)
        ) as client:
            yield client
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await console.close()


def _headers(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}
