"""Measured costs, the choice between loading and computing, and the offload filter against its definition."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.metrics import TierCosts
from forebay.kv_tiers.costs import PROBE_EVERY, CostModel
from forebay.kv_tiers.frequency import FREQUENCY_MAX, FrequencyFilter, FrequencyLimits
from forebay.kv_tiers.manager import LowerTier, TierRun

BLOCK = 16


def learned(
    fixed_us: float, block_us: float, token_us: float, attended_us: float = 0.0, tier: LowerTier = "disk"
) -> CostModel:
    one = CostModel()
    for blocks in (1, 3, 8, 20, 64, 130):
        one.observe_load(tier, blocks, fixed_us + blocks * block_us)
        tokens = blocks * BLOCK
        for cached in (0, 512):
            pairs = tokens * (cached + cached + tokens - 1) / 2
            one.observe_prefill(tokens, cached, 500 + tokens * token_us + pairs * attended_us)
    return one


def test_costs_without_noise_are_found_exactly() -> None:
    one = learned(250, 40, 11, 0.002)
    (disk,) = one.measured(BLOCK).tiers
    assert (disk.tier, one.transfer("store")) == ("disk", None)
    assert (disk.fixed_us, disk.block_us) == pytest.approx((250, 40), rel=1e-3)
    assert learned(250, 40, 11).measured(BLOCK).prefill_block_us == pytest.approx(11 * BLOCK, rel=1e-3)
    assert CostModel().measured(BLOCK) == TierCosts(prefill_block_us=0.0)
    assert one.prefill is not None
    assert (one.prefill.token_us, one.prefill.attended_us, one.prefill.fixed_us) == pytest.approx(
        (11, 0.002, 500), rel=1e-3
    )


def test_nothing_is_known_at_first() -> None:
    one = CostModel()
    assert (one.transfer("host"), one.prefill) == (None, None)
    one.observe_load("host", 0, 5)
    one.observe_prefill(5, 0, 0)
    for _ in range(3):
        one.observe_load("host", 4, 10)
        one.observe_prefill(4, 0, 10)
    assert (one.transfer("host"), one.prefill) == (None, None)


def test_everything_is_loaded_until_the_costs_are_known() -> None:
    one = CostModel()
    assert one.worthwhile(0, [TierRun("disk", 9)], BLOCK) == 9
    assert one.worthwhile(0, [], BLOCK) == 0
    one = learned(250, 1e9, 10)
    assert one.worthwhile(0, [TierRun("store", 9)], BLOCK) == 9
    assert one.worthwhile(0, [TierRun("disk", 9)], BLOCK) == 0


def test_equal_observations_fit_a_proportional_cost() -> None:
    one = CostModel()
    for _ in range(10):
        one.observe_load("disk", 8, 800)
        one.observe_prefill(128, 0, 1280)
    cost = one.transfer("disk")
    assert cost is not None
    assert cost.fixed_us + 8 * cost.block_us == pytest.approx(800)
    assert one.prefill is not None
    assert one.prefill.fixed_us + one.prefill.us(0, 128) == pytest.approx(1280)


@given(st.integers(0, 1 << 30), st.floats(0, 5_000), st.floats(1, 500), st.floats(0.1, 50))
def test_the_rule_is_near_the_better_choice_despite_noise(
    seed: int, fixed_us: float, block_us: float, token_us: float
) -> None:
    """Every twentieth load takes ten times as long, and all times vary by 10 %."""
    random = Random(seed)
    one = CostModel()
    for _ in range(150):
        blocks = random.randint(1, 128)
        slow = 10 if random.random() < 0.05 else 1
        one.observe_load("disk", blocks, (fixed_us + blocks * block_us) * random.uniform(0.9, 1.1) * slow)
        one.observe_prefill(blocks * BLOCK, 0, (blocks * BLOCK * token_us) * random.uniform(0.9, 1.1))
    for blocks in (1, 2, 4, 8, 16, 32, 64, 128):
        load_us, prefill_us = fixed_us + blocks * block_us, blocks * BLOCK * token_us
        loads = one.worthwhile(0, [TierRun("disk", blocks)], BLOCK)
        assert loads in {0, blocks}
        assert (load_us if loads else prefill_us) <= 1.5 * min(load_us, prefill_us)


def test_attention_makes_later_blocks_worth_loading() -> None:
    one = learned(fixed_us=0, block_us=200, token_us=10, attended_us=0.005)
    assert one.worthwhile(0, [TierRun("disk", 20)], BLOCK) == 0
    assert one.worthwhile(10_000, [TierRun("disk", 20)], BLOCK) == 20


def test_only_the_runs_that_pay_are_loaded() -> None:
    one = learned(fixed_us=100, block_us=10, token_us=10)
    for blocks in (1, 4, 9, 30):
        one.observe_load("store", blocks, 50_000 + blocks * 500)
    assert one.worthwhile(0, [TierRun("disk", 20), TierRun("store", 20)], BLOCK) == 20
    assert one.worthwhile(0, [TierRun("store", 20), TierRun("disk", 20)], BLOCK) == 0
    long = [TierRun("disk", 20), TierRun("host", 2), TierRun("disk", 20)]
    assert one.worthwhile(0, long, BLOCK) == 42, "nothing is known about host memory"


def test_rejected_loads_are_tried_from_time_to_time() -> None:
    one = learned(fixed_us=0, block_us=1_000_000, token_us=10)
    tried = []
    for _ in range(3 * PROBE_EVERY):
        tried.append(one.worthwhile(0, [TierRun("disk", 5)], BLOCK))
        for _ in range(10 * (tried[-1] == 0)):
            assert one.worthwhile(0, [TierRun("disk", 5)], BLOCK) == 0, "the same request again"
        one.observe_prefill(80, 0, 800)
    assert (tried.count(5), tried.count(0)) == (3, 3 * PROBE_EVERY - 3)


def test_newer_observations_replace_older_ones() -> None:
    one = learned(fixed_us=0, block_us=1_000_000, token_us=10)
    for _ in range(400):
        for blocks in (2, 30):
            one.observe_load("disk", blocks, 20.0 * blocks)
    cost = one.transfer("disk")
    assert cost is not None
    assert cost.block_us == pytest.approx(20, rel=0.01)


# The offload filter: 1 at first, doubled per offer, 1 less per tick, bounded


keys = st.integers(0, 6)


@given(st.lists(st.none() | st.lists(keys, max_size=5)))
def test_frequencies_follow_the_definition(steps: list[list[int] | None]) -> None:
    one: FrequencyFilter[int] = FrequencyFilter(FrequencyLimits())
    expected: dict[int, int] = {}
    for step in steps:
        if step is None:
            one.tick()
            expected = {key: count - 1 for key, count in expected.items() if count > 1}
            continue
        one.offer(step)
        for key in step:
            expected[key] = min(2 * expected[key], FREQUENCY_MAX) if key in expected else 1
        assert one.passing(range(7)) == [key for key in range(7) if expected.get(key, 0) >= 2]
    assert {key: one.frequency(key) for key in range(7)} == {key: expected.get(key, 0) for key in range(7)}
    assert len(one) == len(expected)


@given(st.lists(st.none() | st.lists(st.integers(0, 20), max_size=8)), st.integers(1, 8))
def test_the_filter_is_bounded(steps: list[list[int] | None], keys_max: int) -> None:
    one: FrequencyFilter[int] = FrequencyFilter(FrequencyLimits(keys_max=keys_max))
    for step in steps:
        if step is None:
            one.tick()
        else:
            one.offer(step)
            assert not step or one.frequency(step[-1]) >= 1
        assert len(one) <= keys_max


def test_a_full_filter_forgets_the_rarest_key() -> None:
    one: FrequencyFilter[str] = FrequencyFilter(FrequencyLimits(keys_max=3))
    one.offer(["a", "a", "b", "c", "c", "d"])
    assert [one.frequency(key) for key in "abcd"] == [2, 0, 2, 1]
    one.offer(["d", "e"])
    assert [one.frequency(key) for key in "acde"] == [0, 2, 2, 1]


def test_clear_forgets_all_keys() -> None:
    one: FrequencyFilter[str] = FrequencyFilter(FrequencyLimits())
    one.offer("aab")
    one.clear()
    assert (len(one), one.frequency("a")) == (0, 0)
    one.offer("a")
    one.tick()
    assert len(one) == 0
