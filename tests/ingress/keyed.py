"""An ingress with API keys of tenants on the topic `keys`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

from forebay.events.keys import KeySet
from forebay.transport.keys import KeyBook
from tests.ingress.conftest import Scene, make_scene
from tests.live.shared import background


def key_of(name: str, **fields: Any) -> KeySet:
    """Return the event of the key `fb-NAME` of the tenant NAME."""
    return KeySet(**{"key_hash": sha256(f"fb-{name}".encode()).hexdigest(), "tenant": name, **fields})


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer fb-{name}"}


@asynccontextmanager
async def keyed(*keys: KeySet, **settings: Any) -> AsyncIterator[tuple[Scene, KeyBook]]:
    """Yield an ingress that follows the topic with these keys, and a book that writes to the topic."""
    async with make_scene(**settings) as scene:
        del scene.client.headers["authorization"]
        book = KeyBook(scene.log)
        await book.start()
        for key in keys:
            await book.set(key)
        await scene.front.keys.start()
        async with background(scene.front.keys.run()):
            yield scene, book
