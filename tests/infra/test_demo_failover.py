"""The verdict of `make demo-failover`."""

import argparse

import pytest

from tests.harness.demo_failover import BARS, PARTS, Result, Row, parts_of
from tests.harness.failover import Counts


def result(**changes: object) -> Result:
    row = Row("owner killed 2 times", Counts(sent=9, rejected=3), "no routing for p50 1.00 s, max 1.20 s")
    found = Result([row], [(9, 9)])
    for name, value in changes.items():
        setattr(found if hasattr(found, name) else row, name, value)
    return found


def test_a_demo_whose_bars_hold_is_ok() -> None:
    found = result()
    found.judge()
    assert found.problems == []
    assert found.line().splitlines()[2:] == [
        "  owner killed 2 times | 9 | 3 | 0 | no routing for p50 1.00 s, max 1.20 s | ok",
        "  verified 9 of 9: ok",
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"counts": Counts(9, 3, ["a: 0 ends, no error"])}, "owner killed 2 times: a: 0 ends, no error"),
        ({"verified": [(8, 9)]}, "8 of 9 decisions were derived equal"),
        ({"verified": [(0, 0)]}, "0 of 0 decisions were derived equal"),
    ],
)
def test_requests_that_suffer_and_decisions_that_differ_fail_the_demo(change: dict[str, object], problem: str) -> None:
    found = result(**change)
    found.judge()
    assert found.problems == [problem]
    assert found.line().endswith("FAILED (1 problems)")


def test_a_measurement_above_its_limit_is_a_problem() -> None:
    row = Row("owner stopped")
    row.require("the time without routing", BARS.stop_max_s, BARS.stop_max_s)
    assert row.problems == []
    row.require("the time without routing", BARS.stop_max_s + 0.01, BARS.stop_max_s)
    assert row.problems == ["the time without routing is 0.21 s, the limit is 0.2 s"]


def test_parts_are_known_names() -> None:
    assert parts_of("owner,redis") == ["owner", "redis"]
    assert parts_of(",".join(PARTS)) == list(PARTS)
    with pytest.raises(argparse.ArgumentTypeError, match=r"unknown parts \['disk'\]; parts are: owner, stop"):
        parts_of("owner,disk")
