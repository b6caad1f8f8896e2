"""What candidates cost, term by term: Dynamo's worked examples, every weight, and the digest of the table."""

from math import exp, inf, nan, tanh
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.routing.cost import taint_factor
from forebay.core.state.prefix_index import NO_OVERLAP, Overlap
from forebay.events.control import RouterConfig
from forebay.events.requests import TaintWeight
from tests.core.costs import roster, table


def test_every_weight_counts() -> None:
    weights: dict[str, Any] = {
        "overlap_score_credit": 2.0,
        "host_cache_hit_weight": 0.5,
        "disk_cache_hit_weight": 0.25,
        "prefill_load_scale": 3.0,
        "decode_active_request_weight": 0.125,
    }
    seats = roster(a=(64, 7, 8))
    found = table(seats, 64 * 9, 8, overlaps={("a", 0): Overlap(1, 2, 4)}, active={("a", 0): 5}, **weights)
    terms = found.terms(0)
    assert (terms.cost, terms.prefill_blocks, terms.overlap_credit) == (3.0 * (10 - 4.0) + 10 + 1.0, 10.0, 4.0)
    assert (terms.decode_blocks, terms.active_requests) == (10.0, 8)
    assert (terms.device_overlap, terms.host_overlap, terms.disk_overlap) == (1, 2, 4)
    rich = table(roster(a=(0, 1, 1)), 64, overlaps={("a", 0): Overlap(1)}, overlap_score_credit=99.0)
    assert rich.costs == [1.0], "a credit saves what there is to save, no more"


def test_equal_overlaps_give_equal_credit() -> None:
    seats = roster(a=(0, 0, 0), b=(64, 0, 1), c=(0, 0, 0), d=(0, 0, 0))
    alike, other = Overlap(2, 1), Overlap(3)
    found = table(seats, 64 * 9, overlaps={("a", 0): alike, ("b", 0): alike, ("c", 0): other, ("d", 0): alike})
    assert [found.terms(at).overlap_credit for at in range(4)] == [2.75, 2.75, 3.0, 2.75]
    assert found.costs == [9 - 2.75, 10 - 2.75, 9 - 3.0, 9 - 2.75]


def test_overlaps_and_active_blocks_of_other_ranks_are_ignored() -> None:
    found = table(roster(a=(0, 0, 0)), 64, 1, overlaps={("gone", 0): Overlap(1)}, active={("gone", 0): 1})
    assert found.costs == [2.0]
    assert found.overlap(0) == NO_OVERLAP


def test_prefill_that_is_not_tracked_costs_nothing_and_the_credit_is_for_decode_blocks() -> None:
    seats = roster(a=(6400, 3, 1), b=(0, 3, 1))
    untracked: dict[str, Any] = {"overlaps": {("b", 0): Overlap(4)}, "track_prefill_tokens": False}
    found = table(seats, 640, 10, overlap_score_credit_decay=1.0, **untracked)
    assert found.costs == [13.0, 9.0]
    assert found.prefill_blocks == [0.0, 0.0]
    assert table(seats, 640, 10, decode_active_request_weight=0.5, **untracked).costs == [13.5, 9.5]
    assert table(seats, 640, 10, overlap_score_credit=0.0, **untracked).costs == [13.0, 13.0]
    assert table(seats, 640, overlap_score_credit=2.0, **untracked).costs == [3.0, 0.0]


def test_the_credit_of_a_busier_rank_decays() -> None:
    # b waits for one prompt like this one more than a: at decay 1 its blocks are worth half.
    seats = roster(a=(64, 0, 1), b=(64 + 640, 0, 1))
    overlaps = {("a", 0): Overlap(4), ("b", 0): Overlap(4, 2)}
    found = table(seats, 640, overlaps=overlaps, overlap_score_credit_decay=1.0, host_cache_hit_weight=0.5)
    assert [found.terms(at).overlap_credit for at in (0, 1)] == [4.0, 2.0 + 1.0]
    assert table(seats, 640, overlaps=overlaps).terms(1).overlap_credit == 4.0 + 1.5
    # A partial block is a block of the request: the same excess is ten blocks of ten. No blocks are as good as one.
    for tokens, credit in ((640 - 63, 2.0 + 1.5), (0, 4.0 / 11 + 1.5)):
        found = table(seats, tokens, overlaps=overlaps, overlap_score_credit_decay=1.0)
        assert found.terms(1).overlap_credit == credit


def test_lmetric_multiplies() -> None:
    seats = roster(a=(0, 10, 1), b=(0, 0, 0))
    found = table(seats, 640, overlaps={("a", 0): Overlap(8)}, selection_policy="lmetric")
    assert found.costs == [2.0 * 11.0, 10.0 * 1.0]


def test_preferred_taints_multiply_the_cost() -> None:
    seats = roster(a_ssd=(0, 0, 0), b=(0, 0, 0), c_ssd_old=(0, 0, 0))
    wishes = (TaintWeight(taint="ssd", weight=1.5), TaintWeight(taint="old", weight=-3.0))
    found = table(seats, 640, preferred_taints=wishes)
    factors = [found.terms(at).taint_factor for at in range(3)]
    assert factors == pytest.approx([exp(-tanh(1.5)), 1.0, exp(-tanh(-1.5))], rel=1e-12)
    assert found.costs == [10.0 * factor for factor in factors]
    assert taint_factor(0.0) == 1.0


@given(st.floats(-1e6, 1e6))
def test_a_taint_factor_lies_between_its_limits_and_falls(weight: float) -> None:
    factor = taint_factor(weight)
    assert factor == pytest.approx(exp(-tanh(weight)), rel=1e-12)
    assert exp(-1) - 1e-15 <= factor <= exp(1) + 1e-15


def test_the_table_digest_covers_every_term() -> None:
    plain = {"a": (0, 0, 0), "b": (0, 0, 0)}
    overlaps = {("b", 0): Overlap(1)}
    tables = [
        table(roster(**plain), 100, overlaps=overlaps),
        table(roster(**plain), 101, overlaps=overlaps),
        table(roster(**plain), 100, 1, overlaps=overlaps),
        table(roster(**plain), 100, overlaps={("a", 0): Overlap(1)}),
        table(roster(**plain), 100, overlaps={("b", 0): Overlap(0, 1)}, host_cache_hit_weight=1.0),
        table(roster(a=(0, 0, 0), c=(0, 0, 0)), 100, overlaps={("c", 0): Overlap(1)}),
        table(roster(a=(0, 0, 0)), 100),
        table(roster(a=(0, 0, 1), b=(0, 0, 0)), 100, overlaps=overlaps),
        table(roster(**plain), 100, overlaps=overlaps, preferred_taints=(TaintWeight(taint="x", weight=1.0),)),
    ]
    assert len({one.digest() for one in tables}) == len(tables)
    assert table(roster(**plain), 100, overlaps=overlaps).digest() == tables[0].digest()


@pytest.mark.parametrize("value", [nan, inf, -inf, -0.5, 1e7])
@pytest.mark.parametrize("name", ["temperature", "overlap_score_credit", "prefill_load_scale"])
def test_a_weight_that_is_no_number_is_refused_by_its_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number from 0 to 1e"):
        msgspec.structs.replace(RouterConfig(), **{name: value})
    with pytest.raises(ValueError, match="weight of the taint x"):
        TaintWeight(taint="x", weight=nan)
