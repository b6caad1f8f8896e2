"""Changes that would have changed a selection: each is evaluated again, and each kind has a sentence."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import msgspec
import pytest

from forebay.core.routing.counterfactual import counterfactual
from forebay.core.routing.plan import Plan
from forebay.core.world import World
from forebay.events.decisions import RequestRouted
from forebay.events.requests import RoutingHints
from forebay.events.topics import DECISIONS
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import Routing
from forebay.replay.explain.selection_changes import NUMBERS, OTHER_POLICIES, changes_of
from forebay.replay.walk import walk_all
from forebay.transport.history.reader import decode_journal
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, query, request
from tests.logs.own_policy import CUSTOM
from tests.logs.record import FOLDER
from tests.replay.recorder import Recorder, fleet

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


async def routings(made: Recorder, name: str = "r") -> Sequence[Routing]:
    with closing(await made.log()) as log:
        return (await explain(log, 0, name, with_changes=True, custom=made.world.custom)).routings


async def changes(made: Recorder) -> Routing:
    made("requests", request("r", LONG))
    (found,) = await routings(made)
    return found


def texts(found: Routing) -> list[str]:
    """Return the changes in words, without other policies."""
    assert isinstance(found.changes, list)
    return [change.text for change in found.changes if change.setting != "mode"]


def policies(found: Routing) -> list[str]:
    assert isinstance(found.changes, list)
    return [change.text for change in found.changes if change.setting == "mode"]


def check_changes(world: World, plan: Plan) -> None:
    """Evaluate each change of a setting as `replay diff` evaluates other configurations, and require the selection."""
    found, _ = changes_of(world, plan)
    key = f"{plan.selected.key[0]}/{plan.selected.key[1]}"
    for change in found:
        assert change.setting == "mode" or change.selected != key
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
    made.stored("a", LONG)
    made("requests", request("x", LONG[:3], routing=RoutingHints(worker_id="a")))
    found = await changes(made)
    assert (found.attempt, found.stage, found.notes) == (1, "aggregated", [])
    assert texts(found) == [
        "with overlap_score_credit 0.062 instead of 1, b is selected",
        "with prefill_load_scale 0 instead of 1, b is selected",
        "with decode_active_request_weight 7.5 instead of 0, b is selected",
        "without the 8 cached blocks on a, b is selected",
        "with 8 blocks of the prompt cached on b, which has 0, b is selected",
        "with 32 instead of 2 tokens to prefill on a, b is selected",
    ]
    assert isinstance(found.changes, list)
    first, last = found.changes[0], found.changes[-1]
    assert (first.setting, first.value, first.selected) == ("overlap_score_credit", 0.062, "b/0")
    assert [change.value for change in found.changes if change.setting == "mode"] == [
        mode for mode in OTHER_POLICIES if mode != "kv"
    ]
    assert last.text == "with the policy least-loaded, b is selected"
    assert "with the policy random, a is selected, too" in policies(found)


async def test_fewer_cached_blocks_are_enough_if_another_rank_has_some() -> None:
    made = fleet("a", "b")
    made.stored("a", LONG)
    made.stored("b", LONG[:5])
    cached = [text for text in texts(await changes(made)) if "cached" in text]
    assert cached == ["with 4 instead of 8 cached blocks on a, b is selected"], "8 blocks on b would be a tie"


async def test_a_single_candidate_and_policies_that_ignore_the_cost() -> None:
    only = await changes(fleet("a"))
    note = "There was only one candidate, so no setting changes the selection."
    assert (only.changes, only.notes) == ([], [note])
    for made, note in (
        (fleet("a", "b", "c", temperature=0.5), "The selection was a random draw."),
        (fleet("a", "b", mode="round-robin"), "The policy round-robin does not select by the cost settings."),
    ):
        found = await changes(made)
        assert isinstance(found.notes, list)
        assert (found.notes[0].startswith(note), texts(found), bool(policies(found))) == (True, [], True)
    made = fleet("a", "b", "c", mode="least-loaded")
    made("requests", request("x", LONG, routing=RoutingHints(worker_id="a")))
    found = await changes(made)
    winner = found.candidates[found.winner].seen.worker_id
    assert f"with 1 instead of 0 active requests on {winner}" in texts(found)[0]


async def test_encode_stages_and_route_queries() -> None:
    made = fleet("a", "b")
    made("requests", query("q", LONG))
    (found,) = await routings(made, "q")
    assert (found.attempt, bool(found.changes)) == (0, True)
    with closing(SqliteLog.open(FOLDER / "encode-stage.rec", readonly=True)) as log:
        records = log.records(DECISIONS.name, 0, 0, 10_000)
        routed = [(one.offset, decode_journal(one)) for one in records]
        at, record = next((at, one) for at, one in routed if isinstance(one, RequestRouted) and one.stage == "encode")
        found, *_ = (await explain(log, 0, record.request_id, with_changes=True)).routings
    assert (found.offset, found.stage) == (at, "encode")
    assert isinstance(found.notes, list)
    assert "An encode worker is always selected by its number of active requests" in found.notes[0]
    assert all("active requests" in text for text in texts(found))


async def test_every_attempt_has_its_changes() -> None:
    with closing(SqliteLog.open(FOLDER / "lost-workers.rec", readonly=True)) as log:
        records = log.records(DECISIONS.name, 0, 0, 10_000)
        routed = [(one.offset, record) for one in records if isinstance(record := decode_journal(one), RequestRouted)]
        request_id = next(record.request_id for _, record in routed if record.attempt > 1)
        found = (await explain(log, 0, request_id, with_changes=True)).routings
        without = (await explain(log, 0, request_id)).routings
    assert [(one.offset, one.attempt) for one in found] == [
        (offset, record.attempt) for offset, record in routed if record.request_id == request_id
    ]
    assert all(one.changes for one in found)
    assert [msgspec.structs.replace(one, changes=msgspec.UNSET, notes=msgspec.UNSET) for one in found] == [*without]
