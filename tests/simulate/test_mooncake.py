"""Mooncake-format traces: what a row names, what is refused, and that hashes without tokens share as tokens do."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.blocks import sequence_hashes
from forebay.events.base import U64_MASK, pack_u32, pack_u64, unpack_u64
from forebay.simulate.mooncake import BLOCK_TOKENS, Row, TraceUnusable, rows

GOOD: dict[str, Any] = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}


@st.composite
def some_rows(draw: st.DrawFn) -> Row:
    # Few ids, so that prompts share beginnings, repeat ids, and meet the same id behind another parent.
    ids = draw(st.lists(st.integers(min_value=0, max_value=2), min_size=1, max_size=4))
    length = draw(st.integers(min_value=1, max_value=len(ids) * BLOCK_TOKENS))
    return Row(0, length, 1, ids)


def common(one: list[int], two: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@given(some_rows(), some_rows(), st.sampled_from([16, 48, 64, 512, 700]))
def test_hashes_are_shared_exactly_where_tokens_are(one: Row, two: Row, block_size: int) -> None:
    ours = [row.sequence_hashes(block_size) for row in (one, two)]
    real = [unpack_u64(sequence_hashes(pack_u32(row.prompt()), block_size)) for row in (one, two)]
    assert [len(hashes) for hashes in ours] == [len(hashes) for hashes in real]
    assert common(*ours) == common(*real)
    assert len(set(ours[0] + ours[1])) == len(set(real[0] + real[1])), "what is not shared is different"
    assert all(0 <= block <= U64_MASK for block in ours[0])
    pack_u64(ours[0])


def test_rows_come_in_order_of_time_and_equal_times_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{**GOOD, "timestamp": at, "output_length": number} for number, at in enumerate((7, 3, 7, 3, 9), 1)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [row.output_length for row in rows(path, None)] == [2, 4, 1, 3, 5]
    assert [row.output_length for row in rows(path, 0.009)] == [2, 4, 1, 3]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        ({"input_length": None}, "input_length"),
        ({"timestamp": -1}, "timestamp"),
        ({"timestamp": 1e13}, "timestamp"),
        ({"input_length": 0}, "input_length"),
        ({"output_length": -3}, "output_length"),
        ({"output_length": 1 << 31}, "output_length"),
        ({"input_length": 1025}, "2 hash ids do not cover 1025 tokens"),
        ({"hash_ids": [1, "x"]}, "hash_ids"),
    ],
)
def test_a_bad_row_is_named_with_its_line_and_the_reason(
    tmp_path: Path, line: str | dict[str, object], reason: str
) -> None:
    path = tmp_path / "trace.jsonl"
    bad = line if isinstance(line, str) else json.dumps({**GOOD, **line})
    path.write_text(f"{json.dumps(GOOD)}\n{bad}\n")
    with pytest.raises(TraceUnusable, match=rf"line 2: .*{reason}"):
        list(rows(path, None))


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(TraceUnusable, match="holds no request"):
        list(rows(path, None))
    with pytest.raises(TraceUnusable, match="cannot be read"):
        list(rows(tmp_path / "none.jsonl", None))
