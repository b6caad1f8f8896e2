"""Life cycle of a worker and its requests on a real log: admission, work, records, and the loss of its epoch."""

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay.core.block_hashes import hash_seed, sequence_hashes
from forebay.events.base import Event, pack_u32, unpack_u64
from forebay.events.codec import encode
from forebay.events.control import Command
from forebay.events.fleet import (
    OwnershipAnnounced,
    WorkerDraining,
    WorkerJoined,
    WorkerLease,
    WorkerLost,
    WorkerRecovered,
    WorkerSuspect,
)
from forebay.events.kv import BlocksStored
from forebay.events.progress import CommandDone, FirstTokenEmitted, OutputGrown, RequestFailed, RequestFinished
from forebay.events.tokens import AttemptStarted, ResponseEnded, TokensEmitted, Usage
from forebay.events.topics import FLEET
from forebay.events.work import ReannounceCache, ReleaseKv, WorkCancelled, WorkerCommand, WorkItem
from forebay.transport.base import Draft
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.runtime import request_table
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from forebay.workers.runtime.metrics import WorkerMetrics
from forebay.workers.runtime.request_table import AttemptKey, RequestTable, WorkRequest, WorkState, WorkTransition
from forebay.workers.runtime.worker import READ_MAX, Worker, WorkerReplaced
from tests.workers.conftest import GROUP, PARTITION, WORK, WORK_SLOT, Scene, engine_config, until, work_item


async def test_response_is_on_the_log_in_order(scene: Scene, worker: Worker, epoch: int) -> None:
    lease = scene.lease()
    assert lease is not None
    assert msgspec.msgpack.decode(lease.payload, type=WorkerLease) == WorkerLease(spec=worker.spec)
    await scene.send(work_item("a", list(range(9)), 10, worker_epoch=epoch, owner_epoch=4))
    await scene.ended("a")
    assert len(scene.output("a")) == 10
    last = scene.tokens()[-1]
    assert last == ResponseEnded(
        request_id="a",
        attempt=1,
        owner_epoch=4,
        finish_reason="length",
        usage=Usage(prompt_tokens=9, output_tokens=10),
        group=GROUP,
    )
    first, end = scene.progress()
    assert (type(first), first.cached_tokens, first.worker_epoch) == (FirstTokenEmitted, 0, epoch)
    assert (type(end), end.output_tokens, end.owner_epoch) == (RequestFinished, 10, 4)
    stored = scene.kv()
    assert [event.seq for event in stored] == list(range(1, len(stored) + 1))
    assert sum(len(unpack_u64(event.sequence_hashes)) for event in stored) == (9 + 10 - 1) // 4
    assert scene.loads()[-1].running == 0


WorkEvents = list[WorkItem | WorkCancelled | ReleaseKv | ReannounceCache | WorkerCommand]


def work_of_every_kind(**to: Any) -> WorkEvents:
    """Return one event of each type of a work topic, with this address."""
    pause = WorkerCommand(command_id="c", command=Command(action="pause"), owner_epoch=0, timeout_us=60_000_000, **to)
    return [
        msgspec.structs.replace(work_item("mine", [1], 2), **to),
        WorkCancelled(request_id="under-way", attempt=1, owner_epoch=0, **to),
        ReleaseKv(request_id="under-way", attempt=1, owner_epoch=0, **to),
        ReannounceCache(owner_epoch=0, rank=0, **to),
        pause,
    ]


@pytest.mark.parametrize(
    ("reason", "to"),
    [
        ("other_group", {"group": "other-model", "worker_id": "w1"}),
        ("other_group", {"group": "", "worker_id": ""}),  # written before events were addressed
        ("other_worker", {"group": GROUP, "worker_id": "w2"}),
        ("other_worker", {"group": GROUP, "worker_id": ""}),
        ("other_epoch", {"group": GROUP, "worker_id": "w1", "worker_epoch": 1}),
    ],
)
async def test_only_events_for_the_own_group_name_and_epoch_are_run(
    scene: Scene, worker: Worker, epoch: int, caplog: pytest.LogCaptureFixture, reason: str, to: dict[str, Any]
) -> None:
    """The epoch is the worker's own in most cases: epochs of two groups can be equal."""
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(worker))
    await scene.ask("under-way", [1], 200)
    await until(lambda: "under-way" in worker.active_requests)
    strangers = work_of_every_kind(**{"worker_epoch": epoch, **to})
    await scene.log.append([Draft(WORK.name, WORK_SLOT, encode(WORK, event)) for event in strangers])
    await scene.ask("last", [1], 1)
    await scene.ended("under-way", "last")
    labels = {"worker_id": "w1", "reason": reason}
    assert registry.get_sample_value("forebay_worker_items_skipped_total", labels) == len(strangers)
    assert scene.output("mine") == []
    assert len(scene.output("under-way")) == 200
    assert (worker.counters.reannounced, scene.progress(CommandDone)) == (0, [])
    reported = [record for record in caplog.records if "because two workers read one partition" in record.getMessage()]
    assert len(reported) == (reason != "other_epoch"), "the first is logged, further ones are counted"


async def test_one_record_per_slot_and_batch(scene: Scene) -> None:
    async with scene.serving(scene.worker(speedup=1e9)) as epoch:
        items = [work_item(f"r{slot}", [slot], 4, worker_epoch=epoch, reply_slot=slot % 2) for slot in range(6)]
        drafts = [Draft(WORK.name, WORK_SLOT, msgspec.msgpack.encode(item)) for item in items]
        await scene.log.append(drafts)
        await scene.ended(*[item.request_id for item in items])
    for slot in (0, 1):
        assert [len(event.chunks) for event in scene.tokens(TokensEmitted, slot)] == [3]
        assert len(scene.tokens(ResponseEnded, slot)) == 3


async def test_newer_attempt_replaces_an_older_one_in_flight(scene: Scene) -> None:
    worker = scene.worker(speedup=10.0)
    async with scene.serving(worker):
        await scene.ask("a", [1, 2], 150)
        await until(lambda: scene.tokens(TokensEmitted))
        await scene.ask("a", [1, 2], 150, attempt=3)
        await scene.finish("a", [1, 2], 150, attempt=2)
    assert [end.attempt for end in scene.tokens(ResponseEnded)] == [3]
    assert worker.counters.repeated == 1


async def test_repeated_and_foreign_items_are_not_run(scene: Scene, worker: Worker, epoch: int) -> None:
    item = work_item("a", [1], 2, worker_epoch=epoch)
    await scene.send(work_item("other", [1], 2, worker_epoch=epoch + 1))
    await scene.send(item)
    await scene.send(item)
    await scene.ended("a")
    await scene.send(item)
    await scene.finish("b", [1], 2)
    assert [end.request_id for end in scene.tokens(ResponseEnded)] == ["a", "b"]
    assert (worker.counters.repeated, worker.counters.other_epoch) == (2, 1)


async def test_an_id_that_is_used_again_is_another_request(scene: Scene, worker: Worker, epoch: int) -> None:
    for number in range(2):
        await scene.send(work_item("a", [1], 2, worker_epoch=epoch, reply_from=len(scene.tokens())))
        await until(lambda: len(scene.tokens(ResponseEnded)) == number + 1)  # noqa: B023 - awaited here
    assert worker.counters.repeated == 0


async def test_repeated_item_takes_the_epoch_of_the_new_owner(scene: Scene) -> None:
    async with scene.serving(scene.worker(speedup=10.0)) as epoch:
        item = work_item("a", [1], 100, worker_epoch=epoch, owner_epoch=1)
        await scene.send(item)
        await until(lambda: scene.tokens(TokensEmitted))
        await scene.send(msgspec.structs.replace(item, owner_epoch=2))
        await scene.ended("a")
    orders = [event.owner_epoch for event in scene.tokens(TokensEmitted)]
    assert orders == sorted(orders)
    assert set(orders) == {1, 2}
    assert len(scene.output("a")) == 100


async def test_undecodable_records_become_dead_letters(scene: Scene, worker: Worker, epoch: int) -> None:
    await scene.log.append([Draft(WORK.name, WORK_SLOT, b"\xc1 nonsense", b"key")])
    await scene.finish("a", [1], 1)
    (letter,) = scene.dead_letters()
    assert (letter.value, letter.key) == (b"\xc1 nonsense", b"key")
    assert letter.headers is not None
    assert "work.default" in letter.headers["reason"]
    assert letter.headers["source-topic"] == "work.default"
    assert (letter.headers["source-partition"], letter.headers["source-offset"]) == ("5", "0")
    assert worker.counters.dead_letters == 1


async def test_a_lost_worker_drops_everything_and_joins_as_a_new_incarnation(scene: Scene) -> None:
    worker = scene.worker(speedup=10.0)
    async with scene.serving(worker) as epoch:
        await scene.send(work_item("a", list(range(8)), 100, worker_epoch=epoch))
        await until(scene.kv)
        lost = WorkerLost(worker_id="w1", worker_epoch=epoch, owner_epoch=0)
        await scene.append(FLEET, PARTITION, lost)
        again = await scene.admit(worker, "t1.2")
        await scene.send(work_item("a", list(range(8)), 100, worker_epoch=epoch))
        await scene.send(work_item("b", list(range(8)), 1, worker_epoch=again))
        await scene.ended("b")
    assert [end.request_id for end in scene.tokens(ResponseEnded)] == ["b"]
    renewed = [event for event in scene.kv() if event.worker_epoch == again]
    assert [(type(event), event.seq) for event in renewed] == [(BlocksStored, 1)]
    assert scene.tokens(ResponseEnded)[0].usage.cached_tokens == 0


async def test_attempt_with_an_unknown_rank_ends_the_older_one(scene: Scene) -> None:
    async with scene.serving(scene.worker(speedup=10.0)):
        await scene.ask("a", [1, 2], 150)
        await until(lambda: scene.tokens(TokensEmitted))
        await scene.finish("a", [1, 2], 150, attempt=2, rank=1)
        await scene.ask("a", [1, 2], 150, attempt=3)
        await until(lambda: len(scene.progress(RequestFailed)) == 2)
    kinds = [type(event) for event in scene.tokens() if not isinstance(event, TokensEmitted)]
    assert kinds == [AttemptStarted, ResponseEnded, AttemptStarted]
    assert [failed.attempt for failed in scene.progress(RequestFailed)] == [2, 3]


@pytest.mark.parametrize("is_admitted", [False, True], ids=["while it renews", "while it joins again"])
async def test_later_worker_of_the_same_name_wins(scene: Scene, is_admitted: bool) -> None:
    if not is_admitted:
        scene.keeper = LeaseKeeper(scene.leases, ttl_s=0.1)
        scene.keeper.start()
    worker = scene.worker()
    task = asyncio.create_task(worker.run())
    await until(lambda: scene.holds("t1"))
    epoch = await scene.admit(worker, "t1") if is_admitted else 0
    scene.leases.acquire(GROUP, "w1", "later", b"", 60_000)
    if is_admitted:
        await scene.lose(epoch)
    with pytest.raises(ExceptionGroup) as caught:
        await task
    assert caught.group_contains(WorkerReplaced, match="later holds its lease; give each worker its own --id")
    assert scene.holds("later")
    await scene.keeper.stop()


async def test_a_warm_cache_is_announced_before_anything_else_of_the_epoch(scene: Scene) -> None:
    engine = MockEngine(engine_config(), speedup=1000.0)
    item = work_item("a", list(range(8)), 1)
    known = unpack_u64(item.sequence_hashes)
    engine.warm(known)
    async with scene.serving(scene.worker(engine=engine)) as epoch:
        await scene.send(msgspec.structs.replace(item, worker_epoch=epoch))
        await scene.ended("a")
    announced = scene.kv()[0]
    assert (announced.worker_epoch, announced.seq) == (epoch, 1)
    assert sorted(unpack_u64(announced.sequence_hashes)) == sorted(known)
    assert scene.progress(RequestFinished)[0].cached_tokens == 4


async def test_ranks_have_the_numbers_of_the_spec(scene: Scene) -> None:
    async with scene.serving(scene.worker(dp_size=2, dp_start_rank=4)):
        for name, rank in (("a", 4), ("b", 5), ("c", 0), ("d", 6)):
            await scene.ask(name, [ord(name)] * 8, 1, rank=rank)
        await scene.ended("a", "b", "c", "d")
    assert {event.rank for event in scene.kv()} == {4, 5}
    assert {event.rank for event in scene.loads()} == {4, 5}
    failed = {failed.request_id: failed.error for failed in scene.progress(RequestFailed)}
    assert failed == {
        "c": "rank 0 does not exist: worker w1 has ranks 4 to 5",
        "d": "rank 6 does not exist: worker w1 has ranks 4 to 5",
    }


async def test_adapters_and_tenants_never_share_blocks(scene: Scene) -> None:
    salts = [("", ""), ("lora-a", ""), ("lora-b", ""), ("", "tenant")]
    prompt = list(range(8))
    async with scene.serving(scene.worker(loras=("lora-a", "lora-b"))):
        for number, (lora, tenant) in enumerate(salts):
            hashes = sequence_hashes(pack_u32(prompt), 4, hash_seed(lora, tenant))
            salted = {"lora_name": lora, "cache_namespace": tenant, "sequence_hashes": hashes}
            await scene.finish(f"r{number}", prompt, 9, **salted)
    assert len({tuple(scene.output(f"r{number}")) for number in range(4)}) == 1
    assert [end.cached_tokens for end in scene.progress(RequestFinished)] == [0, 0, 0, 0]
    stored = [block for event in scene.kv() for block in unpack_u64(event.sequence_hashes)]
    text = pack_u32(prompt + scene.output("r0"))
    expected = [unpack_u64(sequence_hashes(text, 4, hash_seed(*salt))) for salt in salts]
    assert stored == [block for chain in expected for block in chain]


@pytest.mark.parametrize("speedup", [100.0, 1e9])
async def test_output_growth_is_reported_if_requested(scene: Scene, speedup: float) -> None:
    """Once for each engine batch in which prompt and output reached another block, after the tokens."""
    async with scene.serving(scene.worker(speedup=speedup)) as epoch:
        await scene.ask("a", [1] * 6, 100, report_output=True)
        await scene.ask("b", [2] * 6, 100)
        await scene.ended("a", "b")
    grown = scene.progress(OutputGrown)
    assert {(event.request_id, event.attempt, event.worker_epoch) for event in grown} <= {("a", 1, epoch)}
    reported = [event.output_tokens for event in grown]
    ends = [0]
    for event in scene.tokens(TokensEmitted):
        ends += [chunk.first_index + len(chunk.token_ids) // 4 for chunk in event.chunks if chunk.request_id == "a"]
    crossed = [end for before, end in pairwise(ends) if -(-(6 + end) // 4) > -(-(6 + before) // 4)]
    assert reported == [end for end in crossed if end < 100]
    assert (len(reported) > 5) is (speedup == 100.0)


async def test_burst_is_processed_in_slices(scene: Scene) -> None:
    names = [f"r{number}" for number in range(2 * READ_MAX)]
    async with scene.serving(scene.worker(speedup=1e6)) as epoch:
        items = [work_item(name, [1], 1, worker_epoch=epoch) for name in names]
        await scene.log.append([Draft(WORK.name, WORK_SLOT, msgspec.msgpack.encode(item)) for item in items])
        await until(lambda: len(scene.tokens(ResponseEnded)) == len(names))
    assert [end.request_id for end in scene.tokens(ResponseEnded)] == names


async def test_suspect_or_draining_worker_continues_its_requests(scene: Scene, worker: Worker, epoch: int) -> None:
    for kind in (WorkerSuspect, WorkerRecovered, WorkerDraining):
        await scene.append(FLEET, PARTITION, kind(worker_id="w1", worker_epoch=epoch, owner_epoch=0))
        await scene.finish(kind.__name__, [1], 1)
    assert worker.worker_epoch == epoch


@pytest.mark.parametrize(
    "newer", [OwnershipAnnounced(owner_epoch=7), WorkerSuspect(worker_id="w2", worker_epoch=1, owner_epoch=7)]
)
async def test_stale_and_foreign_fleet_events_are_ignored(
    scene: Scene, worker: Worker, epoch: int, newer: Event
) -> None:
    await scene.append(FLEET, PARTITION, newer)
    await scene.lose(epoch)
    await scene.append(FLEET, PARTITION, WorkerLost(worker_id="w2", worker_epoch=epoch, owner_epoch=7))
    await scene.append(FLEET, PARTITION, WorkerLost(worker_id="w1", worker_epoch=epoch + 9, owner_epoch=7))
    await scene.log.append([Draft(FLEET.name, PARTITION, b"{}")])
    await until(lambda: worker.counters.fleet_undecodable == 1)
    assert worker.worker_epoch == epoch
    await scene.finish("a", [1], 1)
    assert worker.worker_epoch == epoch


async def test_a_worker_knows_the_event_types_of_the_newest_owner(scene: Scene) -> None:
    worker = scene.worker()

    async def announce(owner_epoch: int, version: int) -> None:
        await scene.append(FLEET, PARTITION, OwnershipAnnounced(owner_epoch=owner_epoch, events_version=version))

    async with scene.serving(worker):
        assert worker.owner_events == 1
        await announce(7, 3)
        await until(lambda: worker.owner_events == 3)
        await announce(5, 4)  # a stale owner
        await announce(8, 1)  # a rollback
        await until(lambda: worker.owner_events == 1)
        other = scene.spec(name="w2")
        joined = WorkerJoined(owner_epoch=9, spec=other, lease="t2", slot=1, from_offset=0, events_version=2)
        await scene.append(FLEET, PARTITION, joined)
        await until(lambda: worker.owner_events == 2)


ATTEMPT = 2


def request(attempt: int = ATTEMPT, name: str = "r") -> WorkRequest:
    return WorkRequest(name, attempt, owner_epoch=1, reply_slot=0, stage="prefill")


def key(attempt: int = ATTEMPT) -> AttemptKey:
    return 0, 0, "prefill", attempt


def test_later_attempt_replaces_an_earlier_one_and_no_attempt_starts_twice() -> None:
    table = RequestTable()
    assert table.start(request(), key(), resumes=True)
    assert not table.start(request(), key(), resumes=False)
    later = request(ATTEMPT + 1)
    assert table.start(later, key(ATTEMPT + 1), resumes=False)
    assert table.get("r") is later
    assert later.prefill_attempt == ATTEMPT + 1
    assert not table.start(request(), key(), resumes=False), "it ran before"
    assert not table.start(request(ATTEMPT - 1), key(ATTEMPT - 1), resumes=False), "a later attempt is in flight"
    assert table.move("r", WorkTransition.END, ATTEMPT) is None, "the end of an earlier attempt"
    assert table.get("r") is later


def test_ended_and_kept_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_table, "KEPT_MAX", 2)
    monkeypatch.setattr(request_table, "ENDED_MAX", 2)
    table = RequestTable()
    for number in range(5):
        assert table.start(request(name=f"r{number}"), key(), resumes=False)
        table.move(f"r{number}", WorkTransition.KEEP, ATTEMPT)
    states = [None if (one := table.get(f"r{number}")) is None else one.state for number in range(5)]
    assert states == [None, WorkState.ENDED, WorkState.ENDED, WorkState.KEPT, WorkState.KEPT]
