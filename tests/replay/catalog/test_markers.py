"""Markers of a catalog: one sentence per event of interest, merged if there are too many."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.events.codec import encode
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    Command,
    DisaggConfig,
    DisaggregationSet,
    PolicySet,
    WorkerCommanded,
)
from forebay.events.fleet import WorkerDraining, WorkerLost, WorkerRecovered, WorkerSuspect
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolRouting, PoolRoutingConfigured
from forebay.events.progress import RequestFailed
from forebay.events.scaling import PlannerPaused, PoolDecision, PoolSizeSet, ScalingDecided
from forebay.events.topics import SCALING
from forebay.journal.groups import groups_of
from forebay.replay.catalog.contents import ContentsObserver
from forebay.replay.catalog.facts import Marker
from forebay.replay.catalog.markers import add_markers, add_scaling_markers, markers
from forebay.replay.catalog.store import Store
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, decode_pool, joined, pool, pool_of, request
from tests.replay.catalog.scene import RECORDINGS, fill, new_tables
from tests.replay.recorder import Recorder, fleet, outage

SHORT = PROMPTS[0][:2]
FOREVER = 1 << 62


async def markers_of(made: Recorder, **options: Any) -> list[Marker]:
    made.seal()
    connection, log = new_tables(), await made.log()
    await fill(connection, log, **options)
    log.close()
    return markers(connection, 0, FOREVER, 500)


async def texts_of(made: Recorder, kind: str) -> list[str]:
    return [one.text for one in await markers_of(made) if one.kind == kind]


async def test_the_life_cycle_of_workers() -> None:
    made = fleet("a", "b")
    for kind, worker_id, reason in (
        (WorkerSuspect, "a", ""),
        (WorkerSuspect, "a", "again"),  # ignored
        (WorkerRecovered, "a", ""),
        (WorkerDraining, "b", ""),
        (WorkerLost, "b", ""),
        (WorkerLost, "a", "its lease expired."),
    ):
        made("fleet", kind(owner_epoch=0, worker_id=worker_id, worker_epoch=made.epoch(worker_id), reason=reason))
    made("fleet", joined("a"))
    found = await markers_of(made, reopen_every=1, write_every=1)
    assert [(one.kind, one.text) for one in found if one.kind.startswith("worker")] == [
        ("worker_joined", "Worker a joined pool default."),
        ("worker_joined", "Worker b joined pool default."),
        ("worker_suspect", "Worker a is suspect."),
        ("worker_joined", "Worker a is ready again."),
        ("worker_draining", "Worker b is draining."),
        ("worker_lost", "Worker b left after draining."),
        ("worker_lost", "Worker a was lost: its lease expired."),
        ("worker_joined", "Worker a joined pool default."),
    ]
    assert {one.topic for one in found if one.kind.startswith("worker")} == {"fleet"}


async def test_takeovers_name_both_routers() -> None:
    made = fleet("a")
    made.seal()
    for owner_id in ("test", "other"):
        made.take_over(owner_id, at_us=9_000)
    assert await texts_of(made, "takeover") == [
        "Router test became the owner.",
        "Router test claimed the group again after an outage of up to 0.009 s, which delayed no request.",
        "Router other took over from test.",
    ]


@pytest.mark.parametrize("every", [1, 100])
async def test_a_takeover_is_marked_at_its_claim_with_the_outage_before_it(every: int) -> None:
    made, claimed_us = outage()
    found = await markers_of(made, reopen_every=every, write_every=every)
    first, takeover = [one for one in found if one.kind == "takeover"]
    assert (takeover.at_us, takeover.outage_us, first.outage_us) == (claimed_us, 2_000_000, 0)
    text = "Router second took over from test after an outage of up to 2.000 s, which delayed 2 requests."
    assert takeover.text == text


async def test_changed_settings_are_named() -> None:
    made = Recorder()
    made("control", pool())
    made("fleet", joined("a"))
    made("control", pool())
    made("control", pool(temperature=0.5, use_kv_events=False))
    busy = BusyThresholds(active_decode_blocks_threshold=0.9)
    made("control", BusyThresholdsSet(model="m", thresholds=busy, operator="alice"))
    for name in ("another", "new", ""):
        if name:
            made("control", pool_of(name))
        made("control", BusyThresholdsSet(model="m", thresholds=busy))
    made("control", BusyThresholdsSet(model="unknown", thresholds=busy))
    made("control", PolicySet(model="m", pool="default", mode="round-robin", operator="bob"))
    made("control", decode_pool())
    made("control", DisaggregationSet(model="m", disagg=DisaggConfig(policy="never")))
    made("control", PoolCanarySet(model="m", pool="new", base="default", share=0.25))
    made("control", PoolCanarySet(model="m", pool="new"))
    made("control", PoolDrainSet(model="m", pool="default", drained=True))
    made("control", PoolDrainSet(model="m", pool="default", drained=False))
    made("control", PoolRoutingConfigured(model="m", routing=PoolRouting(retry=True)))
    assert await texts_of(made, "configuration") == [
        "Pool default serves m with router mode kv.",
        "Pool default: temperature 0.0 → 0.5, use_kv_events yes → no.",
        "Busy thresholds of m: active_decode_blocks_threshold off → 0.9 (by alice).",
        "Pool another serves m with router mode kv.",
        "Busy thresholds of m: active_decode_blocks_threshold off → 0.9.",
        "Pool new serves m with router mode kv.",
        "Busy thresholds of m: active_decode_blocks_threshold off → 0.9.",
        "Pool default: mode kv → round-robin (by bob).",
        "Pool default: mode round-robin → kv, temperature 0.5 → 0.0, use_kv_events no → yes,"
        " busy.active_decode_blocks_threshold 0.9 → off and 1 more.",
        "Disaggregation of m: policy always → never.",
        "Pool new gets 0.25 of the requests for pool default.",
        "Pool new is no canary any more.",
        "Pool default gets no new requests.",
        "Pool default gets new requests again.",
        "Pools of m are chosen by name and retries in faster pools.",
    ]


async def test_commands_name_their_workers() -> None:
    made = fleet("a", "b")
    fields: dict[str, Any] = {"model": "m", "reply_slot": 0, "timeout_us": 1_000}
    sleep = Command(action="sleep")
    made("control", WorkerCommanded(command_id="1", command=sleep, operator="alice", **fields))
    made("control", WorkerCommanded(command_id="2", command=sleep, worker_ids=("z",), **fields))
    assert await texts_of(made, "command") == [
        "Command sleep was sent to workers a and b (by alice).",
        "Command sleep for m was rejected: unknown_worker.",
    ]


async def test_rejections_and_failures_are_counted_per_second() -> None:
    made = fleet("a")
    for number in range(3):
        made("requests", request(f"r{number}", SHORT, model="unknown"))
    made("requests", request("f", SHORT))
    made.progress("f", RequestFailed, error="no memory\nstack trace")
    made.wait(2_000_000)
    made("requests", request("late", SHORT, model="unknown"))
    for options in ({}, {"write_every": 1, "reopen_every": 1}):
        found = await markers_of(made, **options)
        assert [(one.kind, one.count, one.text) for one in found if one.kind in ("rejections", "failures")] == [
            ("rejections", 3, "3 requests rejected: wrong_model."),
            ("failures", 1, "1 request failed: no memory."),
            ("rejections", 1, "1 request rejected: wrong_model."),
        ]


@pytest.mark.parametrize("limit", [1, 5, 20, 100])
def test_frequent_kinds_are_merged_first(limit: int) -> None:
    connection = new_tables()
    rare = [_marker("takeover", 500, 0), _marker("worker_lost", 700, 1)]
    frequent = [_marker("rejections", at_us, at_us, count=2) for at_us in range(1_000)]
    some = [_marker("worker_joined", 10 * number, number) for number in range(10)]
    add_markers(connection, [*rare, *frequent, *some])
    found = markers(connection, 0, 1_000, limit)
    assert len(found) <= limit
    assert found == sorted(found, key=lambda one: one.at_us)
    if limit > 3:
        assert all(one in found for one in rare)
        assert sum(one.count for one in found if one.kind == "rejections") == 2_000
        assert sum(one.count for one in found if one.kind == "worker_joined") == 10
    if limit == 100:
        assert [one for one in found if one.kind == "worker_joined"] == some
    assert markers(connection, 2_000, 3_000, limit) == []


def _marker(kind: Any, at_us: int, offset: int, count: int = 1) -> Marker:
    return Marker(at_us=at_us, kind=kind, text=f"{kind} {at_us}.", topic="fleet", offset=offset, count=count)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
async def test_markers_of_recordings_are_sentences(path: Path) -> None:
    log = SqliteLog.open(path, readonly=True)
    for partition in (await groups_of(log)).values():
        connection = new_tables()
        reader = await fill(connection, log, partition)
        found = markers(connection, 0, FOREVER, 2_000)
        assert all(one.text[0].isupper() or one.text[0].isdigit() for one in found)
        assert all(one.text.endswith(".") for one in found)
        assert {one.at_us for one in found if one.at_us > reader.world.now_us} == set()
    log.close()


async def test_decisions_of_the_planner(tmp_path: Path) -> None:
    def decided(*sizes: tuple[str, int, int], advisory: bool = False) -> ScalingDecided:
        pools = tuple(
            PoolDecision(
                group=group, pool="default", from_size=before, to_size=after, proposed=after, reason="scale_up"
            )
            for group, before, after in sizes
        )
        return ScalingDecided(planner_epoch=0, at_us=5, after=0, pools=pools, advisory=advisory)

    events = [
        decided(("g", 2, 4), ("other", 1, 2)),
        decided(("g", 4, 4)),
        decided(("g", 4, 5), advisory=True),
        PoolSizeSet(group="g", pool="default", size=3, operator="alice", at_us=6),
        PoolSizeSet(group="other", pool="default", size=None, at_us=7),
        PlannerPaused(paused=True, operator="bob", at_us=8),
    ]
    log = SqliteLog.open(tmp_path / "log.db")
    store = await Store.open(tmp_path / "catalog", log, 0, [ContentsObserver.schema])
    assert not await add_scaling_markers(store, log, "g")
    for value in (*(encode(SCALING, event) for event in events), b"\xc1"):
        await log.append([Draft(SCALING.name, 0, value)])
        assert await add_scaling_markers(store, log, "g")
        assert not await add_scaling_markers(store, log, "g")
    assert [(one.offset, one.text) for one in markers(store.connection, 0, 10, 10)] == [
        (0, "The planner scales g/default from 2 to 4 (scale_up)."),
        (2, "The planner recommends to scale g/default from 4 to 5 (scale_up)."),
        (3, "Pool g/default was set to 3 workers (by alice)."),
        (5, "The planner was paused (by bob)."),
    ]
    store.close()
    every_group = await Store.open(tmp_path / "all", log, 0, [ContentsObserver.schema])
    assert await add_scaling_markers(every_group, log, "")
    assert len(markers(every_group.connection, 0, 10, 10)) == 5
    every_group.close()
    log.close()


async def test_old_rows_can_be_removed() -> None:
    made = fleet("a")
    made("requests", request("old", SHORT, model="unknown"))
    made("requests", request("active", SHORT, timeout_us=60_000_000))
    made.wait(5_000_000)
    made("requests", request("new", SHORT, model="unknown"))
    made.seal()
    connection, log = new_tables(), await made.log()
    reader = await fill(connection, log)
    ContentsObserver().remove_before(connection, 0, reader.world.now_us - 1_000)
    ids = [request_id for (request_id,) in connection.execute("SELECT request_id FROM requests ORDER BY number")]
    assert ids == ["active", "new"]
    assert [one.kind for one in markers(connection, 0, FOREVER, 10)] == ["rejections"]
    log.close()


def test_a_sentence_has_no_statement_of_sql() -> None:
    connection = new_tables()
    text = "'); DROP TABLE markers; --"
    add_markers(connection, [msgspec.structs.replace(_marker("command", 1, 1), text=text)])
    assert [one.text for one in markers(connection, 0, 10, 10)] == [text]
