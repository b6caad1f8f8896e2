"""The native format is lossless, tables are supported, and formats are detected from the content."""

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.simulate.reading import FORMATS, detect_format, open_workload
from forebay.simulate.workload import Turn, WorkloadOptions, WorkloadUnusable
from forebay.simulate.workloads import prepare as played
from forebay.simulate.workloads.rows import LinkedRow, WorkloadHeader, encode_workload
from forebay.simulate.workloads.synthetic import SyntheticSettings

US_MAX = 3_155_760_000_000_000


@st.composite
def some_turns(draw: st.DrawFn) -> list[Turn]:
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


@given(some_turns())
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
    with pytest.raises(WorkloadUnusable, match=rf"azure.csv, line 4: .*{reason}"):
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
    with pytest.raises(WorkloadUnusable, match=r"x.csv: unknown format; name the columns of a table with --columns"):
        open_workload(str(tmp_path / "x.csv"), WorkloadOptions())
    burst = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
    )
    (tmp_path / "b.csv").write_text(burst)
    [one] = open_workload(str(tmp_path / "b.csv"), WorkloadOptions(by_model=True)).turns()
    assert (one.prompt_tokens, one.output_tokens, one.model) == (472, 18, "ChatGPT")


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ("time=a,prompt=b", "missing field output"),
        ("time=a,prompt=b,output=c,output=d", "duplicate field 'output=d'"),
        ("time", "expected FIELD=NAME, got 'time'"),
        ("when=a", "unknown field 'when'"),
        ("time=a,prompt=b,output=c", "line 1: unknown column 'a'"),
    ],
)
def test_invalid_columns_are_named(tmp_path: Path, columns: str, reason: str) -> None:
    (tmp_path / "x.csv").write_text("start,in,out\n")
    with pytest.raises(WorkloadUnusable, match=reason):
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
    except WorkloadUnusable:
        return
    assert len(list(workload.turns())) == requests > 0


ROW = '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1]}'


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
        ("a", ROW, "mooncake"),
        ("a", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "azure"),
        ("a", "\ufeff\n" + ROW, "mooncake"),
        ("a", '{"format": "forebay.workload", "version": 1, "block_tokens": 64}\n', "forebay"),
        ("a", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n", "burstgpt"),
        ("a", "{" + ROW, "mooncake"),
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
    with pytest.raises(WorkloadUnusable, match=r"config.json: unknown format; .* \(formats: forebay, .*recording"):
        open_workload(str(tmp_path / "config.json"), WorkloadOptions())


def test_an_explicit_format_is_used(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(ROW)
    assert open_workload(f"mooncake:{tmp_path / 'a.csv'}", WorkloadOptions()).survey().requests == 1
    with pytest.raises(WorkloadUnusable, match="TIMESTAMP is missing"):
        open_workload(f"azure:{tmp_path / 'a.csv'}", WorkloadOptions()).survey()
    for name in ("nonsense:there", "azure:\0"):
        with pytest.raises(WorkloadUnusable, match="cannot be read"):
            open_workload(name, WorkloadOptions()).survey()


def test_a_workload_is_the_same_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(ROW)
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
    with pytest.raises(WorkloadUnusable, match="line 7: hash id 6 comes after 7"):
        survey(rows)
