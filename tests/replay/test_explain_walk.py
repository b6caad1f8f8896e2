"""Explanations of any history: the terms add up, and every starting point gives the same result."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given

from forebay.core.step import claim
from forebay.core.world import CORE_VERSION
from forebay.events.codec import decode, encode
from forebay.events.control import RouterConfig
from forebay.events.decisions import OwnerClaimed, RequestAborted, RequestRouted, RouteAnswered
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.topics import DECISIONS, KV_EVENTS
from forebay.events.versions import EVENTS_VERSION
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import CandidateCost, Explanation, Routing
from forebay.replay.explain.find import RequestRecord
from forebay.transport.base import Draft
from forebay.transport.history.groups import groups_of
from forebay.transport.history.reader import decode_journal, journal_records
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, histories, perform, request
from tests.depth import examples
from tests.logs import recordings
from tests.logs.own_policy import CUSTOM
from tests.replay.recorder import Recorder, ending_of, first_token_of, fleet, submission_of, words

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
            assert ending_of(explanation).reason == recorded[-1].reason
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
        made.progress("x", FirstTokenEmitted)
        made.stored("a", PROMPTS[2])
        made("requests", request("r", PROMPTS[2]))
        made.progress("r", RequestFinished, finish_reason="stop")
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
    made.progress("r", RequestFinished, finish_reason="stop")
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
    made.progress("r", RequestFinished, finish_reason="stop")
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
    made.progress("ended", RequestFinished, finish_reason="stop")
    made.snapshot()
    begin = len(made.journal) - 1
    view = dict(made.world.view)
    made("requests", request("x", SHORT))
    made.progress("r", FirstTokenEmitted)
    made.progress("r", RequestFinished, finish_reason="stop", output_tokens=3)
    made.seal()
    made("requests", request("r", PROMPTS[1]))  # rejected, because the id is remembered
    log = Headless.open(None)
    log.begins = {**view, "decisions": begin, "snapshots": 0}
    whole = await made.log()
    for topic, _, end in whole.topics():
        await log.append([Draft(topic, 0, one.value) for one in whole.records(topic, 0, 0, end)])
    explanation = await explain(log, 0, "r")
    assert words(explanation) == ["taken_up", "first_token", "finished", "duplicate_refused"]
    submission = submission_of(explanation)
    assert (submission.now_us, submission.prompt_tokens, submission.offset) == (None, 10, 1)
    assert (ending_of(explanation).duration_us, ending_of(explanation).output_tokens) == (None, 3)
    assert first_token_of(explanation).predicted_tokens is None
    whole.close()
    log.close()
