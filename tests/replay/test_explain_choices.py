"""Reasons of selections in every mode, and changes that would have changed them."""

from collections.abc import Iterable
from contextlib import closing
from typing import Any

import msgspec
import pytest

from forebay.core.routing.plan import Plan
from forebay.core.selection.counterfactual import counterfactual
from forebay.core.world import World
from forebay.events.base import pack_u64
from forebay.events.control import BusyThresholds, QueueConfig
from forebay.events.decisions import RequestRouted
from forebay.events.kv import BlocksRemoved
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.requests import RouterOverride, TaintWeight
from forebay.events.topics import DECISIONS
from forebay.journal.reader import read_whole
from forebay.journal.records import decode_journal
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import Routing
from forebay.replay.explain.selection_changes import NUMBERS, OTHER_POLICIES, changes_of
from forebay.replay.states import States
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, joined, pool
from tests.logs.own_policy import CUSTOM as GOLDEN_CUSTOM
from tests.logs.record import FOLDER
from tests.replay.recorder import Recorder, ending_of, fleet

SHORT, LONG = PROMPTS[0][:2], PROMPTS[1]
FAST = (TaintWeight(taint="fast", weight=1.0),)


class First:
    """Custom policy that selects the first candidate."""

    def decide(self, world: Any, request: Any) -> int:
        return 0


FIRST = f"{__name__}.First"
CUSTOM = {FIRST: First}


def workers(*specs: dict[str, Any], **router: Any) -> Recorder:
    """Return a recorder of the workers a, b and so on, with these fields of their specs."""
    made = Recorder()
    made("control", pool(**router))
    for slot, spec in enumerate(specs):
        made("fleet", joined("abc"[slot], slot, **spec))
    return made


def run(made: Recorder, name: str, blocks: Iterable[int] = SHORT, **hints: Any) -> None:
    """Route a request that ends at once."""
    made.ask(name, blocks, **hints)
    made.progress(name, RequestFinished, finish_reason="stop")


async def routing_of(made: Recorder, blocks: Iterable[int] = LONG, name: str = "r", **hints: Any) -> Routing:
    made.ask(name, blocks, **hints)
    return (await made.explain(name, custom=made.world.custom)).routings[0]


@pytest.mark.parametrize(
    ("router", "reason", "text"),
    [
        ({}, "tie_seed", "3 of 3 candidates have the lowest cost, 16.5; the request's tie seed selected this one"),
        ({"temperature": 1.0}, "drawn", "drawn at temperature 1 with probability 33.3 %; it has the lowest cost"),
        ({"mode": "round-robin"}, "round_robin", "its turn: request number 1 of the pool, over 3 candidates"),
        ({"mode": "random"}, "random", "drawn by the request's tie seed from 3 equally likely candidates"),
        ({"mode": "power-of-two"}, "power_of_two", "with 0 and 0 active requests: equal, so the first"),
        (
            {"mode": "least-loaded"},
            "least_loaded",
            "3 candidates have the fewest active requests, 0; the request's tie",
        ),
        ({"mode": FIRST}, "policy", f"the policy {FIRST} selected it, which also has the lowest"),
    ],
)
async def test_reason_of_each_mode_with_equal_costs(router: dict[str, Any], reason: str, text: str) -> None:
    routing = await routing_of(fleet(custom=CUSTOM, **router))
    assert (routing.mode, routing.reason) == (router.get("mode", "kv"), reason)
    assert text in routing.why


@pytest.mark.parametrize(
    ("router", "reason", "text"),
    [
        ({}, "lowest_cost", "lowest cost of 3 candidates: 8.5, 8 less than c (8 less to prefill; 8 blocks"),
        (
            {"selection_policy": "lmetric"},
            "lowest_cost",
            "0.5 blocks to prefill times 9, against 8.5 times 9; 8 blocks",
        ),
        (
            {"track_prefill_tokens": False},
            "lowest_cost",
            "0, 8 less than c (8 less of decode blocks that are not cached",
        ),
        ({"temperature": 0.5}, "drawn", "drawn at temperature 0.5 with probability"),
        ({"mode": "power-of-two"}, "power_of_two", "active requests"),
        ({"mode": "least-loaded"}, "least_loaded", "2 candidates have the fewest active requests, 0"),
        ({"mode": FIRST}, "policy", "selected it, which also has the lowest cost, 8.5"),
    ],
)
async def test_reason_of_each_mode_with_different_costs(router: dict[str, Any], reason: str, text: str) -> None:
    made = fleet(custom=CUSTOM, **router)
    made.stored("a", LONG)
    made.ask("x", SHORT, worker_id="b")
    made.progress("x", FirstTokenEmitted)
    routing = await routing_of(made)
    assert routing.reason == reason
    assert text in routing.why


async def test_reasons_of_further_selections() -> None:
    for mode, text in (("least-loaded", "fewest active requests: 0"), ("power-of-two", "requests: the smaller number")):
        made = fleet("a", "b", mode=mode)
        made.ask("x", SHORT, worker_id="a")
        assert (await routing_of(made)).why.endswith(text)
    made = fleet("a", "b", custom=CUSTOM, mode=FIRST)
    made.stored("b", LONG)
    why = "First selected it, although 1 of 2 candidates cost less: 16.5 against 8.5 of b"
    assert (await routing_of(made)).why.endswith(why)


async def test_blocks_in_lower_tiers_are_listed_separately() -> None:
    made = fleet("a", "b")
    made.stored("a", LONG)
    made.stored("a", LONG[2:], seq=2, tier="host")
    rest = pack_u64(LONG[2:])
    made(
        "kv-events",
        BlocksRemoved(worker_id="a", worker_epoch=made.epoch("a"), seq=3, sequence_hashes=rest, tier="device"),
    )
    why = (await routing_of(made)).why
    assert why.endswith("2 blocks of the prompt are cached on a and 6 in its host memory, 0 on b)")


async def test_ties_go_to_the_rank_with_fewest_computed_tokens() -> None:
    made = fleet("a", "b", "c")
    for number in range(2):
        run(made, f"x{number}", PROMPTS[number])
    least = min(made.world.load.ranks(), key=lambda load: load.computed_tokens).worker_id
    run(made, "y", PROMPTS[2][:1], worker_id=least)
    routing = await routing_of(made, [99])
    assert routing.reason == "tie_computed_tokens"
    assert routing.why.endswith("this one was sent the fewest tokens to compute so far: 6, the next 34")
    assert routing.candidates[routing.winner].seen.computed_tokens == 6
    for names, text in (
        ("a", "2 of them were sent the fewest tokens to compute"),
        ("abc", ", and were sent the same number of tokens to compute; the request's tie seed selected"),
    ):
        made = fleet("a", "b", "c")
        for name, blocks in zip(names, PROMPTS, strict=False):
            run(made, f"to-{name}", blocks, worker_id=name)
        routing = await routing_of(made, [7_001])
        assert (routing.reason, text in routing.why) == ("tie_seed", True)


async def test_pinned_to_a_worker_or_one_of_its_ranks() -> None:
    made = workers({"dp_size": 2}, {"dp_size": 2})
    one = await routing_of(made, worker_id="b", rank=1)
    assert (one.reason, one.why) == ("pinned", "the request is pinned to it")
    assert [left.text for left in one.left_out] == ["the request is pinned to rank 1 of b"] * 3
    two = await routing_of(made, name="two", worker_id="a")
    assert two.why.startswith(
        "among the 2 ranks of a, to which the request is pinned: 2 of 2 candidates have the lowest"
    )
    three = await routing_of(made, name="three", worker_id="b", override=RouterOverride(mode="direct"))
    assert (three.mode, three.reason, three.overridden) == ("direct", "lowest_cost", ("mode",))
    assert (await routing_of(fleet("a", "b", mode="direct"), worker_id="a")).reason == "pinned"
    assert (await routing_of(workers({"dp_size": 2}, mode="direct"), worker_id="a")).reason == "tie_seed"


@pytest.mark.parametrize("mode", ["hard", "soft"])
async def test_a_session_keeps_its_worker(mode: str) -> None:
    made = fleet(session_ttl_s=600.0, session_mode=mode, busy=BusyThresholds(active_decode_blocks_threshold=0.2))
    home = made.ask("first", SHORT, session_id="s").worker_id
    others = [name for name in "abc" if name != home]
    for name, blocks in (("x", PROMPTS[0]), ("y", PROMPTS[2])):
        made.ask(name, blocks, worker_id=others[0])
    routing = await routing_of(made, session_id="s")
    assert (routing.reason, routing.why) == ("session", f"the session s is bound to it ({mode} affinity)")
    kept_out = {one.seen.worker_id: one.reasons for one in routing.left_out}
    assert kept_out == {others[0]: ("other_session",) if mode == "hard" else ("busy",), others[1]: ("other_session",)}
    assert routing.config["session_mode"] == mode
    alone = fleet("a", session_ttl_s=600.0)
    alone.ask("first", SHORT, session_id="s")
    assert (await routing_of(alone, session_id="s")).reason == "only_candidate"


async def test_a_hard_session_on_a_busy_worker_is_rejected() -> None:
    made = fleet("a", "b", session_ttl_s=600.0, busy=BusyThresholds(active_decode_blocks_threshold=0.1))
    made.ask("first", LONG, session_id="s")
    made.ask("r", SHORT, session_id="s")
    left_out = ending_of(await made.explain("r")).left_out
    assert sorted(one.reasons for one in left_out) == [("busy",), ("other_session",)]


async def test_costs_include_taints_overrides_and_routed_load() -> None:
    made = workers({"taints": ("fast",)}, {}, use_kv_events=False, decode_active_request_weight=2.0)
    made.ask("x", LONG)
    routing = await routing_of(made, preferred_taints=FAST, override=RouterOverride(overlap_score_credit=0.5))
    assert (routing.overridden, routing.config["overlap_score_credit"]) == (("overlap_score_credit",), 0.5)
    assert (routing.config["ttl_s"], routing.config["decode_active_request_weight"]) == (120.0, 2.0)
    assert routing.candidates[0].taint_factor == pytest.approx(0.467, abs=0.001)
    assert [one.seen.assumed_overlap for one in routing.candidates] == [8, 0]
    assert "taint factor" in routing.why


async def test_preferred_taints_multiply_each_part_of_a_cost() -> None:
    routing = await routing_of(workers({"taints": ("fast",)}, {}), preferred_taints=FAST)
    assert routing.why == (
        "lowest cost of 2 candidates: 7.7, 8.8 less than b (4.53 less to prefill; 4.26 less of decode blocks; "
        "taint factor 0.467, against 1.000)"
    )


async def test_second_attempt_ignores_session_and_thresholds() -> None:
    """A retry is not bound by its session or by the busy thresholds."""
    made = fleet("a", "b", "c", session_ttl_s=600.0, busy=BusyThresholds(active_prefill_tokens_threshold=1))
    home = made.ask("r", LONG, session_id="s", allowed_workers=("a", "b")).worker_id
    made.ask("x", SHORT, worker_id="c")
    made.lose(home)
    again = (await made.explain("r")).routings[1]
    assert (again.attempt, again.why) == (2, "it was the only candidate")
    assert again.candidates[0].seen.worker_id == ("b" if home == "a" else "a")
    assert [(one.seen.worker_id, one.reasons) for one in again.left_out] == [("c", ("not_allowed",))]


async def test_pinned_rank_is_excluded_only_by_missing_requirements() -> None:
    made = workers({"dp_size": 2})
    made.ask("r", SHORT, worker_id="a", rank=1, required_taints=("fast",))
    left_out = ending_of(await made.explain("r")).left_out
    assert [one.reasons for one in left_out] == [("not_pinned", "missing_taint"), ("missing_taint",)]


async def test_sampling_probabilities_sum_to_one() -> None:
    made = fleet("a", "b", "c", temperature=0.7, predicted_ttl_s=1.0)
    made.stored("a", LONG)
    routing = await routing_of(made)
    first, *others = [one.probability or 0.0 for one in routing.candidates]
    assert first + sum(others) == pytest.approx(1.0)
    assert first > others[0] == others[1]
    assert routing.config["predicted_ttl_s"] == 1.0


async def test_full_ranks_are_reported_with_values_and_end_of_wait() -> None:
    made = fleet("a", "b", queue=QueueConfig(run_ahead=0.0, timeout_s=0.5))
    for at in range(15):
        made.ask(f"x{at}", SHORT)
    full = next(name for name in "ab" if made.world.load.rank_load(name, 0).active_requests == 8)
    routing = await routing_of(made, SHORT)
    made.ask("late", SHORT)
    made.wait(500_000)
    assert routing.config["queue.run_ahead"] == 0.0
    assert [(one.seen.worker_id, one.reasons) for one in routing.left_out] == [(full, ("full",))]
    assert routing.left_out[0].text == "it is full: 8 active requests, maximum 8"
    late = await made.explain("late")
    assert "the least loaded rank, is full with 8 active requests; " in late.timeline[1].text
    assert (late.state, ending_of(late).reason) == ("aborted", "queue_timeout")


async def test_rank_with_waiting_engine_requests_is_full() -> None:
    made = fleet("a", "b", queue=QueueConfig(run_ahead=0.0))
    for at in range(6):
        made.ask(f"x{at}", SHORT, worker_id="a")
    made.report("a", running=4, waiting=2, used=1)
    (left,) = (await routing_of(made, SHORT)).left_out
    assert left.text == "it is full: 2 requests wait in its engine, maximum 0"


# Changes that would have changed the selection. Recordings of every mode, cost setting and stage.
RECORDINGS = [
    *("active-request-weight", "disaggregation", "dp-ranks", "kv", "least-loaded", "lmetric", "overlap-decay"),
    *("own-policy", "suspect-and-draining", "tiers", "untracked-prefill"),
]


async def changes(made: Recorder, name: str = "r") -> Routing:
    """Return the routing of a request, which is submitted unless it is named, with what would have changed it."""
    if name == "r":
        made.ask("r", LONG)
    (found,) = (await made.explain(name, with_changes=True, custom=made.world.custom)).routings
    return found


def texts(found: Routing, *, of_policies: bool = False) -> list[str]:
    """Return the changes of settings in words, or those of the policy."""
    assert isinstance(found.changes, list)
    return [change.text for change in found.changes if (change.setting == "mode") == of_policies]


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
async def test_changes_of_settings_have_the_selection_of_another_configuration(name: str) -> None:
    plans = 0
    with closing(SqliteLog.open(FOLDER / f"{name}.rec", readonly=True)) as log:
        reader = await read_whole(log, 0, GOLDEN_CUSTOM)

        def check_every_fifth(plan: Plan) -> None:
            nonlocal plans
            plans += 1
            if plans % 5 == 0:
                check_changes(reader.world, plan)

        reader.world.on_plan = check_every_fifth
        async for step in reader:
            assert step.divergence is None, "the evaluation does not change the state"
    assert plans >= 5


async def test_the_nearest_settings_cached_blocks_and_loads_that_decide() -> None:
    made = fleet("a", "b")
    made.stored("a", LONG)
    made.ask("x", LONG[:3], worker_id="a")
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
    first = found.changes[0]
    assert (first.setting, first.value, first.selected) == ("overlap_score_credit", 0.062, "b/0")
    modes = [change.value for change in found.changes if change.setting == "mode"]
    assert modes == [mode for mode in OTHER_POLICIES if mode != "kv"]
    assert found.changes[-1].text == "with the policy least-loaded, b is selected"
    assert "with the policy random, a is selected, too" in texts(found, of_policies=True)


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
    for router, note in (
        ({"temperature": 0.5}, "The selection was a random draw."),
        ({"mode": "round-robin"}, "The policy round-robin does not select by the cost settings."),
    ):
        found = await changes(fleet(**router))
        assert isinstance(found.notes, list)
        assert (found.notes[0].startswith(note), texts(found)) == (True, [])
        assert texts(found, of_policies=True)
    made = fleet("a", "b", "c", mode="least-loaded")
    made.ask("x", LONG, worker_id="a")
    found = await changes(made)
    winner = found.candidates[found.winner].seen.worker_id
    assert f"with 1 instead of 0 active requests on {winner}" in texts(found)[0]


def routed_in(log: SqliteLog) -> list[tuple[int, RequestRouted]]:
    """Return the routing decisions of a golden recording with their offsets."""
    records = [(one.offset, decode_journal(one)) for one in log.records(DECISIONS.name, 0, 0, 10_000)]
    return [(offset, record) for offset, record in records if isinstance(record, RequestRouted)]


async def test_encode_stages_and_route_queries() -> None:
    made = fleet("a", "b")
    made.query("q", LONG)
    found = await changes(made, "q")
    assert (found.attempt, bool(found.changes)) == (0, True)
    with closing(SqliteLog.open(FOLDER / "encode-stage.rec", readonly=True)) as log:
        at, record = next((at, one) for at, one in routed_in(log) if one.stage == "encode")
        found, *_ = (await explain(States(log, 0), record.request_id, with_changes=True)).routings
    assert (found.offset, found.stage) == (at, "encode")
    assert isinstance(found.notes, list)
    assert "An encode worker is always selected by its number of active requests" in found.notes[0]
    assert all("active requests" in text for text in texts(found))


async def test_every_attempt_has_its_changes() -> None:
    with closing(SqliteLog.open(FOLDER / "lost-workers.rec", readonly=True)) as log:
        routed = routed_in(log)
        request_id = next(record.request_id for _, record in routed if record.attempt > 1)
        found = (await explain(States(log, 0), request_id, with_changes=True)).routings
        without = (await explain(States(log, 0), request_id)).routings
    attempts = [(offset, record.attempt) for offset, record in routed if record.request_id == request_id]
    assert [(one.offset, one.attempt) for one in found] == attempts
    assert all(one.changes for one in found)
    assert [msgspec.structs.replace(one, changes=msgspec.UNSET, notes=msgspec.UNSET) for one in found] == [*without]
