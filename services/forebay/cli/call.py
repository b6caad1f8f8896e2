"""`forebay call`: call an endpoint of a component."""

import asyncio
import sys
from typing import Any

import click
import httpx
import msgspec

from forebay.cli.command import CallCommand
from forebay.cli.common.credentials import client_headers
from forebay.cli.common.errors import BROKEN, USAGE, explained, fail
from forebay.cli.common.failures import advice
from forebay.workers.client import CallFailed, call

INVALID = frozenset({400, 401, 404, 413})


def run_call(command: CallCommand) -> None:
    raw = sys.stdin.read() if command.payload == "-" else command.payload
    try:
        payload = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        fail(f"the argument is not valid JSON: {error}")
    with explained():
        headers = client_headers(command.api_key)
    try:
        asyncio.run(_print(command, payload, headers))
    except CallFailed as error:
        fail(str(error), USAGE if error.status in INVALID else BROKEN)
    except (httpx.ConnectError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        fail(f"{command.url} does not respond ({error!r}); {advice(error)}")


async def _print(command: CallCommand, payload: Any, headers: dict[str, str]) -> None:
    async for value in call(command.name, payload, url=command.url, headers=headers):
        click.echo(msgspec.json.encode(value))
