"""Keep the model card of a running worker on the topic `models`, and remove the cards that it replaces.

Theory of operation. The owner admits a worker only if no other worker of the model has another card. So once the worker
is a member, older cards of the model are superseded, and the worker removes those that no worker of any model uses. It
might err: a worker of another model may be starting with such a card. Each worker therefore stores its own card again
if the topic lacks it. Workers wait for a random time before that, so that usually one of them stores it.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from forebay import runtime
from forebay.events.topics import GROUPS
from forebay.ingress.model_cards import read_card
from forebay.runtime.errors import ConfigError
from forebay.transport.base import Log, LogError
from forebay.transport.directory import PARTITION as GROUPS_PARTITION
from forebay.transport.directory import Directory
from forebay.transport.models import ModelStore, UseUnknown, remove_unused, superseded_by

logger = logging.getLogger(__name__)

CHECK_S = 1.0
JITTER_S = 1.0


async def keep_card(log: Log, model: str, digest: str, folder: Path, is_member: Callable[[], bool]) -> None:
    """Keep the card of a worker stored until cancelled. An error of the log ends that with a warning."""
    store, directory = ModelStore(log), Directory(log)
    running: asyncio.Task[None] | None = None
    try:
        await directory.start()
        await store.start()
        running = asyncio.create_task(store.run())
        while not is_member():  # noqa: ASYNC110 - the state of a worker sets no event
            await asyncio.sleep(CHECK_S)
        await _remove_superseded(log, store, directory, model, digest)
        while True:
            await store.removed(digest)
            await asyncio.sleep(JITTER_S * runtime.random_int(4) / (1 << 32))
            if digest not in store.cards and not await _store_again(store, model, digest, folder):
                return
    except LogError as error:
        logger.warning("the model card %s of %s is no longer kept on the log: %s", digest, model, error)
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        store.close()
        directory.close()


async def _remove_superseded(log: Log, store: ModelStore, directory: Directory, model: str, digest: str) -> None:
    try:
        await directory.reach(await log.end(GROUPS.name, GROUPS_PARTITION))
        removed = await remove_unused(log, store, directory.groups.partitions, superseded_by(store, model, digest))
    except UseUnknown as error:
        logger.warning("kept the older model cards of %s: %s", model, error)
        return
    if removed:
        logger.info("removed the older model cards of %s: %s", model, ", ".join(removed))


async def _store_again(store: ModelStore, model: str, digest: str, folder: Path) -> bool:
    """Store the card from the model directory again. Return False if the directory has another card now."""
    try:
        found = await runtime.offload(read_card, folder)
    except (ConfigError, OSError) as error:
        logger.error("the model card %s was removed from the log, and %s cannot be read: %s", digest, folder, error)  # noqa: TRY400
        return False
    if found is None or found[0].digest() != digest:
        logger.error(
            "the model card %s was removed from the log, and %s has changed; restart the worker", digest, folder
        )
        return False
    await store.store(model, *found)
    logger.warning("the model card %s of %s was removed from the log, and is stored again", digest, model)
    return True
