"""The generated workload of `make demo-kafka`, and its verdict."""

from pathlib import Path
from typing import Any

import pytest

from forebay.simulate.reading import open_workload
from forebay.simulate.workload import WorkloadOptions
from tests.harness.demo_kafka import SECONDS, SEED, SESSIONS, TURNS, Result, write_trace


def test_the_generated_trace_is_deterministic_and_shares_prefixes(tmp_path: Path) -> None:
    one, two, other = tmp_path / "one", tmp_path / "two", tmp_path / "other"
    for path, seed in ((one, SEED), (two, SEED), (other, SEED + 1)):
        write_trace(path, seed)
    assert one.read_bytes() == two.read_bytes() != other.read_bytes()
    found = list(open_workload(str(one), WorkloadOptions()).turns())
    assert len(found) == SESSIONS * TURNS
    assert found[-1].at_us <= SECONDS * 1_000_000
    blocks = [block for row in found for block in row.block_ids]
    assert len(set(blocks)) < len(blocks) / 2, "turns repeat the earlier turns"


GOOD: dict[str, Any] = {
    "answered_once": 9,
    "killed_at": 5,
    "resumed_s": 6.04,
    "verified": 9,
    "decisions": 9,
    "owners": 2,
}


def test_the_last_line_summarizes_the_result() -> None:
    result = Result(9, **GOOD)
    result.judge()
    assert result.line() == (
        "9 requests, 9 answered once, owner killed at 5, routing resumed after 6.0 s, "
        "verified 9 of 9 across 2 owners: ok"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"answered_once": 8}, "1 requests were not answered once"),
        ({"resumed_s": 10.1}, "routing was to resume within 10 s"),
        ({"resumed_s": None}, "routing was to resume within 10 s"),
        ({"verified": 8}, "9 decisions were recorded and 8 of them derived equal"),
        ({"verified": 8, "decisions": 8}, "8 decisions were recorded and 8 of them derived equal"),
    ],
)
def test_each_unmet_requirement_is_reported(change: dict[str, float | None], problem: str) -> None:
    result = Result(9, **{**GOOD, **change})
    result.judge()
    assert result.problems == [problem]
    assert result.line().endswith(f": FAILED ({problem})")
