"""A worker keeps its model card on the log, and removes older cards of its model."""

import asyncio
import shutil
from pathlib import Path

import pytest

from forebay.cli.processes import card_keeper
from forebay.cli.processes.card_keeper import keep_card
from forebay.events.models import ModelCard
from forebay.ingress.model import DEFAULT_MODEL
from forebay.ingress.model_cards import read_card
from forebay.transport.base import Log
from forebay.transport.models import ModelStore, stored_card
from forebay.transport.sqlite.log import SqliteLog


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_keeper, "CHECK_S", 0.0)
    monkeypatch.setattr(card_keeper, "JITTER_S", 0.0)


async def test_a_removed_card_is_stored_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, folder = SqliteLog.open(None), tmp_path / "model"
    shutil.copytree(DEFAULT_MODEL, folder)
    digest = await stored_card(log, "m", *found_in(folder))
    other = ModelStore(log)
    await other.start()
    reading = asyncio.create_task(other.run())
    keeping = asyncio.create_task(keep_card(log, "m", digest, folder, lambda: True))
    await other.remove([digest])
    await other.stored(digest)
    assert await other.load(digest) == found_in(folder)[1]
    (folder / "config.json").write_text("{}")
    await other.remove([digest])
    await keeping
    assert f"{folder} has changed; restart the worker" in caplog.text
    reading.cancel()
    other.close()
    log.close()


async def test_a_member_removes_the_older_cards_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, folder = SqliteLog.open(None), tmp_path / "model"
    shutil.copytree(DEFAULT_MODEL, folder)
    card, files = found_in(folder)
    older = await stored_card(log, "m", card_like(card), files)
    digest = await stored_card(log, "m", card, files)

    async def in_use(_: Log, partitions: dict[str, int]) -> dict[str, str]:
        assert partitions == {}
        return {"m": digest}

    monkeypatch.setattr("forebay.transport.model_use.cards_in_use", in_use)
    joined = asyncio.Event()
    keeping = asyncio.create_task(keep_card(log, "m", digest, folder, joined.is_set))
    store = ModelStore(log)
    await store.start()
    assert store.cards.keys() == {older, digest}
    joined.set()
    reading = asyncio.create_task(store.run())
    await store.removed(older)
    assert store.cards.keys() == {digest}
    for task in (keeping, reading):
        task.cancel()
    await asyncio.gather(keeping, reading, return_exceptions=True)
    store.close()
    log.close()


def found_in(folder: Path) -> tuple[ModelCard, dict[str, bytes]]:
    found = read_card(folder)
    assert found is not None
    return found


def card_like(card: ModelCard) -> ModelCard:
    """Return another card with the same files."""
    return ModelCard(files=card.files, context_tokens=card.context_tokens + 1)
