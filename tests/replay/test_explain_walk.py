"""Explanations of any history: the terms add up, and every starting point gives the same result."""

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given

from forebay.core.step import claim
from forebay.core.world import CORE_VERSION
from forebay.events.codec import decode, encode
from forebay.events.control import RouterConfig
from forebay.events.decisions import OwnerClaimed, RequestAborted, RequestRejected, RequestRouted, RouteAnswered
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.topics import DECISIONS, KV_EVENTS, REQUESTS
from forebay.events.versions import EVENTS_VERSION
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import CandidateCost, Explanation, Routing
from forebay.replay.explain.find import RequestRecord
from forebay.transport.base import Draft, LogError
from forebay.transport.history.groups import groups_of
from forebay.transport.history.reader import decode_journal, journal_records
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import forebay
from tests.core.worlds import PROMPTS, histories, perform, request
from tests.depth import examples
from tests.logs import recordings
from tests.logs.own_policy import CUSTOM
from tests.replay.recorder import Recorder, fleet, report_progress, stored, words
from tests.replay.slices import opened
from tests.system import System, submitted, until, until_ended

SHORT = PROMPTS[0][:2]
PREFIX = list(range(16))
SNAPSHOT_EVERY = 30  # actions
RECORDINGS = recordings.representative()
EVERY = 5  # requests of a golden recording


def cost_of(one: CandidateCost, config: RouterConfig) -> float:
    """Return the cost computed from the reported terms, as in `forebay.core.routing.cost`."""
    left = max(one.prefill_blocks - one.overlap_credit, 0.0) + one.eviction_cost
    if config.selection_policy == "lmetric":
        cost = left * (one.decode_blocks + 1.0)
    elif config.track_prefill_tokens or not config.overlap_score_credit:
        cost = config.prefill_load_scale * left + one.decode_blocks
    else:
        cost = max(one.decode_blocks - one.overlap_credit, 0.0) + one.eviction_cost
    if config.selection_policy != "lmetric" and config.decode_active_request_weight:
        cost += config.decode_active_request_weight * one.active_requests
    return cost * one.taint_factor


def check_routing(routing: Routing, recorded: RequestRouted | RouteAnswered) -> None:
    known = {name: value for name, value in routing.config.items() if name in RouterConfig.__struct_fields__}
    known.pop("busy", None)
    config = msgspec.structs.replace(RouterConfig(), **known)
    assert [one.cost for one in routing.candidates] == [cost_of(one, config) for one in routing.candidates]
    winner = routing.candidates[routing.winner]
    terms, chosen = (
        (recorded.terms, (recorded.worker_id, recorded.rank))
        if isinstance(recorded, RequestRouted)
        else (recorded.choice.terms, (recorded.choice.worker_id, recorded.choice.rank))  # type: ignore[union-attr]
    )
    assert (winner.seen.worker_id, winner.seen.rank, winner.cost) == (*chosen, terms.cost)
    assert (winner.seen.device_overlap, winner.overlap_credit) == (terms.device_overlap, terms.overlap_credit)
    assert routing.table_digest == recorded.table_digest
    assert all(one.reasons and one.text for one in routing.left_out)
    seen = [*(one.seen for one in routing.candidates), *(one.seen for one in routing.left_out)]
    assert len(seen) == len({(one.worker_id, one.rank) for one in seen})
    assert routing.why
    if isinstance(recorded, RequestRouted) and recorded.runner_up is not None:
        assert routing.runner_up is not None
        assert routing.candidates[routing.runner_up].seen.worker_id == recorded.runner_up.worker_id


def same(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation without journal offsets and the start of the derivation."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            kept = value if value.get("topic") != "decisions" else {**value, "offset": None}
            return {name: without(one) for name, one in kept.items() if name not in ("derived_from", "derived_to")}
        return [without(one) for one in value] if isinstance(value, list) else value

    plain = without(msgspec.to_builtins(explanation))
    for part in plain["routings"]:
        part["offset"] = None
    return dict(plain)


def routings_of(name: str, journal: Sequence[Any]) -> list[RequestRouted | RouteAnswered]:
    """Return the routing records of an ID, newest first, because the ID may have been used before."""
    kinds = RequestRouted | RouteAnswered
    found = [one for one in reversed(journal) if isinstance(one, kinds) and one.request_id == name]
    return [one for one in found if one.table_digest is not None]


@given(histories)
@examples(0.4)
def test_explanations_from_the_beginning_and_from_snapshots_are_equal(history: list[Any]) -> None:
    plain, sealed = Recorder(), Recorder()
    for made in (plain, sealed):
        made.fleet("a", "b")
        for number, action in enumerate(history):
            perform(made, number, action)
            if made is sealed and number % SNAPSHOT_EVERY == SNAPSHOT_EVERY - 1:
                made.snapshot()
        made.seal()
    asyncio.run(check_all(plain, sealed))


async def check_all(plain: Recorder, sealed: Recorder) -> None:
    logs = [await made.log() for made in (plain, sealed)]
    names = dict.fromkeys(one.request_id for one in plain.decided if hasattr(one, "request_id"))
    for name in names:
        explanation, again = [await explain(log, 0, name) for log in logs]
        assert same(explanation) == same(again)
        assert explanation.divergence is None
        recorded = [one for one in plain.decided if getattr(one, "request_id", None) == name]
        for routing, one in zip(reversed(explanation.routings), routings_of(name, recorded), strict=False):
            check_routing(routing, one)
        in_flight = plain.world.requests.get(name)
        assert (explanation.ending is None) == (in_flight is not None)
        if in_flight is not None:
            assert (explanation.state, len(explanation.routings)) == (in_flight.phase, in_flight.attempt)
        if isinstance(recorded[-1], RequestAborted):
            assert explanation.ending is not None
            assert explanation.ending.reason == recorded[-1].reason
    for log in logs:
        log.close()


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
async def test_golden_recordings_are_explained(path: Path) -> None:
    log = SqliteLog.open(path, readonly=True)
    ((_, partition),) = (await groups_of(log)).items()
    begin, end = await log.begin(DECISIONS.name, partition), await log.end(DECISIONS.name, partition)
    journal = [decode_journal(record) async for record in journal_records(log, partition, begin, end)]
    names = list(dict.fromkeys(one.request_id for one in journal if isinstance(one, RequestRecord)))
    for name in names[::EVERY]:
        explanation = await explain(log, partition, name, custom=CUSTOM)
        assert explanation.divergence is None
        assert explanation.ending is not None
        for routing, one in zip(reversed(explanation.routings), routings_of(name, journal), strict=False):
            check_routing(routing, one)
    log.close()


async def test_divergence_ends_the_explanation() -> None:
    def recording() -> Recorder:
        made = fleet("a", "b")
        made("requests", request("x", SHORT))
        made("progress", report_progress(made, "x", FirstTokenEmitted))
        stored(made, "a", PROMPTS[2])
        made("requests", request("r", PROMPTS[2]))
        made("progress", report_progress(made, "r", RequestFinished, finish_reason="stop"))
        made("requests", request("y", SHORT))
        return made

    (fine, before, within) = (recording() for _ in range(3))
    whole = await fine.explain("r")
    assert (whole.divergence, whole.state) == (None, "finished")
    at = next(at for at, draft in enumerate(within.drafts) if draft.topic == KV_EVENTS.name)
    lie = msgspec.structs.replace(decode(KV_EVENTS, within.drafts[at].value), sequence_hashes=bytes(64))
    within.drafts[at] = Draft(KV_EVENTS.name, 0, encode(KV_EVENTS, lie))
    explanation = await within.explain("r")
    assert explanation.divergence is not None
    assert (explanation.divergence.offset, "table_digest" in explanation.divergence.reason) == (2, True)
    assert (explanation.state, explanation.routings, explanation.submitted) == ("unknown", (), None)
    other = msgspec.structs.replace(before.journal[1], candidates=7)
    before.journal[1] = other
    explanation = await before.explain("r")
    assert explanation.divergence is not None
    assert (explanation.divergence.offset, explanation.timeline, explanation.derived_to) == (1, (), 1)
    late = await before.explain("x")
    assert (late.divergence == explanation.divergence, late.state) == (True, "unknown")


async def test_a_divergence_between_two_attempts_ends_the_explanation() -> None:
    made = fleet("a", "b")
    made("requests", request("r", SHORT))
    made("requests", request("x", SHORT))
    made("progress", report_progress(made, "r", RequestFinished, finish_reason="stop"))
    made("requests", request("y", SHORT))
    made.journal[2] = msgspec.structs.replace(made.journal[2], ties=9)
    explanation = await made.explain("r")
    assert (explanation.state, words(explanation), len(explanation.routings)) == ("unknown", ["submitted", "routed"], 1)
    assert explanation.divergence is not None
    assert explanation.divergence.offset == 2


async def test_takeover_makes_events_of_the_previous_owner_stale() -> None:
    made = fleet("a", "b")
    made("requests", request("r", SHORT))
    epoch = len(made.journal)
    made.journal.append(OwnerClaimed(owner_id="second", core_version=CORE_VERSION, events_version=EVENTS_VERSION))
    claim(made.world, epoch, (), EVENTS_VERSION)
    stale = msgspec.structs.replace(made.journal[1], seq=1, consumed=(), attempt=1)
    made.journal.append(stale)
    made("progress", report_progress(made, "r", RequestFinished, finish_reason="stop"))
    made.seal()
    for options in ({}, {"thorough": False}):
        explanation = await made.explain("r", **options)
        assert words(explanation) == ["submitted", "routed", "owner_claimed", "finished"]
        assert explanation.timeline[2].text == "router second takes over the group"
    assert (await made.explain("r")).earlier_uses == 0


class Headless(SqliteLog):
    """Log whose records before a snapshot were removed."""

    begins: dict[str, int]

    async def begin(self, topic: str, partition: int) -> int:
        """Return the first offset that retention kept."""
        return self.begins.get(topic, 0)


async def test_a_request_older_than_the_log() -> None:
    made = fleet("a", "b")
    for name in ("ended", "r"):
        made("requests", request(name, SHORT))
    made("progress", report_progress(made, "ended", RequestFinished, finish_reason="stop"))
    made.snapshot()
    begin = len(made.journal) - 1
    view = dict(made.world.view)
    made("requests", request("x", SHORT))
    made("progress", report_progress(made, "r", FirstTokenEmitted))
    made("progress", report_progress(made, "r", RequestFinished, finish_reason="stop", output_tokens=3))
    made.seal()
    made("requests", request("r", PROMPTS[1]))  # rejected, because the id is remembered
    log = Headless.open(None)
    log.begins = {**view, "decisions": begin, "snapshots": 0}
    whole = await made.log()
    for topic, _, end in whole.topics():
        await log.append([Draft(topic, 0, one.value) for one in whole.records(topic, 0, 0, end)])
    explanation = await explain(log, 0, "r")
    assert words(explanation) == ["taken_up", "first_token", "finished", "duplicate_refused"]
    assert explanation.submitted is not None
    assert (explanation.submitted.now_us, explanation.submitted.prompt_tokens, explanation.submitted.offset) == (
        None,
        10,
        1,
    )
    assert explanation.ending is not None
    assert (explanation.ending.duration_us, explanation.ending.output_tokens) == (None, 3)
    assert explanation.first_token is not None
    assert explanation.first_token.predicted_tokens is None
    whole.close()
    log.close()


async def test_error_names_a_damaged_record(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    made = fleet("a", "b")
    made("requests", request("r", SHORT))
    (await made.log(path)).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute('UPDATE "requests" SET value = ? WHERE id = 0', (b"x",))
    with opened(path) as log, pytest.raises(LogError, match=REQUESTS.name):
        await explain(log, 0, "r")


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Return a log with mock workers and two owners, in which a worker is lost with an endless request."""
    path = tmp_path / "recording.db"
    asyncio.run(_record(path))
    return path


async def _record(path: Path) -> None:
    log = SqliteLog.open(path)
    async with System(log).started(workers=2) as system:
        async with system.owned() as owner:
            await until(lambda: len(owner.world.fleet) == 2)
            for number in range(6):
                system.send(submitted(f"r{number}", [*PREFIX, *[number] * 8]))
                await until_ended(system, f"r{number}")
            await system.stop_worker("w0")
            await until(lambda: len(owner.world.fleet) == 1)
            system.start_worker("slow", speedup=0.001)
            await until(lambda: len(owner.world.fleet) == 2)
            await system.stop_worker("w1")
            await until(lambda: len(owner.world.fleet) == 1)
            system.send(submitted("moved", PREFIX))
            await until(lambda: any(one.request_id == "moved" for one in system.decisions(RequestRouted)))
            await system.stop_worker("slow")
            await until(lambda: not len(owner.world.fleet))
        async with system.owned() as owner:
            system.send(submitted("early", PREFIX))
            await until(lambda: system.decisions(RequestRejected))
            system.start_worker("w2")
            await until_ended(system, "moved")
    log.close()


def command(recording: Path, name: str) -> dict[str, Any]:
    ran = forebay("explain", str(recording), name, "--json")
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


def test_lost_mock_worker_is_explained(recording: Path) -> None:
    moved = command(recording, "moved")
    what = [moment["what"] for moment in moved["timeline"]]
    assert what[:3] == ["submitted", "routed", "worker_lost"]
    assert [one for one in what if one in ("owner_claimed", "routed", "first_token", "finished")] == [
        "routed",
        "owner_claimed",
        "routed",
        "first_token",
        "finished",
    ]
    assert [one["attempt"] for one in moved["routings"]] == [1, 2]
    warm, early = asyncio.run(explained(recording, "r5", "early"))
    (routing,) = warm.routings
    assert (routing.reason, routing.candidates[routing.winner].seen.device_overlap) == ("lowest_cost", 4)
    assert warm.first_token is not None
    assert (warm.first_token.predicted_tokens, warm.first_token.cached_tokens) == (16, 16)
    assert early.ending is not None
    assert (early.state, early.ending.reason) == ("rejected", "no_workers")


async def explained(recording: Path, *names: str) -> list[Explanation]:
    log = SqliteLog.open(recording, readonly=True)
    try:
        return [await explain(log, 0, name) for name in names]
    finally:
        log.close()
