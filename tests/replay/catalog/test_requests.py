"""Requests of a catalog: the same states as explanations and as the owner's world, at any moment."""

from pathlib import Path
from typing import Any

import pytest

from forebay.core.world import World
from forebay.events.fleet import WorkerLost
from forebay.events.progress import FirstTokenEmitted, RequestFailed, RequestFinished
from forebay.events.requests import RequestCancelled
from forebay.journal.groups import groups_of
from forebay.journal.reader import JournalReader, Step
from forebay.replay.catalog.contents import ContentsObserver
from forebay.replay.catalog.facts import RequestRow
from forebay.replay.catalog.request_queries import RequestFilter, request, requests
from forebay.replay.catalog.request_steps import STATE_OF_PHASE
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import Explanation
from forebay.replay.explain.find import UnknownRequest
from forebay.replay.states import States
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS
from tests.core.worlds import request as submitted
from tests.logs.own_policy import CUSTOM
from tests.replay.catalog.scene import RECORDINGS, fill, new_tables, show_tail, write
from tests.replay.recorder import Recorder, fleet

EVERY = 4  # requests of a recording that the quick test explains
SHORT = PROMPTS[0][:2]

Seen = dict[str, tuple[Any, ...]]


def seen_in(world: World) -> Seen:
    """Return what a row shows of each active request."""
    return {
        one.submitted.request_id: (
            one.submitted.offset,
            STATE_OF_PHASE[one.phase],
            one.submitted.pool,
            one.worker_id,
            one.rank,
            one.stage_attempt,
        )
        for one in world.requests.active()
    }


def seen_row(row: RequestRow) -> tuple[Any, ...]:
    return row.number, row.state, row.pool, row.worker_id, row.rank, row.attempt


def state_of(explained: Explanation) -> str:
    if explained.ending is not None and explained.ending.reason == "cancelled":
        return "cancelled"
    return {"remote_prefill": "prefill", "transfer": "decode"}.get(explained.state, explained.state)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
async def test_states_agree_with_explanations(path: Path) -> None:
    log = SqliteLog.open(path, readonly=True)
    for partition in (await groups_of(log)).values():
        connection = new_tables()
        await fill(connection, log, partition)
        newest = {row.request_id: row for row in reversed(requests(connection, limit=500).requests)}
        for row in list(newest.values())[::EVERY]:
            try:
                explained = await explain(States(log, partition, CUSTOM), row.request_id, thorough=False)
            except UnknownRequest:
                assert row.journal_offset is None, "the journal has no decision about it"
                continue
            assert (row.request_id, row.state) == (row.request_id, state_of(explained))
            first = explained.first_token
            assert row.ttft_us == (None if first is None else first.ttft_us)
            assert row.cached_tokens == (None if first is None else first.cached_tokens)
            if explained.ending is not None and row.state != "failed":
                assert row.reason == explained.ending.reason
            if row.state == "finished":
                assert row.output_tokens == explained.output_tokens
            if explained.routings:
                assert row.journal_offset is not None
                assert row.journal_offset >= explained.routings[-1].offset
    log.close()


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("reopen_every", [0, 1])
async def test_every_moment_shows_the_requests_of_the_owner(path: Path, reopen_every: int) -> None:
    log = SqliteLog.open(path, readonly=True)
    for partition in (await groups_of(log)).values():
        connection = new_tables()
        moments: dict[int, Seen] = {}

        def check(reader: JournalReader, _: ContentsObserver, step: Step, moments: dict[int, Seen] = moments) -> None:
            for run in step.record.consumed:
                moments.pop(run.now_us, None)  # the moment is in the middle of what happened at this time
            if not reader.pending:
                moments[reader.world.now_us] = seen_in(reader.world)

        await fill(connection, log, partition, write_every=5, reopen_every=reopen_every, check=check)
        for at_us, expected in moments.items():
            shown = requests(connection, at_us, limit=500).requests
            assert {row.request_id: seen_row(row) for row in shown if row.ended_us is None} == expected
            assert all(row.submitted_us <= at_us for row in shown)
    log.close()


async def tables_of(made: Recorder) -> Any:
    connection = new_tables()
    log = await made.log()
    await fill(connection, log)
    log.close()
    return connection


async def test_filters_select_requests() -> None:
    made = fleet("a", "b")
    for name in ("one", "two_1", "two%1", "three"):
        made("requests", submitted(name, SHORT, tenant="acme" if name.startswith("two") else ""))
    made.progress("one", FirstTokenEmitted, after_us=5_000)
    made.progress("two_1", FirstTokenEmitted, after_us=50_000)
    made.progress("one", RequestFinished, finish_reason="stop", output_tokens=3)
    made.progress("two_1", RequestFailed, error="no memory")
    made("requests", submitted("other", SHORT, model="unknown"))
    made("requests", RequestCancelled(request_id="three"))
    made.seal()
    connection = await tables_of(made)

    def ids(**conditions: Any) -> list[str]:
        return [row.request_id for row in requests(connection, conditions=RequestFilter(**conditions)).requests]

    assert ids() == ["other", "three", "two%1", "two_1", "one"]
    assert ids(state="prefill") == ["two%1"]
    assert ids(state="cancelled") == ["three"]
    assert ids(state="failed") == ["two_1"]
    assert ids(is_unsuccessful=True) == ["other", "two_1"]
    assert ids(model="unknown") == ["other"]
    assert ids(tenant="acme") == ["two%1", "two_1"]
    assert ids(slow_us=20_000) == ["two_1"]
    assert ids(text="two") == ["two%1", "two_1"]
    assert ids(text="two_") == ["two_1"]
    assert ids(text="two_1~0.1f") == ["two_1"], "the id of its response"
    assert ids(text="%") == ["two%1"]
    assert ids(text="' OR 1") == []
    workers = {row.request_id: row.worker_id for row in requests(connection).requests}
    for worker_id in ("a", "b"):
        assert ids(worker_id=worker_id) == [name for name in workers if workers[name] == worker_id]


async def test_a_retried_request_is_shown_on_the_worker_that_it_had() -> None:
    made = fleet("a", "b")
    made("requests", submitted("r", SHORT))
    routed_us, first = made.world.now_us, seen_in(made.world)["r"][3]
    lost = WorkerLost(owner_epoch=0, worker_id=first, worker_epoch=made.epoch(first))
    made("fleet", lost, after_us=500)
    made.progress("r", RequestFinished, after_us=500, finish_reason="stop", output_tokens=1)
    made.seal()
    connection = await tables_of(made)
    second = "b" if first == "a" else "a"

    def ids(at_us: int | None, worker_id: str) -> list[str]:
        return [row.request_id for row in requests(connection, at_us, RequestFilter(worker_id=worker_id)).requests]

    assert (ids(routed_us, first), ids(routed_us, second)) == (["r"], [])
    assert (ids(None, first), ids(None, second)) == ([], ["r"])


async def test_pages_continue_where_the_previous_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fleet("a")
    for number in range(25):
        made("requests", submitted(f"r{number:02}", SHORT))
    connection = await tables_of(made)

    def pages(limit: int, conditions: RequestFilter) -> tuple[list[int], list[str]]:
        sizes, names, before = [], [], None
        while True:
            page = requests(connection, None, conditions, before, limit)
            sizes.append(len(page.requests))
            names += [row.request_id for row in page.requests]
            if page.next_before is None:
                return sizes, names
            before = page.next_before

    everything = [f"r{number:02}" for number in reversed(range(25))]
    assert pages(10, RequestFilter()) == ([10, 10, 5], everything)
    assert pages(25, RequestFilter()) == ([25], everything)
    monkeypatch.setattr("forebay.replay.catalog.request_queries.WINDOW_ROWS", 2)
    monkeypatch.setattr("forebay.replay.catalog.request_queries.SCAN_MAX", 6)
    assert pages(10, RequestFilter())[1] == everything
    sizes, names = pages(10, RequestFilter(text="r07"))
    assert (max(sizes), names) == (1, ["r07"])


async def test_an_id_that_was_used_twice_is_two_requests() -> None:
    made = fleet("a")
    made("requests", submitted("x~1", SHORT))
    made.progress("x~1", RequestFinished, finish_reason="stop", output_tokens=1)
    made("requests", submitted("x~1", SHORT))  # a redelivery, which the owner ignores
    made("requests", submitted("x~1", PROMPTS[1]))  # the owner still remembers the ID
    made.wait(130_000_000)
    made("requests", submitted("x~1", PROMPTS[1]))
    connection = await tables_of(made)
    found = requests(connection).requests
    assert [(row.state, row.reason) for row in found] == [
        ("prefill", ""),
        ("rejected", "duplicate_id"),
        ("finished", "stop"),
    ]
    assert [request(connection, row.number) for row in found] == found
    assert request(connection, 1_000) is None


async def test_events_after_the_journal_are_shown_until_a_record_counts_them() -> None:
    made = fleet("a")
    for name in ("first", "second"):
        made("requests", submitted(name, SHORT))
    connection = new_tables()
    log = await made.log()
    reader = await fill(connection, log)
    observer = ContentsObserver()
    observer.open(connection, reader.world)
    made.progress("first", FirstTokenEmitted)
    made.progress("first", RequestFinished, finish_reason="stop", output_tokens=1)
    made("requests", submitted("third", SHORT), journalled=False)
    tail = await made.log()
    await show_tail(connection, observer, tail, 0, reader)
    states = {row.request_id: row.state for row in requests(connection).requests}
    assert states == {"third": "submitted", "second": "prefill", "first": "finished"}
    assert requests(connection).requests[0].journal_offset is None
    observer.clear_unrecorded()
    write(connection, observer)
    states = {row.request_id: row.state for row in requests(connection).requests}
    assert states == {"second": "prefill", "first": "prefill"}
    log.close()
    tail.close()
