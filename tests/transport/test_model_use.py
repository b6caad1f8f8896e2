"""Removing model cards that no worker uses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from forebay.events.codec import encode
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.topics import HEARTBEATS
from forebay.transport import model_use
from forebay.transport.base import Draft
from forebay.transport.model_use import UseUnknown, cards_in_use, remove_unused
from forebay.transport.models import ModelStore
from forebay.transport.sqlite.log import SqliteLog
from tests.transport.cards import FILES, card_of

CARDS = [card_of(FILES, context_tokens=tokens) for tokens in (1, 2, 3)]
GROUPS = {"a": 0, "b": 1}


@asynccontextmanager
async def beating(log: SqliteLog, **cards: str) -> AsyncIterator[None]:
    """Write heartbeats of the owners of these groups, whose workers have these cards, until the body ends."""

    async def beat() -> None:
        while True:
            for group, card in cards.items():
                one = RouterHeartbeat(group=group, router_id="r", role="owner", card=card, released=card == "")
                await log.append([Draft(HEARTBEATS.name, GROUPS[group], encode(HEARTBEATS, one))])
            await asyncio.sleep(0)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


@pytest.fixture
async def store(log: SqliteLog) -> AsyncIterator[ModelStore]:
    store = ModelStore(log)
    await store.start()
    for card in CARDS:
        await store.store("a", card, FILES)
    yield store
    store.close()


async def test_cards_that_workers_use_are_kept(log: SqliteLog, store: ModelStore) -> None:
    first, second, third = (card.digest() for card in CARDS)
    async with beating(log, a=third, b=first):
        assert await cards_in_use(log, GROUPS) == {"a": third, "b": first}
        assert await remove_unused(log, store, GROUPS, [first, second]) == [second]
        assert await remove_unused(log, store, GROUPS, [first, second]) == []
    assert list(store.cards) == [first, third]


@pytest.mark.parametrize("card", ["", None])
async def test_nothing_is_removed_while_a_group_has_no_owner(
    log: SqliteLog, store: ModelStore, monkeypatch: pytest.MonkeyPatch, card: str | None
) -> None:
    monkeypatch.setattr(model_use, "HEARTBEATS_S", 0.2 if card is None else 60.0)
    owners = {"a": CARDS[0].digest()} if card is None else {"a": CARDS[0].digest(), "b": card}
    async with beating(log, **owners):
        with pytest.raises(UseUnknown, match="no router owns b now, so it is unknown which model cards"):
            await remove_unused(log, store, GROUPS, [CARDS[1].digest()])
    assert len(store.cards) == len(CARDS)
