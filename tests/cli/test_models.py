"""Commands about a namespace with several models. Kafka is an embedded log here, which has the same topics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from forebay.cli import models
from forebay.events.codec import encode
from forebay.events.groups import GroupPlaced
from forebay.events.topics import GROUPS
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import forebay

KAFKA = ("--kafka", "127.0.0.1:1")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a log that the commands read instead of Kafka. It has the models `one` and `two`."""
    path = tmp_path / "run.db"

    @asynccontextmanager
    async def opened(_: object) -> AsyncIterator[SqliteLog]:
        with closing(SqliteLog.open(path)) as log:
            yield log

    async def place() -> None:
        async with opened(None) as log:
            for partition, group in enumerate(("one", "two")):
                event = GroupPlaced(group=group, partition=partition)
                await log.append([Draft(GROUPS.name, 0, encode(GROUPS, event), group.encode())])

    async def count(_: object) -> None: ...

    asyncio.run(place())
    monkeypatch.setattr(models, "kafka_log", opened)
    monkeypatch.setattr(models, "count_topics", count)
    return path


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("prod tow", "unknown model 'tow'; models are: one, two"),
        ("prod one=9 three=1", "unknown model 'three'; models are: one, two"),
        ("prod one --fallback three", "unknown model 'three'"),
        ("one two", "one is the name of a model, so requests for it never use the alias"),
        ("prod prod", "prod is an alias, and an alias must name models"),
        ("prod stable", "stable is an alias, and an alias must name models"),
    ],
)
def test_an_alias_must_name_models(arguments: str, problem: str, log: Path) -> None:
    def alias(*given: str) -> tuple[int, str, str]:
        run = forebay("model", "alias", *given, *KAFKA)
        return run.returncode, run.stdout, run.stderr

    assert alias("stable", "one") == (0, "alias stable: one 100%\n", "")
    code, out, error = alias(*arguments.split())
    assert (code, out) == (2, "")
    assert error.startswith(f"forebay: {problem}")
    assert "--force sets the alias" in error
    code, out, error = alias(*arguments.split(), "--force")
    assert (code, out[:6]) == (0, "alias ")
    assert error.startswith(f"forebay: warning: {problem}")
    assert alias("prod", "--remove")[0] == 0
