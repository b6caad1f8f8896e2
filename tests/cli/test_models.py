"""Commands about a namespace with several models. Kafka is an embedded log here, which has the same topics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from forebay.cli import models
from forebay.events.base import Event
from forebay.events.codec import encode
from forebay.events.fleet import WorkerJoined, WorkerLost, WorkerSpec
from forebay.events.groups import GroupPlaced
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.topics import FLEET, GROUPS, HEARTBEATS, Topic
from forebay.journal.groups import partitions_of
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import forebay

KAFKA = ("--kafka", "127.0.0.1:1")
GROUPS_OF_LOG = ("one", "two")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a log that the commands read instead of Kafka. It has the models `one` and `two`."""
    path = tmp_path / "run.db"

    async def beat(log: SqliteLog) -> None:
        while True:
            for partition, group in enumerate(GROUPS_OF_LOG):
                event = RouterHeartbeat(group=group, router_id="r", role="owner", owner_epoch=0)
                await log.append([Draft(HEARTBEATS.name, partition, encode(HEARTBEATS, event))])
            await asyncio.sleep(0)

    @asynccontextmanager
    async def opened(_: object) -> AsyncIterator[SqliteLog]:
        with closing(SqliteLog.open(path)) as log:
            beating = asyncio.create_task(beat(log))
            yield log
            beating.cancel()

    async def place() -> None:
        with closing(SqliteLog.open(path)) as log:
            for partition, group in enumerate(GROUPS_OF_LOG):
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


def test_a_model_without_workers_is_removed(log: Path) -> None:
    async def append(topic: Topic, event: Event) -> None:
        with closing(SqliteLog.open(log)) as opened:
            await opened.append([Draft(topic.name, 1, encode(topic, event))])

    def remove(name: str) -> str:
        run = forebay("model", "remove", name, *KAFKA)
        assert run.returncode == (0 if run.stdout else 2)
        return run.stdout + run.stderr

    spec = WorkerSpec(
        worker_id="w", model="two", block_size=16, kv_blocks_total=1, max_num_seqs=1, max_num_batched_tokens=1
    )
    asyncio.run(append(FLEET, WorkerJoined(owner_epoch=0, spec=spec, lease="l", slot=0, from_offset=0)))
    assert remove("two") == "forebay: two has workers: w; stop them first\n"
    asyncio.run(append(FLEET, WorkerLost(owner_epoch=0, worker_id="w", worker_epoch=1)))
    assert remove("two") == "removed the group two, so control partition 1 is free\n"
    with closing(SqliteLog.open(log)) as opened:
        assert asyncio.run(partitions_of(opened)) == {0, 1}, "`explain` finds requests of removed models"
    assert remove("two").startswith("forebay: NAME|DIGEST: unknown model 'two'; models are: one")
