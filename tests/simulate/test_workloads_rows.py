"""Files of requests: rows in the dialects of Mooncake, the native format, tables, and their errors."""

import json
import os
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli.trace.client import prompt
from forebay.core.block_hashes import sequence_hashes as hashes_of_tokens
from forebay.events.base import pack_u32, unpack_u64
from forebay.runtime.errors import ConfigError
from forebay.simulate.reading import FORMATS, detect_format, open_workload
from forebay.simulate.workload import Turn, WorkloadOptions, sequence_hashes
from forebay.simulate.workloads import prepare as played
from forebay.simulate.workloads.rows import FORMAT, LinkedRow, WorkloadHeader, encode_workload
from forebay.simulate.workloads.source import REASONS_MAX
from forebay.simulate.workloads.synthetic import SyntheticSettings

GOOD: dict[str, Any] = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
HEADER: dict[str, Any] = {"format": FORMAT, "version": 1, "block_tokens": 512}
BLOCK_TOKENS = 512


def write(path: Path, lines: Iterable[str | dict[str, Any]]) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def turns(path: str, **options: Any) -> list[Turn]:
    return list(open_workload(path, WorkloadOptions(**options)).turns())


@st.composite
def some_turns(draw: st.DrawFn) -> Turn:
    # Few ids, so that prompts share prefixes, repeat ids and have equal ids under different parents.
    ids = draw(st.lists(st.integers(min_value=0, max_value=2), min_size=1, max_size=4))
    length = draw(st.integers(min_value=1, max_value=len(ids) * BLOCK_TOKENS))
    return Turn(number=0, prompt_tokens=length, output_tokens=1, block_ids=tuple(ids))


def common(one: Sequence[int], two: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@given(some_turns(), some_turns(), st.sampled_from([16, 48, 64, 512, 700]))
def test_hashes_are_shared_exactly_where_tokens_are(one: Turn, two: Turn, block_size: int) -> None:
    ours = [unpack_u64(sequence_hashes(turn, BLOCK_TOKENS, block_size)) for turn in (one, two)]
    real = [unpack_u64(hashes_of_tokens(pack_u32(prompt(turn, BLOCK_TOKENS)), block_size)) for turn in (one, two)]
    assert [len(hashes) for hashes in ours] == [len(hashes) for hashes in real]
    assert common(*ours) == common(*real)
    assert len(set(ours[0] + ours[1])) == len(set(real[0] + real[1])), "what is not shared is different"


def test_prompts_without_ids_share_nothing() -> None:
    one, two = (Turn(number=number, prompt_tokens=100, output_tokens=1) for number in (1, 2))
    assert len(prompt(one, BLOCK_TOKENS)) == 100
    assert prompt(one, BLOCK_TOKENS) == prompt(one, BLOCK_TOKENS) != prompt(two, BLOCK_TOKENS)


def test_equal_times_keep_the_order_of_the_file(tmp_path: Path) -> None:
    times = (0, 3, 3, 3, 7, 7.5)
    rows = [{**GOOD, "timestamp": at, "output_length": at_ + 1} for at_, at in enumerate(times)]
    path = write(tmp_path / "t", [HEADER, *rows])
    found = turns(path)
    assert [turn.output_tokens for turn in found] == [1, 2, 3, 4, 5, 6]
    assert [turn.number for turn in found] == list(range(6))
    assert [turn.at_us for turn in found] == [0, 3_000, 3_000, 3_000, 7_000, 7_500]
    assert len(turns(path, duration_s=0.007)) == 4
    assert len(turns(path, requests_max=2)) == 2
    assert [turn.at_us for turn in turns(path, speed=2)] == [0, 1_500, 1_500, 1_500, 3_500, 3_750]


WITHOUT_IDS: list[tuple[str | dict[str, object], str]] = [  # valid in the native format
    ('{"timestamp": 6, "input_length": 1, "output_length": 1}', "hash_ids"),
    ({"hash_ids": []}, "hash"),
]
BAD_ROWS: list[tuple[str | dict[str, object], str]] = [
    ("{", "truncated"),
    ("[1, 2]", "object"),
    ("nonsense", "malformed"),
    ({"input_length": None}, "input_length"),
    ({"input_length": "600"}, "input_length"),
    ({"timestamp": -1}, "timestamp"),
    ({"timestamp": 1e13}, "timestamp"),
    ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "malformed"),
    ('{"timestamp": 1e999, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "out of range"),
    ({"timestamp": 4}, "1 ms before that of an earlier row"),
    ({"input_length": 0}, "input_length"),
    ({"input_length": 10**9}, "input_length"),
    ({"input_length": 10**40}, "input_length"),
    ({"output_length": -3}, "output_length"),
    ({"output_length": 1 << 31}, "output_length"),
    ({"output_length": 2.5}, "output_length"),
    ({"input_length": 1025}, "2 hash ids cover fewer than 1025 tokens"),
    ({"input_length": 512}, "got 2 hash ids for 512 tokens; at most 1 of 512 tokens each"),
    ({"hash_ids": [1, "x"]}, "hash_ids"),
    ({"hash_ids": [1, -2]}, "hash_ids"),
    ({"hash_ids": [1, 1 << 64]}, "the hash id 18446744073709551616 exceeds 64 bits"),
    ('{"x": ' + "[" * 100_000, "recursion"),
    ({"hash_ids": [2, 1]}, "hash id 2 comes first, but came after 1"),
    ({"hash_ids": [1, 1]}, "hash id 1 comes after 1, but came first"),
    ({"hash_ids": [7, 2]}, "hash id 2 comes after 7, but came after 1"),
]


@pytest.mark.parametrize(
    ("header", "bad", "reason"),
    [
        *(([], *case) for case in (*BAD_ROWS, *WITHOUT_IDS)),
        *(([HEADER], *case) for case in BAD_ROWS),
        *(([HEADER, {**GOOD, "id": "linked"}], *case) for case in BAD_ROWS),
        *(([{**GOOD, "session_id": "linked"}], *case) for case in (*BAD_ROWS, *WITHOUT_IDS)),
    ],
)
def test_error_names_the_line_and_reason_of_an_invalid_row(
    tmp_path: Path, header: list[dict[str, Any]], bad: str | dict[str, object], reason: str
) -> None:
    line = bad if isinstance(bad, str) else json.dumps({**GOOD, **bad})
    path = write(tmp_path / "trace.jsonl", [*header, GOOD, "", line, {**GOOD, "timestamp": 6, "hash_ids": [7, 8]}])
    workload = open_workload(path, WorkloadOptions())
    place = rf"trace.jsonl, line {len(header) + 3}: .*{reason}"
    with pytest.raises(ConfigError, match=place):
        workload.survey()
    with pytest.raises(ConfigError, match=place):
        list(workload.turns())
    skipping = open_workload(path, WorkloadOptions(skip_bad_rows=True))
    survey = skipping.survey()
    good = len([row for row in header if row is not HEADER]) + 2
    assert (survey.requests, survey.skipped, len(survey.reasons)) == (good, 1, 1)
    assert reason in survey.reasons[0]
    found = list(skipping.turns())
    assert [turn.number for turn in found] == list(range(good))
    assert [(turn.at_us, turn.block_ids) for turn in found[-2:]] == [(5_000, (1, 2)), (6_000, (7, 8))]


def test_first_reasons_are_listed_and_all_bad_rows_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "t", [GOOD, *["{"] * (REASONS_MAX + 7), GOOD])
    survey = open_workload(path, WorkloadOptions(skip_bad_rows=True)).survey()
    assert (survey.requests, survey.skipped, len(survey.reasons)) == (2, REASONS_MAX + 7, REASONS_MAX)


def test_empty_workload_is_rejected(tmp_path: Path) -> None:
    for text in ("", "\n", "\n\n"):
        (tmp_path / "empty").write_text(text)
        with pytest.raises(ConfigError, match="contains no request to play"):
            turns(str(tmp_path / "empty"))
    path = write(tmp_path / "bad", ["{", "}"])
    with pytest.raises(
        ConfigError, match=r"contains no request to play; 2 rows were skipped, the first one: .* line 1"
    ):
        turns(f"mooncake:{path}", skip_bad_rows=True)
    with pytest.raises(ConfigError, match="contains no request to play"):
        turns(write(tmp_path / "late", [GOOD]), duration_s=0.001)


def test_unreadable_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        turns(str(tmp_path / "none.jsonl"))
    (tmp_path / "binary").write_bytes(b"\x89PNG\0\0\0\n" * 10)
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        turns(str(tmp_path / "binary"))
    (tmp_path / "wide").write_text(json.dumps(GOOD), encoding="utf-16")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        turns(str(tmp_path / "wide"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        turns(str(tmp_path / "folder"))
    with pytest.raises(ConfigError, match="cannot be read"):
        turns(f"mooncake:{tmp_path / 'none'}")
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "mooncake:pipe"):
        with pytest.raises(ConfigError, match="pipe: is a pipe or a device, which cannot be read twice"):
            turns(name.replace("pipe", str(tmp_path / "pipe")))


def test_line_endings_and_a_byte_order_mark_are_ignored(tmp_path: Path) -> None:
    lines = [GOOD, {**GOOD, "timestamp": 9, "delay": 0}]
    plain = write(tmp_path / "plain", lines)
    other = tmp_path / "other"
    other.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, lines)).encode())
    assert turns(str(other)) == turns(plain)
    ours = tmp_path / "ours"
    ours.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, [HEADER, *lines])).encode() + b"\r\n")
    assert turns(str(ours)) == turns(plain)


def test_a_session_continues_after_its_responses(tmp_path: Path) -> None:
    rows = [
        {**GOOD, "timestamp": 0, "session_id": "a", "output_length": 1},
        {**GOOD, "timestamp": 100, "session_id": "b", "output_length": 2},
        {**GOOD, "session_id": "a", "delay": 40.5, "output_length": 3, "timestamp": 90},
        {**GOOD, "timestamp": 200, "session_id": "c", "output_length": 4},
        {**GOOD, "session_id": "b", "output_length": 5, "timestamp": None},
        {**GOOD, "session_id": "a", "delay": 7, "output_length": 6, "timestamp": None},
        {**GOOD, "timestamp": 300, "session_id": "c", "output_length": 7},
    ]
    rows = [{name: value for name, value in row.items() if value is not None} for row in rows]
    found = turns(write(tmp_path / "sessions.jsonl", rows))
    # A dependent row comes after its dependency and before the next row with a fixed time.
    assert [turn.output_tokens for turn in found] == [1, 3, 6, 2, 5, 4, 7]
    assert [turn.after for turn in found] == [(), (0,), (1,), (), (3,), (), ()]
    assert [turn.delay_us for turn in found] == [0, 40_500, 7_000, 0, 0, 0, 0]
    assert [turn.at_us for turn in found] == [0, 0, 0, 100_000, 0, 200_000, 300_000]
    assert "".join(turn.session_id for turn in found) == "aaabbcc"
    # The turns of a session that arrive within 0.05 s if every response is instant.
    assert [turn.output_tokens for turn in turns(str(tmp_path / "sessions.jsonl"), duration_s=0.045)] == [1, 3]


LINKS: list[tuple[list[dict[str, Any]], int, str]] = [
    ([{"after": [7], "timestamp": 9}], 3, "names 7, which is not a valid earlier row"),
    ([{"after": [1], "timestamp": 9}], 3, "names 1, which is not a valid earlier row"),
    ([{"after": [-1], "timestamp": 9}], 3, "names -1"),
    ([{"after": ["x"], "timestamp": 9}], 3, "names 'x'"),
    ([{"id": "x", "timestamp": 9}, {"id": "x", "timestamp": 9}], 4, "duplicate id 'x', first used on line 3"),
    ([{"delay": 5}], 3, "missing required field `timestamp`"),
    ([{"delay": 5, "timestamp": 9}], 3, "a delay of 5.0 ms, but there is no earlier response"),
    ([{"delay": -5, "after": [0]}], 3, "delay"),
    ([{"after": [1.5]}], 3, "after"),
]


@pytest.mark.parametrize(("rows", "line", "reason"), LINKS)
def test_error_names_a_row_without_its_dependency(
    tmp_path: Path, rows: list[dict[str, Any]], line: int, reason: str
) -> None:
    bare = {name: value for name, value in GOOD.items() if name != "timestamp"}
    path = write(tmp_path / "t", [HEADER, {**GOOD, "id": "first"}, *({**bare, **row} for row in rows)])
    with pytest.raises(ConfigError, match=rf"line {line}: .*{reason}"):
        turns(path)
    survey = open_workload(path, WorkloadOptions(skip_bad_rows=True)).survey()
    assert (survey.requests, survey.skipped) == (len(rows), 1)


def test_dependents_of_skipped_rows_are_skipped(tmp_path: Path) -> None:
    rows = [
        {**GOOD, "timestamp": 5},
        {**GOOD, "timestamp": 4, "id": "back"},
        {**GOOD, "after": ["back"], "id": "lost", "output_length": 8},
        {**GOOD, "after": ["lost", 0]},
        {**GOOD, "after": [0], "output_length": 9},
    ]
    path = write(tmp_path / "t", [HEADER, *rows])
    workload = open_workload(path, WorkloadOptions(skip_bad_rows=True))
    assert workload.survey().skipped == 3
    assert [(turn.number, turn.after, turn.output_tokens) for turn in workload.turns()] == [(0, (), 3), (1, (0,), 9)]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({**HEADER, "version": 2}, "version 2"),
        ({**HEADER, "format": "other"}, "'other'"),
        ({**HEADER, "block_tokens": 0}, "block_tokens 0"),
        ({**HEADER, "block_tokens": "x"}, "invalid workload header"),
    ],
)
def test_an_unknown_header_is_rejected(tmp_path: Path, header: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"line 1: .*{reason}"):
        turns(write(tmp_path / "t", [header, GOOD]))


def test_model_names_are_used_only_with_by_model(tmp_path: Path) -> None:
    path = write(tmp_path / "t", [HEADER, {**GOOD, "model": "large"}])
    [one] = turns(path)
    [other] = turns(path, by_model=True)
    assert (one.model, other.model) == ("", "large")
    assert open_workload(path, WorkloadOptions()).survey().notes == [
        "all requests go to one model; the model names in the workload are ignored"
    ]
    assert open_workload(path, WorkloadOptions(by_model=True)).survey().notes == []


LINE = st.one_of(
    st.binary(max_size=40),
    st.fixed_dictionaries(
        {"timestamp": st.integers(0, 9), "input_length": st.integers(0, 1100), "output_length": st.integers(0, 2)},
        optional={
            "hash_ids": st.lists(st.integers(-1, 4), max_size=3),
            "session_id": st.sampled_from(["a", "b", 1]),
            "delay": st.integers(-1, 3),
            "after": st.lists(st.one_of(st.integers(-2, 5), st.text(max_size=1)), max_size=2),
            "id": st.text(max_size=1),
        },
    ).map(lambda row: json.dumps(row).encode()),
)


@given(header=st.booleans(), lines=st.lists(LINE, max_size=8), skip=st.booleans())
def test_any_file_is_played_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, header: bool, lines: list[bytes], skip: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "rows-fuzz"
    path.write_bytes(b"\n".join(([json.dumps(HEADER).encode()] if header else []) + lines))
    try:
        workload = open_workload(str(path), WorkloadOptions(skip_bad_rows=skip))
        survey = workload.survey()
    except ConfigError:
        return
    found = list(workload.turns())
    assert len(found) == survey.requests > 0
    assert [turn.number for turn in found] == list(range(len(found)))
    assert all(one < turn.number for turn in found for one in turn.after)
    own = [turn.at_us for turn in found if not turn.after]
    assert own == sorted(own)


# Formats: the native one is lossless, tables are supported, and formats are detected


US_MAX = 3_155_760_000_000_000


@st.composite
def valid_turns(draw: st.DrawFn) -> list[Turn]:
    """Generate valid turns: monotone times, chained block ids, dependents after their dependencies."""
    found: list[Turn] = []
    group: list[int] = []  # number of rows with a fixed time up to and including each row
    at_us = own = 0
    for number in range(draw(st.integers(1, 6))):
        last = [one for one in range(number) if group[one] == own]
        after = draw(st.lists(st.sampled_from(range(number)), unique=True, max_size=2)) if number else []
        if after and not any(one in last for one in after):
            after = [*after, last[0]]
        if not after:
            own += 1
            at_us = draw(st.integers(at_us, min(US_MAX, at_us + 10 ** draw(st.integers(0, 15)))))
        group.append(own)
        blocks = draw(st.integers(0, 4))
        kind = draw(st.integers(0, 2))
        found.append(
            Turn(
                number=number,
                prompt_tokens=draw(st.integers(64 * blocks - 63, 64 * blocks) if blocks else st.integers(1, 1 << 24)),
                output_tokens=draw(st.integers(1, (1 << 31) - 1)),
                block_ids=tuple((1 << 53) - 1 - 10 * kind - at for at in range(blocks)),
                at_us=draw(st.sampled_from([0, 1, 999, 1_000, US_MAX])) if after else at_us,
                after=tuple(after),
                delay_us=draw(st.integers(0, US_MAX)) if after else 0,
                session_id=draw(st.text(max_size=3)),
                model=draw(st.text(max_size=3)),
            )
        )
    return found


@given(valid_turns())
def test_the_native_format_is_lossless(tmp_path_factory: pytest.TempPathFactory, wanted: list[Turn]) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.jsonl"
    path.write_bytes(b"".join(encode_workload(wanted, WorkloadHeader(block_tokens=64, name="n", source="s"))))
    workload = open_workload(str(path), WorkloadOptions(by_model=True))
    assert (workload.name, workload.block_tokens, workload.survey().requests) == ("n", 64, len(wanted))
    assert list(workload.turns()) == wanted
    again = list(encode_workload(workload.turns(), WorkloadHeader(block_tokens=64, name="n", source="s")))
    assert b"".join(again) == path.read_bytes()


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951699,396,109

2023-11-16 18:15:50.9951699,17,1
2023-11-17 00:00:00,1,5
"""


def test_azures_rows_have_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_bytes(AZURE.replace("\n", "\r\n").encode())
    workload = open_workload(str(path), WorkloadOptions())
    found = list(workload.turns())
    assert [turn.at_us for turn in found] == [0, 4_314_579, 4_314_579, 20_653_319_410]
    assert [(turn.prompt_tokens, turn.output_tokens) for turn in found] == [(374, 44), (396, 109), (17, 1), (1, 5)]
    assert not any(turn.block_ids for turn in found)
    assert workload.survey().notes == ["the trace has no block ids, so prompts share no prefixes"]
    other = tmp_path / "columns"
    other.write_text("GeneratedTokens,x,TIMESTAMP,ContextTokens\n5,y,2023-11-16T18:15:46Z,7\n")
    [one] = open_workload(f"azure:{other}", WorkloadOptions()).turns()
    assert (one.prompt_tokens, one.output_tokens) == (7, 5)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2023-11-16 18:15:51,1", "2 fields; GeneratedTokens is missing"),
        ("yesterday,1,1", "expected a timestamp or seconds, and two integers"),
        ("2023-13-41 18:15:51,1,1", "expected a timestamp or seconds, and two integers"),
        ("2023-11-16 18:15:51,1.5,1", "expected a timestamp or seconds, and two integers"),
        ("2023-11-16 18:15:51,,1", "expected a timestamp or seconds, and two integers"),
        ("2023-11-16 18:15:51,-4,1", "a prompt of -4 tokens"),
        ("2023-11-16 18:15:51,99999999999,1", "a prompt of 99999999999 tokens"),
        ("2023-11-16 18:15:51,1,0", "a response of 0 tokens"),
        ("2023-11-15 18:15:51,1,1", "is before that of the first row"),
        ("2023-11-16 18:15:50,1,1", "ms before that of an earlier row"),
        ('"2023', "is not a line of CSV"),
        ("2023-11-16 18:15:51,\u0663,1", "expected a timestamp or seconds, and two integers"),
        ("2124-11-16 18:15:51,1,1", "is more than 100 years after that of the first row"),
    ],
)
def test_error_names_an_invalid_azure_row(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE + line)
    lines = AZURE.splitlines()
    lines.insert(3, line)
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=rf"azure.csv, line 4: .*{reason}"):
        open_workload(str(path), WorkloadOptions()).survey()
    survey = open_workload(str(path), WorkloadOptions(skip_bad_rows=True)).survey()
    assert (survey.requests, survey.skipped) == (4, 1)


def test_columns_of_other_tables_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("start,in,out,who,llm\n1.5,2,3,a,m\n1.75,4,5,b,n\n")
    (tmp_path / "x.jsonl").write_text(
        '{"start": 1.5, "in": 2, "out": 3, "who": "a", "llm": "m"}\n'
        '{"start": 1.75, "in": 4, "out": 5, "who": "b", "llm": "n"}\n'
    )
    columns = "time=start,prompt=in,output=out,session=who,model=llm"
    for name in ("x.csv", "x.jsonl"):
        workload = open_workload(str(tmp_path / name), WorkloadOptions(columns=columns, by_model=True))
        first, second = workload.turns()
        assert (first.at_us, first.prompt_tokens, first.output_tokens) == (0, 2, 3)
        assert (second.at_us, second.session_id, second.model) == (250_000, "b", "n")
    with pytest.raises(ConfigError, match=r"x.csv: unknown format; name the columns of a table with --columns"):
        open_workload(str(tmp_path / "x.csv"), WorkloadOptions())
    burst = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
    )
    (tmp_path / "b.csv").write_text(burst)
    [one] = open_workload(str(tmp_path / "b.csv"), WorkloadOptions(by_model=True)).turns()
    assert (one.prompt_tokens, one.output_tokens, one.model) == (472, 18, "ChatGPT")


OTHER_UNITS = ("start_ms", "at (ms)", "MS", "startMs", "time_us", "t.µs", "unix_nanos", "milliseconds", "ts-usec")


@pytest.mark.parametrize("linked", [{}, {"session_id": "a"}])
@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"chat_id": 1}], "rows with a chat_id have timestamps in seconds"),
        ([{"timestamp": 0.0}, {"timestamp": 30.25}], "line 2: the timestamp 30.25 has a fraction, so it is in seconds"),
        ([{"timestamp": 1_700_000_000}], "line 1: the first timestamp 1700000000 counts from 1970"),
    ],
)
def test_a_trace_in_seconds_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], reason: str, linked: dict[str, str]
) -> None:
    path = write(tmp_path / "t", [{**GOOD, **row, **linked} for row in rows])
    for skip in (False, True):
        with pytest.raises(ConfigError, match=f"{reason}; expected whole milliseconds .* convert"):
            open_workload(path, WorkloadOptions(skip_bad_rows=skip)).survey()
    converted = write(tmp_path / "c", [HEADER, *({**GOOD, **row, **linked} for row in rows)])
    assert len(turns(converted)) == len(rows)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ("time=a,prompt=b", "missing field output"),
        ("time=a,prompt=b,output=c,output=d", "duplicate field 'output=d'"),
        ("time", "expected FIELD=NAME, got 'time'"),
        ("when=a", "unknown field 'when'"),
        ("time=a,prompt=b,output=c", "line 1: unknown column 'a'"),
        *((f"time={name},prompt=in,output=out", "of its times says") for name in OTHER_UNITS),
    ],
)
def test_invalid_columns_are_named(tmp_path: Path, columns: str, reason: str) -> None:
    (tmp_path / "x.csv").write_text("start,in,out\n")
    with pytest.raises(ConfigError, match=reason):
        open_workload(str(tmp_path / "x.csv"), WorkloadOptions(columns=columns)).survey()


def test_json_lines_may_have_any_numbers_nulls_and_bad_lines(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        '{"t": 0.30000000000000004, "in": 2, "out": 3, "who": null}\n'
        "garbage,line\n"
        '{"t": 1e0, "in": 4, "out": 5, "who": "b"}\n'
    )
    options = WorkloadOptions(columns="time=t,prompt=in,output=out,session=who", skip_bad_rows=True)
    workload = open_workload(str(tmp_path / "x.jsonl"), options)
    assert [(one.at_us, one.session_id) for one in workload.turns()] == [(0, ""), (700_000, "b")]
    assert workload.survey().skipped == 1


@given(text=st.binary(max_size=60), header=st.booleans(), skip=st.booleans())
def test_any_table_is_played_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, header: bool, skip: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.csv"
    path.write_bytes(AZURE.encode() * header + text)
    try:
        workload = open_workload(str(path), WorkloadOptions(skip_bad_rows=skip))
        requests = workload.survey().requests
    except ConfigError:
        return
    assert len(list(workload.turns())) == requests > 0


ROW_TEXT = '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1]}'


def test_the_documentation_has_a_valid_example_and_every_setting(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()
    (tmp_path / "ours").write_text(page.split("```json\n")[1].split("```")[0])
    found = list(open_workload(str(tmp_path / "ours"), WorkloadOptions()).turns())
    # The second request of the session follows the first.
    assert [(turn.prompt_tokens, turn.after) for turn in found] == [(1500, ()), (1600, (0,)), (900, ()), (2100, (2, 1))]
    assert all(
        f"`{name}`" in page for name in (*SyntheticSettings.__struct_fields__, *LinkedRow.__struct_fields__, *FORMATS)
    )


@pytest.mark.parametrize(
    ("name", "text", "form"),
    [
        ("a", ROW_TEXT, "mooncake"),
        ("a", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "azure"),
        ("a", "\ufeff\n" + ROW_TEXT, "mooncake"),
        ("a", '{"format": "forebay.workload", "version": 1, "block_tokens": 64}\n', "forebay"),
        ("a", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n", "burstgpt"),
        ("a", "{" + ROW_TEXT, "mooncake"),
        ("a", '{"timestamp": ' + "[" * 100_000, "mooncake"),
        ("a", "", "mooncake"),
        ("a", "SQLite format 3\0", "recording"),
    ],
)
def test_format_is_detected_from_the_content(tmp_path: Path, name: str, text: str, form: str) -> None:
    (tmp_path / name).write_text(text)
    assert detect_format(tmp_path / name) == form


@pytest.mark.parametrize("text", ['{"layers": 32}', '{\n  "layers": 32\n}\n', "[1]", "layers = 32", "{"])
def test_error_for_an_unknown_format_lists_the_formats(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config.json: unknown format; .* \(formats: forebay, .*recording"):
        open_workload(str(tmp_path / "config.json"), WorkloadOptions())


def test_an_explicit_format_is_used(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(ROW_TEXT)
    assert open_workload(f"mooncake:{tmp_path / 'a.csv'}", WorkloadOptions()).survey().requests == 1
    with pytest.raises(ConfigError, match="TIMESTAMP is missing"):
        open_workload(f"azure:{tmp_path / 'a.csv'}", WorkloadOptions()).survey()
    for name in ("nonsense:there", "azure:\0"):
        with pytest.raises(ConfigError, match="cannot be read"):
            open_workload(name, WorkloadOptions()).survey()


def test_a_workload_is_the_same_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(ROW_TEXT)
    for name in (str(tmp_path / "a"), "synthetic:requests=20,turns=3"):
        workload = open_workload(name, WorkloadOptions(speed=2))
        assert list(pickle.loads(pickle.dumps(workload)).turns()) == list(workload.turns())


def test_ids_are_checked_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played, "PARENTS_MAX", 4)
    rows = [[1, 2], [1, 3], [1, 2, 4], [5, 6], [9, 2], [5, 6], [7, 6]]
    path = tmp_path / "t"

    def survey(ids: list[list[int]]) -> int:
        lines = [{"timestamp": 0, "input_length": 512 * len(one), "output_length": 1, "hash_ids": one} for one in ids]
        path.write_text("\n".join(map(json.dumps, lines)))
        return open_workload(str(path), WorkloadOptions()).survey().requests

    assert survey(rows[:6]) == 6, "the third and fourth rows exceeded the bounded id memory"
    with pytest.raises(ConfigError, match="line 7: hash id 6 comes after 7"):
        survey(rows)
