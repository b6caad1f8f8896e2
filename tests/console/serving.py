"""A console on a log, with its real child processes, and a client of its HTTP application in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from forebay.cli.console.run import WHAT_IF
from forebay.console.app import build_console_app
from forebay.console.console import Console
from forebay.console.settings import ConsoleSettings, SourceKind
from forebay.ingress.explain_worker import LogSource

TOKEN = "token-of-tests"
HEADERS = {"authorization": f"Bearer {TOKEN}"}
PATIENCE_S = 60.0


def console_settings(
    log: Path, group: str = "model", kind: SourceKind = "recording", **changes: Any
) -> ConsoleSettings:
    given: dict[str, Any] = {
        "source": LogSource(path=str(log)),
        "name": log.name,
        "kind": kind,
        "group": "model",
        "partition": 0,
        "cache_dir": None,
        "host": "127.0.0.1",
        "port": 1,
        "allow_hosts": (),
        "certfile": None,
        "keyfile": None,
        "token": TOKEN,
        "ingress_url": "",
    }
    return ConsoleSettings(**{**given, **changes})


@asynccontextmanager
async def console_client(settings: ConsoleSettings) -> AsyncIterator[httpx.AsyncClient]:
    """Run a console, and yield a client that sends its token, once the console has read the log."""
    console = Console(settings, WHAT_IF)
    running = asyncio.create_task(console.run())
    transport = httpx.ASGITransport(build_console_app(console, None))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://console", headers=HEADERS) as client:
            await until(client, lambda state: state["is_complete"] or state["error"])
            yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await console.close()


async def until(client: httpx.AsyncClient, reached: Any) -> dict[str, Any]:
    """Wait until `reached` returns true for the state of the catalog, and return the state."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            state: dict[str, Any] = (await client.get("/v1/console")).json()["state"]
            if reached(state):
                return state
            await asyncio.sleep(0.05)


async def body(client: httpx.AsyncClient, path: str, **params: Any) -> Any:
    """Return the JSON of a successful response."""
    response = await client.get(path, params=params)
    assert response.status_code == httpx.codes.OK, response.text
    return response.json()


def plain(value: Any) -> Any:
    """Return a structure as JSON shows it."""
    return msgspec.json.decode(msgspec.json.encode(value))


def comparable(moment: Any) -> Any:
    """Return a moment without what depends on the state from which it was derived.

    A checkpoint of a catalog also has the load of workers that were lost before.
    """
    found = plain(moment)
    del found["start"]
    found["lost"] = [(one["worker_id"], one["reason"]) for one in found["lost"]]
    return found


async def error(client: httpx.AsyncClient, path: str, **params: Any) -> tuple[int, str]:
    """Return status and message of an error response."""
    response = await client.get(path, params=params)
    assert response.is_error, response.text
    return response.status_code, response.json()["error"]["message"]
