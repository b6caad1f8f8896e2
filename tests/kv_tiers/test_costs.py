"""Measured costs: fits of known costs, and the choice between loading and computing."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.metrics import TierCosts
from forebay.kv_tiers.costs import PROBE_EVERY, CostModel
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
    cost = one.transfer("disk")
    assert cost is not None
    assert (cost.fixed_us, cost.block_us) == pytest.approx((250, 40), rel=1e-3)
    assert one.prefill is not None
    assert (one.prefill.token_us, one.prefill.attended_us, one.prefill.fixed_us) == pytest.approx(
        (11, 0.002, 500), rel=1e-3
    )


def test_an_event_has_the_costs_of_measured_tiers() -> None:
    costs = learned(250, 40, 11).measured(BLOCK)
    assert costs.prefill_block_us == pytest.approx(11 * BLOCK, rel=1e-3)
    (disk,) = costs.tiers
    assert disk.tier == "disk"
    assert (disk.fixed_us, disk.block_us) == pytest.approx((250, 40), rel=1e-3)
    assert CostModel().measured(BLOCK) == TierCosts(prefill_block_us=0.0)


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


def test_the_crossover_depends_on_the_length() -> None:
    one = learned(fixed_us=3200, block_us=80, token_us=10)  # computing a block takes 160 us
    assert one.worthwhile(0, [TierRun("disk", 30)], BLOCK) == 0
    assert one.worthwhile(0, [TierRun("disk", 50)], BLOCK) == 50


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


def test_equal_observations_give_equal_costs() -> None:
    assert learned(3, 7, 11).prefill == learned(3, 7, 11).prefill
