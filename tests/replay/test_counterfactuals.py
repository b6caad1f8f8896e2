"""Changes that would have changed a selection: each is evaluated again, and each kind has a sentence."""

import asyncio
from contextlib import closing
from typing import Any

import msgspec
import pytest

from forebay.core.restore import restore
from forebay.core.routing.counterfactual import counterfactual
from forebay.core.routing.plan import Plan
from forebay.core.world import World
from forebay.events.decisions import RequestRouted
from forebay.events.requests import RoutingHints
from forebay.events.topics import DECISIONS
from forebay.replay.at import JournalDiverged, seek
from forebay.replay.explain.find import UnknownRequest
from forebay.replay.explain.selection_changes import (
    NUMBERS,
    OTHER_POLICIES,
    Counterfactuals,
    changes_of,
    counterfactuals,
)
from forebay.replay.walk import Start, walk_all
from forebay.transport.history.reader import decode_journal
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, encode_pool, encoder, query, request
from tests.logs.own_policy import CUSTOM
from tests.logs.record import FOLDER
from tests.replay.recorder import Recorder, fleet, stored

LONG = PROMPTS[1]
# Recordings of every mode, cost setting and stage; the others would only repeat them.
RECORDINGS = [
    "active-request-weight",
    "disaggregation",
    "dp-ranks",
    "kv",
    "least-loaded",
    "lmetric",
    "overlap-decay",
    "own-policy",
    "suspect-and-draining",
    "tiers",
    "untracked-prefill",
]


async def found_by(made: Recorder, name: str = "r", **options: Any) -> list[Counterfactuals]:
    with closing(await made.log()) as log:
        return await counterfactuals(log, 0, name, custom=made.world.custom, **options)


async def changes(made: Recorder) -> Counterfactuals:
    made("requests", request("r", LONG))
    (found,) = await found_by(made)
    return found


def texts(found: Counterfactuals, *whats: str) -> list[str]:
    return [change.text for change in found.changes if change.what in whats]


def check_changes(world: World, plan: Plan) -> None:
    """Evaluate each change of a setting as `replay diff` evaluates other configurations, and require the selection."""
    found, _ = changes_of(world, plan)
    key = f"{plan.selected.key[0]}/{plan.selected.key[1]}"
    for change in found:
        assert change.what == "policy" or change.selected != key
        if change.setting not in plan.config.__struct_fields__ or plan.request.hints.override or plan.stage == "encode":
            continue
        assert selected_with(world, plan, change.setting, change.value) == change.selected, change.text
        if change.setting in NUMBERS:
            assert isinstance(change.value, float)
            current = getattr(plan.config, change.setting)
            if abs(change.value - current) > 0.1:
                halfway = (change.value + current) / 2
                assert selected_with(world, plan, change.setting, halfway) == key, f"{change.text}: not the nearest"


def selected_with(world: World, plan: Plan, setting: str, value: Any) -> str:
    router = msgspec.structs.replace(plan.pool.router, **{setting: value})
    other = counterfactual(world, msgspec.structs.replace(plan.pool, router=router), plan)
    assert other.choice is not None
    return f"{other.choice.selected.key[0]}/{other.choice.selected.key[1]}"


@pytest.mark.parametrize("name", RECORDINGS)
def test_changes_of_settings_have_the_selection_of_another_configuration(name: str) -> None:
    async def check_every_fifth(log: SqliteLog) -> int:
        walk, number = await walk_all(log, 0, CUSTOM), 0

        def check(plan: Plan) -> None:
            nonlocal number
            number += 1
            if number % 5 == 0:
                check_changes(walk.world, plan)

        walk.world.on_plan = check
        async for step in walk:
            assert step.divergence is None, "the evaluation does not change the state"
        return number

    with closing(SqliteLog.open(FOLDER / f"{name}.rec", readonly=True)) as log:
        assert asyncio.run(check_every_fifth(log)) >= 5


async def test_the_nearest_settings_cached_blocks_and_loads_that_decide() -> None:
    made = fleet("a", "b")
    stored(made, "a", LONG)
    made("requests", request("x", LONG[:3], routing=RoutingHints(worker_id="a")))
    found = await changes(made)
    assert (found.selected, found.attempt, found.stage, found.notes) == ("a/0", 1, "aggregated", [])
    assert texts(found, "setting", "temperature", "cache", "load") == [
        "with overlap_score_credit 0.062 instead of 1, b is selected",
        "with prefill_load_scale 0 instead of 1, b is selected",
        "with decode_active_request_weight 7.5 instead of 0, b is selected",
        "without the 8 cached blocks on a, b is selected",
        "with 8 blocks of the prompt cached on b, which has 0, b is selected",
        "with 32 instead of 2 tokens to prefill on a, b is selected",
    ]
    assert {change.selected for change in found.changes if change.what != "policy"} == {"b/0"}
    first, last = found.changes[0], found.changes[-1]
    assert (first.setting, first.value) == ("overlap_score_credit", 0.062)
    assert [change.value for change in found.changes if change.what == "policy"] == [
        mode for mode in OTHER_POLICIES if mode != "kv"
    ]
    assert (last.setting, last.text) == ("mode", "with the policy least-loaded, b is selected")
    assert "with the policy random, a is selected, too" in texts(found, "policy")


async def test_fewer_cached_blocks_are_enough_if_another_rank_has_some() -> None:
    made = fleet("a", "b")
    stored(made, "a", LONG)
    stored(made, "b", LONG[:5])
    assert texts(await changes(made), "cache") == [
        "with 4 instead of 8 cached blocks on a, b is selected",
    ], "8 blocks on b would be a tie, in which the seed selects a"


async def test_a_drawn_selection_and_a_single_candidate() -> None:
    drawn = await changes(fleet("a", "b", "c", temperature=0.5))
    assert {change.what for change in drawn.changes} == {"policy"}
    assert "The selection was a random draw" in drawn.notes[0]
    only = await changes(fleet("a"))
    assert (only.changes, only.notes) == (
        [],
        ["There was only one candidate, so no setting changes the selection."],
    )


async def test_policies_that_ignore_the_cost() -> None:
    made = fleet("a", "b", "c", mode="least-loaded")
    made("requests", request("x", LONG, routing=RoutingHints(worker_id="a")))
    found = await changes(made)
    assert texts(found, "setting", "cache") == []
    assert f"with 1 instead of 0 active requests on {found.selected[0]}" in texts(found, "load")[0]
    found = await changes(fleet("a", "b", mode="round-robin"))
    assert found.notes == ["The policy round-robin does not select by the cost settings."]
    assert {change.what for change in found.changes} == {"policy"}


async def test_every_stage_and_route_queries() -> None:
    made = fleet("a", "b")
    made("control", encode_pool())
    for name in ("e", "f"):
        made("fleet", encoder(name))
    assert len(await stages(made)) == 1
    made("requests", query("q", LONG))
    (found,) = await found_by(made, "q")
    assert (found.attempt, found.selected in {"a/0", "b/0"}) == (1, True)
    with closing(SqliteLog.open(FOLDER / "encode-stage.rec", readonly=True)) as log:
        records = log.records(DECISIONS.name, 0, 0, 10_000)
        routed = [(one.offset, decode_journal(one)) for one in records]
        at, record = next((at, one) for at, one in routed if isinstance(one, RequestRouted) and one.stage == "encode")
        found, *_ = await counterfactuals(log, 0, record.request_id)
    assert (found.routing_offset, found.stage) == (at, "encode")
    assert "An encode worker is always selected by its number of active requests" in found.notes[0]
    assert not [change for change in found.changes if change.what in ("setting", "cache", "policy")]


async def stages(made: Recorder) -> list[Counterfactuals]:
    made("requests", request("r", LONG))
    return await found_by(made)


async def test_all_attempts_of_a_recording_from_any_state() -> None:
    with closing(SqliteLog.open(FOLDER / "lost-workers.rec", readonly=True)) as log:
        records = log.records(DECISIONS.name, 0, 0, 10_000)
        routed = [(one.offset, record) for one in records if isinstance(record := decode_journal(one), RequestRouted)]
        request_id = next(record.request_id for _, record in routed if record.attempt > 1)
        mine = {offset: record for offset, record in routed if record.request_id == request_id}
        found = await counterfactuals(log, 0, request_id)
        assert [(one.routing_offset, one.attempt, one.selected) for one in found] == [
            (offset, record.attempt, f"{record.worker_id}/{record.rank}") for offset, record in mine.items()
        ]
        last = max(mine)
        position = await seek(log, 0, last - 1)
        start = Start(restore(position.world.snapshot()), position.offset + 1)
        assert await counterfactuals(log, 0, request_id, routings=[last], start=start) == found[-1:]
        assert start.world.view != (await seek(log, 0, last - 1)).world.view, "the derivation began at this state"
        assert await counterfactuals(log, 0, request_id, routings=list(mine)) == found
        assert await counterfactuals(log, 0, request_id, routings=[min(mine), records[-1].offset]) == found[:1]
        other = next(offset for offset, record in routed if record.request_id != request_id)
        with pytest.raises(UnknownRequest):
            await counterfactuals(log, 0, request_id, routings=[other])
        with pytest.raises(UnknownRequest):
            await counterfactuals(log, 0, "none")


async def test_a_divergence_is_an_error() -> None:
    made = fleet("a", "b")
    made("requests", request("r", LONG))
    record = made.journal[-1]
    assert isinstance(record, RequestRouted)
    made.journal[-1] = msgspec.structs.replace(record, rank=7)
    with pytest.raises(JournalDiverged):
        await found_by(made)
