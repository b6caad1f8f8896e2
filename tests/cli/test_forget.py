"""`forebay forget`. Kafka is an embedded log here, which has the same topics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from forebay.cli import forget
from forebay.events.answers import AnswerContent, AnswerDeleted
from forebay.events.codec import encode
from forebay.events.keys import KeySet
from forebay.events.request_ids import RequestLocation
from forebay.events.topics import FIXED_TOPICS, KEYS
from forebay.transport.answers import AnswerStore
from forebay.transport.base import Draft, LogError
from forebay.transport.keys import KeyBook
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import error_of, forebay
from tests.live.shared import background
from tests.system import submitted

TENANTS = ("acme", "beta")
COMMAND = ("forget", "--tenant", "acme", "--kafka", "127.0.0.1:1")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a log that the command uses in place of Kafka, with two keys and an answer per tenant."""
    path = tmp_path / "run.db"

    @asynccontextmanager
    async def opened(_: object) -> AsyncIterator[SqliteLog]:
        with closing(SqliteLog.open(path)) as log:
            yield log

    async def count(_: object) -> None: ...

    monkeypatch.setattr(forget, "kafka_log", opened)
    monkeypatch.setattr(forget, "count_topics", count)
    asyncio.run(fill(path))
    return path


async def fill(path: Path) -> None:
    with closing(SqliteLog.open(path)) as log:
        keys = [KeySet(key_hash=f"{number:012x}" + "0" * 52, tenant=TENANTS[number % 2]) for number in range(4)]
        await log.append([Draft(KEYS.name, 0, encode(KEYS, key), key.key) for key in keys])
        store = AnswerStore(log)
        async with background(store.run()):
            for number, tenant in enumerate(TENANTS):
                submission = submitted(tenant, [1], tenant=tenant)
                await store.store(tenant, RequestLocation(0, number), AnswerContent(submission=submission, events=()))


async def left(path: Path) -> tuple[list[str], list[object]]:
    """Return the tenants of the keys, and the answers."""
    with closing(SqliteLog.open(path)) as log:
        book, store = KeyBook(log), AnswerStore(log)
        await book.start()
        async with background(store.run()):
            answers = [await store.load(name, RequestLocation(0, number)) for number, name in enumerate(TENANTS)]
        return [key.tenant for key in book.keys.values()], list(answers)


def test_keys_and_answers_of_one_tenant_are_deleted(path: Path) -> None:
    run = forebay(*COMMAND, "--yes")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("acme: deleted 2 API keys and 1 kept answer\n")
    keys, (mine, other) = asyncio.run(left(path))
    assert keys == ["beta", "beta"]
    assert isinstance(mine, AnswerDeleted)
    assert isinstance(other, AnswerContent)
    assert "deleted 0 API keys and 0 kept answers" in forebay(*COMMAND, "--yes").stdout


def test_every_topic_with_private_content_is_listed(path: Path) -> None:
    del path
    lines = forebay(*COMMAND, "--yes").stdout.splitlines()
    shown = {line.split()[0] for line in lines}
    assert {topic.name for topic in FIXED_TOPICS if topic.holds} | {"work.*"} <= shown
    assert not {topic.name for topic in FIXED_TOPICS if not topic.holds} & shown


def test_nothing_is_deleted_without_confirmation(path: Path) -> None:
    what = "the API keys and the kept answers of acme in the namespace forebay"
    assert error_of(*COMMAND) == f"{what} would be deleted; confirm with --yes"
    assert len(asyncio.run(left(path))[0]) == 4


def test_an_invalid_name_and_a_failed_log_are_errors(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del path
    assert "expected 1 to 128 letters" in error_of("forget", "--tenant", "a b", "--yes")

    async def fails(_: object) -> None:
        raise LogError("no broker")

    monkeypatch.setattr(KeyBook, "start", fails)
    assert error_of(*COMMAND, "--yes") == "no broker"
