"""Policies: by cost, by draw, by turn and of users; and what another configuration would have selected."""

from collections import Counter
from math import exp
from typing import Any, ClassVar, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.routing.draws import draw, lowest, mix64, scale_draw, softmax_weights
from forebay.core.routing.plan import Plan
from forebay.core.routing.policies import (
    BUILT_IN,
    Candidate,
    CustomPolicies,
    Policy,
    PolicyMissing,
    RoutingRequest,
    RoutingWorld,
)
from forebay.core.selection.counterfactual import (
    Alternative,
    Counterfactual,
    changed_booking_fields,
    counterfactual,
    merge_runtime_settings,
)
from forebay.core.state.pool_settings import PoolSettings
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.state_machine import digest_of
from forebay.core.step import claim
from forebay.core.world import World
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    DisaggConfig,
    DisaggregationSet,
    PolicySet,
    PoolConfigured,
    PoolSetting,
    QueueConfig,
    RouterConfig,
    RouterMode,
)
from forebay.events.decisions import RequestRejected, RequestRouted
from forebay.events.fleet import WorkerLost
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolRule
from forebay.events.requests import RouterOverride, RoutingHints
from tests.core.worlds import BLOCK, PROMPTS, Driver, joined, pool, query, request

SEEDS = [mix64(number) for number in range(3_000)]


def world(
    *active: int, costs: list[float] | None = None, computed: list[int] | None = None, turn: int = 0, **config: Any
) -> RoutingWorld:
    candidates = [Candidate(f"w{at}", active_requests=count) for at, count in enumerate(active)]
    zeros = [0] * len(candidates)
    arrays = np.array(costs or zeros, np.float64), np.array(active), np.array(computed or zeros)
    return RoutingWorld(candidates, *arrays, RouterConfig(**config), 64, turn, 0)


def decide(mode: str, seen: RoutingWorld, seed: int = 0) -> int:
    return BUILT_IN[mode]().decide(seen, RoutingRequest("r", 100, [], seed))


def test_draws_follow_the_weights_and_ties_are_spread() -> None:
    seen = Counter(draw([1, 2, 1], seed) for seed in SEEDS)
    assert [round(seen[at] / 750) for at in range(3)] == [1, 2, 1]
    ties = Counter(lowest(np.array([2.0, 1.0, 1.0, 1.0]), seed) for seed in SEEDS)
    assert set(ties) == {1, 2, 3}
    assert min(ties.values()) > 900
    assert lowest(np.array([3.0, 1.0, 1.0]), 7) == 2


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.integers(0, (1 << 64) - 1), st.floats(0.01, 10))
def test_a_selection_is_always_a_candidate(costs: list[float], seed: int, temperature: float) -> None:
    weights = softmax_weights(costs, temperature)
    assert max(weights) == weights[costs.index(min(costs))]
    assert 0 <= draw(weights, seed) < len(costs)
    assert 0 <= scale_draw(seed, len(costs)) < len(costs)
    assert costs[lowest(np.array(costs), seed)] == min(costs)


def test_kv_breaks_cost_ties_by_fewest_computed_tokens() -> None:
    seen = world(0, 0, 0, 0, costs=[2.0, 1.0, 1.0, 1.0], computed=[0, 9, 5, 5])
    assert {decide("kv", seen, seed) for seed in SEEDS} == {2, 3}
    assert (seen.costs, seen.computed_tokens) == ((2.0, 1.0, 1.0, 1.0), (0, 9, 5, 5)), "custom policies read tuples"
    assert decide("kv", world(0, 0, costs=[1.0, 2.0], computed=[9, 0])) == 0


def test_kv_takes_the_lowest_cost_or_draws_by_cost() -> None:
    assert decide("kv", world(0, 0, 0, costs=[3.0, 1.0, 2.0])) == 1
    drawn = Counter(decide("kv", world(0, 0, costs=[0.0, 1.0], temperature=1.0), seed) for seed in SEEDS)
    assert drawn[0] / drawn[1] == pytest.approx(exp(1), rel=0.15)


def test_round_robin_takes_turns() -> None:
    assert [decide("round-robin", world(0, 0, 0, turn=turn)) for turn in range(5)] == [0, 1, 2, 0, 1]


def test_random_draws_evenly() -> None:
    drawn = Counter(decide("random", world(0, 0, 0, 0), seed) for seed in SEEDS)
    assert min(drawn.values()) > 600
    assert decide("random", world(0, 0, 0, 0), 5) == decide("random", world(0, 0, 0, 0), 5)


def test_power_of_two_takes_the_less_loaded_of_two_and_may_miss_the_least() -> None:
    seen = world(5, 1, 9, 9)
    drawn = Counter(decide("power-of-two", seen, seed) for seed in SEEDS)
    # Of six pairs w1 wins three, w0 two, and the last one is between equals.
    assert drawn[1] / 3_000 == pytest.approx(1 / 2, abs=0.04)
    assert drawn[0] / 3_000 == pytest.approx(1 / 3, abs=0.04)
    assert drawn[2] + drawn[3] == pytest.approx(500, abs=100)
    assert decide("power-of-two", world(7), 3) == 0


def test_least_loaded_takes_the_fewest_requests() -> None:
    assert decide("least-loaded", world(2, 1, 3)) == 1
    assert {decide("least-loaded", world(1, 1, 3), seed) for seed in SEEDS} == {0, 1}


def test_every_mode_routes_and_is_journalled_by_its_name() -> None:
    for mode in BUILT_IN:
        drive = Driver().fleet("a", "b", mode=mode)
        hints = RoutingHints(worker_id="b") if mode == "direct" else RoutingHints()
        (routed,) = drive("requests", request("r", PROMPTS[0], routing=hints))
        assert isinstance(routed, RequestRouted)
        assert routed.mode == mode


def test_a_request_may_choose_another_mode_and_other_weights() -> None:
    drive = Driver().fleet("a", "b", mode="round-robin")
    hints = RoutingHints(override=RouterOverride(mode="kv", prefill_load_scale=3.0))
    (routed,) = drive("requests", request("r", PROMPTS[0], routing=hints))
    assert routed.mode == "kv"
    assert routed.ties == 2
    assert routed.terms.cost == 3.0 * 34 / 4 + 8


def test_direct_needs_a_worker() -> None:
    drive = Driver().fleet("a", "b", mode="direct")
    (refused,) = drive("requests", request("r"))
    assert refused.reason == "unknown_worker"
    assert "must name a worker" in refused.message


class Spy:
    """Keeps what it was given, which a policy must not do, and takes the last."""

    seen: ClassVar[list[tuple[RoutingWorld, RoutingRequest]]] = []

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        self.seen.append((world, request))
        return len(world.candidates) - 1


def test_the_fields_of_a_candidate() -> None:
    Spy.seen.clear()
    drive = Driver(custom={"mine.Spy": Spy}).fleet("a", "b", mode="mine.Spy")
    drive("requests", request("r2", PROMPTS[0][:2]))
    ((seen, routing_request),) = Spy.seen
    assert (routing_request.request_id, routing_request.prompt_tokens, routing_request.attempt) == ("r2", 10, 1)
    assert list(routing_request.blocks) == PROMPTS[0][:2]
    candidates = seen.candidates
    assert [candidate.worker_id for candidate in candidates] == ["a", "b"]
    assert list(candidates[0:1]) == [candidates[0]]
    assert candidates[-1].worker_id == "b"
    with pytest.raises(IndexError):
        candidates[2]
    assert (candidates[0].decode_blocks, candidates[0].kv_blocks_total, candidates[0].kv_blocks_used) == (2.0, 64, None)
    assert seen.costs == (10 / 4 + 2, 10 / 4 + 2)
    (routed,) = (one for one in drive.decided if isinstance(one, RequestRouted))
    assert (routed.worker_id, routed.ties) == ("b", 1)


GOOD = """
class Last:
    def decide(self, world, request):
        return len(world.candidates) - 1

class Broken:
    def decide(self, world, request):
        return {}["missing"]

class Beyond:
    def decide(self, world, request):
        return len(world.candidates)

class Odd:
    def decide(self, world, request):
        return "a"

class Leaves:
    def decide(self, world, request):
        raise SystemExit(3)

class Huge:
    def decide(self, world, request):
        return 10**5000

class Object:
    def decide(self, world, request):
        return object()

class Long:
    def decide(self, world, request):
        raise ValueError("long" * 100_000, object())
"""


@pytest.fixture
def mine() -> CustomPolicies:
    """Custom policies as a shell passes them, from a file without a path."""
    names: dict[str, type[Policy]] = {}
    exec(compile(GOOD, "mine.py", "exec"), names)  # tracebacks name the file
    return {f"mine.{name}": found for name, found in names.items() if not name.startswith("__")}


def test_a_users_policy_decides(mine: CustomPolicies) -> None:
    drive = Driver(custom=mine).fleet("a", "b", mode="mine.Last")
    (routed,) = drive("requests", request("r", PROMPTS[0]))
    assert (routed.worker_id, routed.mode) == ("b", "mine.Last")


def test_a_policy_that_the_operator_did_not_allow_decides_nothing(mine: CustomPolicies) -> None:
    drive = Driver(World(mine)).fleet("a", "b", mode="mine.Last")
    (rejected,) = drive("requests", request("r", PROMPTS[0]))
    assert (rejected.reason, "--allow-policy mine.Last" in rejected.message) == ("policy_failed", True)


def test_a_world_without_the_owners_policy_decides_nothing(mine: CustomPolicies) -> None:
    drive = Driver(custom=mine).fleet("a", "b", mode="mine.Last")
    drive.world.custom = {}
    with pytest.raises(PolicyMissing, match=r"pass --allow-policy mine\.Last"):
        drive("requests", request("r", PROMPTS[0]))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Broken", "Broken failed: KeyError (mine.py:8)"),
        ("Beyond", "returned a position outside its 2 candidates"),
        ("Odd", "returned str, not a position"),
        ("Leaves", "failed: SystemExit (mine.py:20)"),
        ("Huge", "returned a position outside its 2 candidates"),
        ("Object", "returned object, not a position"),
        ("Long", "failed: ValueError (mine.py:32)"),
    ],
)
def test_a_policy_that_fails_refuses_the_request_and_says_why(mine: CustomPolicies, name: str, problem: str) -> None:
    drive = Driver(custom=mine).fleet("a", "b", mode=f"mine.{name}")
    before = drive.world.requests.digest(), drive.world.load.digest()
    (refused,) = drive("requests", request("r", PROMPTS[0]))
    assert isinstance(refused, RequestRejected)
    assert refused.reason == "policy_failed"
    assert problem in refused.message
    assert "0x" not in refused.message  # derived again in another process it is the same
    assert (drive.world.requests.digest(), drive.world.load.digest()) == before
    assert drive.world.counts["rejected_policy_failed"] == 1


def test_every_built_in_policy_is_a_router_mode() -> None:
    assert set(BUILT_IN) == set(get_args(RouterMode))


ONE_TOKEN = BusyThresholds(active_prefill_tokens_threshold=1)


def policy(mode: str, name: str = "default", model: str = "m") -> PolicySet:
    return PolicySet(model=model, pool=name, mode=mode)


def routed(drive: Driver, name: str, **fields: Any) -> RequestRouted:
    (decided,) = drive("requests", request(name, **fields))
    assert isinstance(decided, RequestRouted)
    return decided


def test_a_policy_applies_to_later_decisions_of_its_pool() -> None:
    drive = Driver().fleet("a", "b")
    drive("control", PoolConfigured(pool="other", model="n", block_size=BLOCK))
    drive("fleet", joined("z", 0, pool="other", model="n"))
    assert routed(drive, "r1").mode == "kv"
    drive("control", policy("round-robin"))
    assert routed(drive, "r2").mode == "round-robin"
    assert routed(drive, "r3", model="n").mode == "kv"
    assert drive.world.pools["default"].router == RouterConfig(mode="round-robin")


def test_a_policy_is_valid_until_the_pool_is_configured_again() -> None:
    drive = Driver().fleet("a")
    configured = drive.world.settings.configured()
    drive("control", policy("random"))
    assert drive.world.settings.configured() == configured, "an owner that takes over keeps the policy"
    assert drive.copy().world.settings.modes == {"default": "kv"}
    assert routed(drive.copy(), "r1").mode == "random"
    drive("control", policy("least-loaded"))
    assert (drive.world.settings.modes, drive.world.settings.configured()) == ({"default": "kv"}, configured)
    drive("control", pool())
    assert (drive.world.settings.modes, routed(drive, "r2").mode) == ({}, "kv")


def test_the_configured_policy_leaves_nothing_in_the_state() -> None:
    changed, untouched = Driver().fleet("a"), Driver().fleet("a")
    changed("control", policy("random"))
    changed("control", policy("kv"))
    for _ in range(2):
        untouched("control", PoolDrainSet(model="m", pool="default", drained=False))
    assert changed.world.digest() == untouched.world.digest()


@pytest.mark.parametrize(
    ("event", "count"),
    [
        (policy("random", "gone"), "unknown_pool"),
        (policy("random", model="n"), "unknown_pool"),
        (policy("mine.Policy"), "policy_not_allowed"),
        (BusyThresholdsSet(model="n", thresholds=ONE_TOKEN), "unknown_model"),
        (DisaggregationSet(model="n", disagg=DisaggConfig(policy="never")), "unknown_model"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_apply_is_counted(event: PoolSetting, count: str) -> None:
    drive = Driver().fleet("a")
    before = drive.world.settings.snapshot()
    assert drive("control", event) == []
    assert (drive.world.counts[count], drive.world.settings.snapshot()) == (1, before)


@pytest.mark.parametrize(
    ("mode", "allowed", "expected"),
    [("mine.Policy", (), "kv"), ("mine.Policy", ("mine.Policy",), "mine.Policy"), ("random", (), "random")],
)
def test_an_owner_that_may_not_run_a_policy_returns_to_the_configured_one(
    mode: str, allowed: tuple[str, ...], expected: str
) -> None:
    drive = Driver(custom={"mine.Policy": BUILT_IN["round-robin"]}).fleet("a")
    drive("control", policy(mode))
    claim(drive.world, 7, allowed)
    assert (routed(drive, "r").mode, drive.world.counts["policy_not_allowed"]) == (expected, 0)


def test_a_policy_stays_if_the_owner_may_not_run_the_configured_one_either() -> None:
    drive = Driver(custom={"mine.Policy": BUILT_IN["random"]}).fleet("a")
    drive("control", pool(mode="mine.Configured"))
    drive("control", policy("mine.Policy"))
    claim(drive.world, 7)
    assert (drive.world.pools["default"].router.mode, drive.world.counts["policy_not_allowed"]) == ("mine.Policy", 1)


def test_a_policy_routes_requests_that_could_not_be_routed() -> None:
    drive = Driver().fleet("a", mode="direct")
    (refused,) = drive("requests", request("r"))
    assert refused.reason == "unknown_worker"
    drive("control", policy("kv"))
    assert routed(drive, "r2").worker_id == "a"


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        (PoolDrainSet(model="m", pool="a", drained=True, at_us=5), ("m", "a", True, 5)),
        (PoolCanarySet(model="m", pool="a", base="b", share=0.5, at_us=5), ("m", "a", "b", 0.5, 5)),
    ],
    ids=["drain", "canary"],
)
def test_rules_without_an_operator_keep_their_digests(event: PoolRule, fields: tuple[Any, ...]) -> None:
    settings, named = PoolSettings(), PoolSettings()
    assert settings.digest_of_rules() == 0
    settings.apply(event)
    assert settings.digest_of_rules() == digest_of(fields)
    named.apply(msgspec.structs.replace(event, operator="alice"))
    assert named.digest_of_rules() == digest_of((*fields, "alice"))


# Counterfactual selections in the recorded state


Seen = tuple[SubmittedRequest, Counterfactual]


def same(one: PoolConfigured) -> PoolConfigured:
    return one


def looking(driver: Driver, alternative: Alternative) -> list[Seen]:
    """Have a driver's world tell an alternative of its choices; what that would have done."""
    seen: list[Seen] = []
    world: World = driver.world

    def on_plan(plan: Plan) -> None:
        seen.append((plan.request, counterfactual(world, alternative(plan.pool), plan)))

    world.on_plan = on_plan
    return seen


def changed(**router: Any) -> Alternative:
    def alternative(pool: PoolConfigured) -> PoolConfigured:
        return msgspec.structs.replace(pool, router=msgspec.structs.replace(pool.router, **router))

    return alternative


def test_another_weight_selects_another_rank_with_positive_regret() -> None:
    drive = Driver().fleet("a", "b", overlap_score_credit=0.0)
    drive.stored("b")
    seen = looking(drive, changed(overlap_score_credit=1.0))
    (routed,) = drive("requests", request("r", PROMPTS[0], tie_seed=_seed_for("a")))
    assert routed.worker_id == "a"
    [(_, found)] = seen
    assert not found.agrees
    assert (found.overlap_blocks, found.history_overlap_blocks) == (8, 0)
    assert found.regret_blocks == 8.0, "the blocks that history lets a compute again"


def _seed_for(worker: str) -> int:
    """A seed with which equal costs go to this one of two workers."""
    for seed in range(64):
        (routed,) = Driver().fleet("a", "b")("requests", request("r", PROMPTS[0], tie_seed=seed))
        if routed.worker_id == worker:
            return seed
    raise AssertionError("ties go to one side only")


def test_regret_is_below_zero_where_the_alternative_pays_more() -> None:
    drive = Driver().fleet("a", "b")
    drive.stored("b")
    seen = looking(drive, changed(mode="round-robin"))
    drive("requests", request("r", PROMPTS[0]))
    [(_, found)] = seen
    assert found.choice is not None
    assert found.choice.config.mode == "round-robin"
    assert not found.agrees
    assert found.regret_blocks == -8.0


def test_a_rejection_by_the_alternative_has_no_selection() -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r1", PROMPTS[0]))
    seen = looking(drive, changed(busy=ONE_TOKEN))
    drive("requests", request("r2", PROMPTS[0]))
    [(_, found)] = seen
    assert found.refusal is not None
    assert found.refusal.reason == "busy"
    assert (found.choice, found.agrees, found.regret_blocks, found.overlap_blocks) == (None, False, None, 0)
    assert not found.would_hold


def test_the_recorded_rank_may_not_be_a_candidate() -> None:
    drive = Driver().fleet("a", "b")
    for name in ("r1", "r2"):
        drive("requests", request(name, PROMPTS[0], routing=RoutingHints(worker_id="b")))
    drive.stored("b")
    seen = looking(drive, changed(busy=ONE_TOKEN))
    (routed,) = drive("requests", request("r3", PROMPTS[0], routing=RoutingHints(override=cheapest_cache())))
    assert routed.worker_id == "b"
    [(_, found)] = seen
    assert found.choice is not None
    assert not found.agrees
    assert found.regret_blocks is None


def cheapest_cache() -> RouterOverride:
    """An override under which only what is cached counts: history follows the cache into a busy worker."""
    return RouterOverride(track_prefill_tokens=False, overlap_score_credit=100.0)


def test_an_alternative_may_queue_a_dispatched_request() -> None:
    drive = Driver().fleet("a")
    seen = looking(drive, changed(queue=QueueConfig(threshold=0.25)))
    drive("requests", request("r1", PROMPTS[0]))
    drive("requests", request("r2", PROMPTS[0]))
    drive("requests", query("q", PROMPTS[0]))
    assert [found.would_hold for _, found in seen] == [False, True, True]
    assert [found.agrees for _, found in seen] == [True, True, True]


def test_a_request_that_lost_its_worker_is_asked_about_as_it_is_routed_again() -> None:
    """Busy or not, in its session or not: thresholds and queues are for those who come first."""
    drive = Driver().fleet("a", "b")
    hints = RoutingHints(session_id="s")
    (routed,) = drive("requests", request("r1", PROMPTS[0], routing=hints))
    other = {"a": "b", "b": "a"}[routed.worker_id]
    drive("requests", request("r2", PROMPTS[1], routing=RoutingHints(worker_id=other)))
    strict = changed(busy=ONE_TOKEN, queue=QueueConfig(threshold=0.1), session_ttl_s=10.0)
    seen = looking(drive, strict)
    epoch = drive.epoch(routed.worker_id)
    (again,) = drive("fleet", WorkerLost(owner_epoch=0, worker_id=routed.worker_id, worker_epoch=epoch))
    assert (again.worker_id, again.attempt) == (other, 2)
    [(_, found)] = seen
    assert found.agrees
    assert not found.would_hold


def test_changed_booking_fields_are_listed() -> None:
    ours = pool()
    assert changed_booking_fields(ours, changed(temperature=1.0, mode="random")(ours)) == []
    booked = changed_booking_fields(ours, changed(use_kv_events=False, session_ttl_s=5.0)(ours))
    assert booked == ["use_kv_events", "session_ttl_s"]


def test_thresholds_set_by_hand_do_not_undo_those_of_the_alternative() -> None:
    drive = Driver().fleet("a")
    drive("control", BusyThresholdsSet(model="m", thresholds=BusyThresholds(active_prefill_tokens_threshold=10_000)))
    drive("requests", request("r1", PROMPTS[0]))
    seen = looking(drive, changed(busy=ONE_TOKEN))
    drive("requests", request("r2", PROMPTS[0]))
    looking_again = looking(drive, changed(temperature=0.5))
    drive("requests", request("r3", PROMPTS[0]))
    assert [found.refusal is None for _, found in (*seen, *looking_again)] == [False, True]


def test_only_what_the_alternative_changes_wins_over_thresholds_set_by_hand() -> None:
    recorded = BusyThresholds(active_decode_blocks_threshold=0.9)
    by_hand = BusyThresholds(active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold=7)
    assert merge_runtime_settings(recorded, recorded, by_hand) == by_hand
    other = BusyThresholds(active_decode_blocks_threshold=0.9, active_prefill_tokens_threshold=1)
    stricter = BusyThresholds(active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold=1)
    assert merge_runtime_settings(other, recorded, by_hand) == stricter
    assert merge_runtime_settings(BusyThresholds(), recorded, by_hand).active_decode_blocks_threshold is None
