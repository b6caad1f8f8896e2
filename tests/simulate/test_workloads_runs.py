"""Recorded agent runs: Weka's with sub-agents, LMCache's with text, and several files in parallel."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from forebay.simulate.reading import open_workload
from forebay.simulate.workload import Turn, WorkloadOptions, WorkloadUnusable


def request(at_s: float, blocks: list[int], **more: Any) -> dict[str, Any]:
    """Return a request whose response took 2 s. Half a block of its prompt has no id."""
    return {"t": at_s, "type": "n", "model": "m", "in": 64 * len(blocks) + 32, "out": 10, "hash_ids": blocks} | {
        "api_time": 2.0,
        **more,
    }


def run(*requests: dict[str, Any]) -> dict[str, Any]:
    return {"id": "x", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}


def sub_agent(end_s: float, duration_s: float, name: str, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"t": end_s, "type": "subagent", "agent_id": name, "duration_ms": duration_s * 1e3} | {
        "requests": list(requests)
    }


def turns(*names: Path | str, **options: Any) -> list[Turn]:
    return list(open_workload(list(map(str, names)), WorkloadOptions(**options)).turns())


def write(path: Path, document: Any, indent: int | None = None) -> Path:
    path.write_text(json.dumps(document, indent=indent))
    return path


def test_a_parent_waits_for_its_parallel_sub_agent(tmp_path: Path) -> None:
    document = run(
        request(0, [1, 2]),
        # Both start 3 s after the first request, which took 2 s. The second ends last, at 20 s.
        sub_agent(9, 6, "one", request(0, [50]), request(4, [50, 51], model="small")),
        sub_agent(20, 17, "two", request(0.5, [50])),
        request(25, [1, 2, 3]),
        request(30, [1, 2, 3, 4]),
    )
    found = turns(write(tmp_path / "weka.json", document), by_model=True)
    assert [turn.after for turn in found] == [(), (0,), (1,), (0,), (0, 2, 3), (4,)]
    # Delays from the last response, by the recorded times 2, 3 + 2, 2, 3 + 0.5 + 2 and 27 s.
    delays_s = [turn.delay_us / 1e6 for turn in found]
    assert delays_s == [0, 1, 2, 1.5, 25 - 9, 3]
    assert [turn.session_id for turn in found] == ["weka", "weka/one", "weka/one", "weka/two", "weka", "weka"]
    assert [turn.model for turn in found] == ["m", "m", "small", "m", "m", "m"]
    assert [turn.prompt_tokens for turn in found] == [160, 96, 160, 96, 224, 288]
    shared = [turn.block_ids[:-1] for turn in found]
    assert shared == [(1, 2), (50,), (50, 51), (50,), (1, 2, 3), (1, 2, 3, 4)]
    tails = [turn.block_ids[-1] for turn in found]
    assert len({*tails, 1, 2, 3, 4, 50, 51}) == 12, "what has no id is nobody else's"
    assert all(turn.at_us == 0 for turn in found)


def test_a_missing_duration_is_estimated_from_the_time_per_token(tmp_path: Path) -> None:
    untimed = request(10, [1], out=20)
    del untimed["api_time"]
    found = turns(write(tmp_path / "weka.json", run(request(0, [1]), untimed, request(20, [1]))))
    assert [turn.delay_us / 1e6 for turn in found] == [0, 8, 6]  # 0.2 s per token


def test_empty_responses_count_as_one_token(tmp_path: Path) -> None:
    workload = open_workload(str(write(tmp_path / "weka.json", run(request(0, [1], out=0)))), WorkloadOptions())
    [found] = workload.turns()
    assert found.output_tokens == 1
    assert workload.survey().notes[0].startswith("responses without tokens")


def test_ids_of_different_files_are_different(tmp_path: Path) -> None:
    for name in ("a.json", "b.json", "c.json"):
        write(tmp_path / name, run(request(0, [1, 2]), request(5, [1, 2, 3])), indent=1)
    found = turns(tmp_path, session_spacing_s=2.5)
    assert [turn.after for turn in found] == [(), (0,), (), (2,), (), (4,)]
    assert [turn.at_us for turn in found] == [0, 0, 2_500_000, 0, 5_000_000, 0]
    ids = [set(turn.block_ids) for turn in found]
    assert len(ids[0] & ids[1]) == len(ids[2] & ids[3]) == len(ids[4] & ids[5]) == 2
    assert not (ids[0] | ids[1]) & (ids[2] | ids[3])
    assert turns(*(tmp_path / name for name in ("a.json", "b.json", "c.json")), session_spacing_s=2.5) == found
    assert {turn.at_us for turn in turns(tmp_path)} == {0}


def test_an_invalid_request_of_a_run_is_named_and_skipped(tmp_path: Path) -> None:
    write(tmp_path / "a.json", run(request(0, [1])))
    agent = sub_agent(4, 1, "one", request(0, [1, 2], out=-1), request(1, [1, 2]))
    late = request(1, [1])
    write(tmp_path / "b.json", run(request(0, [1]), agent, request(3, [1], **{"in": 64 * 3}), late, request(5, [1])))
    with pytest.raises(WorkloadUnusable, match=r"b.json, request 2.1: .*out"):
        turns(tmp_path)
    workload = open_workload(str(tmp_path), WorkloadOptions(skip_bad_rows=True))
    survey = workload.survey()
    assert (survey.requests, survey.skipped) == (5, 2)
    assert "request 3: 1 hash ids cover fewer than 192 tokens" in survey.reasons[1]
    # The late request depends on no later one: it follows the first request and the sub-agent.
    assert [turn.after for turn in workload.turns()] == [(), (), (1,), (1, 2), (3,)]
    write(tmp_path / "b.json", run(request(9, [1]), request(3, [1])))
    with pytest.raises(WorkloadUnusable, match=r"b.json, request 2: its time, 3 s, is before that of the previous"):
        turns(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not a Weka trace"),
        ('{"block_size": 64}', "requests"),
        ('{"block_size": 0, "requests": []}', "block_size"),
        ('{"block_size": 32, "requests": []}', "got blocks of 32 tokens, but earlier files have 64"),
        ("", "is not a Weka trace"),
    ],
)
def test_error_names_a_file_without_a_run(tmp_path: Path, text: str, reason: str) -> None:
    write(tmp_path / "a.json", run(request(0, [1])))
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(WorkloadUnusable, match=rf"b.json: .*{reason}"):
        turns(tmp_path, skip_bad_rows=True)


def test_nesting_of_sub_agents_is_bounded(tmp_path: Path) -> None:
    inner = request(0, [1])
    for depth in range(40):
        inner = sub_agent(1, 1, f"a{depth}", inner)
    with pytest.raises(WorkloadUnusable, match="nested more than 16 levels deep"):
        turns(write(tmp_path / "a.json", run(inner)))


def test_several_request_files_are_rejected(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}
    paths = [write(tmp_path / name, row) for name in ("a.jsonl", "b.jsonl")]
    for names in (paths, [tmp_path]):
        with pytest.raises(WorkloadUnusable, match="only runs of one format can be played from several files"):
            turns(*names)
    with pytest.raises(WorkloadUnusable, match="got mooncake, weka"):
        turns(paths[0], write(tmp_path / "c.json", run(request(0, [1]))))


def call(at_us: int, text: str, answer: str = "done", session: str = "s") -> dict[str, Any]:
    return {"timestamp": at_us, "input": text, "output": answer, "session_id": session}


def write_calls(path: Path, *calls: dict[str, Any] | str) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in calls))
    return path


def test_calls_are_played_in_time_order_after_the_previous_response(tmp_path: Path) -> None:
    first, second = "a" * 600, "a" * 600 + "b" * 300
    write_calls(tmp_path / "x.jsonl", call(9_000_000, second, "12345", "x"), call(7_000_000, first, "", "x"))
    write_calls(tmp_path / "y.jsonl", call(6_500_000, second + "c" * 200, session="y"), "\n")
    found = turns(tmp_path)
    assert [turn.session_id for turn in found] == ["y", "x", "x"]
    assert [turn.at_us for turn in found] == [0, 500_000, 2_500_000]
    assert [turn.after for turn in found] == [(), (), (1,)]
    assert [turn.prompt_tokens for turn in found] == [275, 150, 225]
    assert [turn.output_tokens for turn in found] == [1, 1, 2]
    ids = [turn.block_ids for turn in found]
    assert [len(one) for one in ids] == [5, 3, 4]
    assert ids[0][:3] == ids[2][:3], "whole blocks of 256 characters that are equal, in any session"
    assert ids[1][:2] == ids[2][:2]
    assert len({*ids[0], *ids[1], *ids[2]}) == 7
    assert [turn.at_us for turn in turns(tmp_path, session_spacing_s=3)] == [0, 3_000_000, 5_000_000]


def test_a_file_can_hold_several_sessions(tmp_path: Path) -> None:
    calls = [call(5, "b", session="two"), call(9, "b", session="one"), call(0, "a", session="one")]
    found = turns(write_calls(tmp_path / "all.jsonl", *calls))
    assert [(turn.at_us, turn.after, turn.session_id) for turn in found] == [
        (0, (), "all/one"),
        (9, (0,), "all/one"),
        (5, (), "all/two"),
    ]


def test_text_is_tokenized_to_count_tokens(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "runs").mkdir()
    write_calls(tmp_path / "runs" / "x.jsonl", call(0, "one " * 100, "two two"), call(1, "one " * 64 + "two " * 36))
    one, two = turns(tmp_path / "runs", tokenizer=str(tmp_path / "tokenizer.json"))
    assert (one.prompt_tokens, one.output_tokens) == (100, 2)
    assert one.block_ids[0] == two.block_ids[0]
    assert one.block_ids[1] != two.block_ids[1]
    with pytest.raises(WorkloadUnusable, match=r"is not a tokenizer\.json"):
        turns(tmp_path / "runs", tokenizer=str(tmp_path / "runs" / "x.jsonl"))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "truncated"),
        (call(0, ""), "a prompt of 0 tokens"),
        (call(-1, "x"), "timestamp"),
        ({"timestamp": 1, "input": 5, "output": ""}, "input"),
        ({"timestamp": 1, "input": "x"}, "output"),
    ],
)
def test_error_names_an_invalid_call(tmp_path: Path, bad: dict[str, Any] | str, reason: str) -> None:
    path = write_calls(tmp_path / "x.jsonl", call(3, "x"), bad, call(5, "x"))
    with pytest.raises(WorkloadUnusable, match=rf"x.jsonl, line 2: .*{reason}"):
        turns(path)
    survey = open_workload(str(path), WorkloadOptions(skip_bad_rows=True)).survey()
    assert (survey.requests, survey.skipped) == (2, 1)


def test_error_names_a_file_with_only_invalid_calls(tmp_path: Path) -> None:
    bad = write_calls(tmp_path / "a.jsonl", call(-1, "x"))
    good = write_calls(tmp_path / "b.jsonl", call(3, "x"))
    for files in ((bad,), (bad, good), (good, bad)):
        with pytest.raises(WorkloadUnusable, match=r"a.jsonl, line 1: .*timestamp"):
            turns(*files)
    survey = open_workload([str(bad), str(good)], WorkloadOptions(skip_bad_rows=True)).survey()
    assert (survey.requests, survey.skipped) == (1, 1)


VALUES = st.recursive(
    st.one_of(st.none(), st.integers(-2, 300), st.floats(0, 9), st.text(max_size=2), st.just(float("nan"))),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
ENTRIES = st.recursive(
    st.fixed_dictionaries(
        {"t": st.integers(0, 9), "in": st.integers(1, 130), "out": st.integers(0, 3)},
        optional={"hash_ids": st.lists(st.integers(0, 3), max_size=2), "api_time": VALUES, "model": VALUES},
    ),
    lambda inner: st.fixed_dictionaries(
        {"t": st.integers(0, 9), "requests": st.lists(inner, max_size=3)},
        optional={"duration_ms": st.integers(0, 9_000), "agent_id": VALUES},
    ),
    max_leaves=6,
)


@given(
    document=st.fixed_dictionaries({"block_size": st.just(64), "requests": st.lists(ENTRIES, max_size=5)}),
    broken=st.one_of(st.none(), st.binary(max_size=30)),
    skip=st.booleans(),
)
def test_any_run_is_played_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, document: Any, broken: bytes | None, skip: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "weka-fuzz.json"
    path.write_bytes(json.dumps(document).encode() if broken is None else broken)
    check(f"weka:{path}", skip)


@given(
    calls=st.lists(
        st.fixed_dictionaries(
            {"timestamp": st.integers(-1, 9), "input": st.text(max_size=4), "output": st.text(max_size=4)},
            optional={"session_id": st.one_of(st.sampled_from("abx"), VALUES)},
        ).map(lambda one: json.dumps(one).encode())
        | st.binary(max_size=20),
        max_size=6,
    ),
    skip=st.booleans(),
)
def test_any_calls_are_played_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, calls: list[bytes], skip: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "lmcache-fuzz.jsonl"
    path.write_bytes(b"\n".join(calls))
    check(f"lmcache:{path}", skip)


def check(name: str, skip: bool) -> None:
    try:
        workload = open_workload(name, WorkloadOptions(skip_bad_rows=skip))
        survey = workload.survey()
    except WorkloadUnusable:
        return
    found = list(workload.turns())
    assert len(found) == survey.requests > 0
    assert [turn.number for turn in found] == list(range(len(found)))
    assert all(one < turn.number for turn in found for one in turn.after)
    own = [turn.at_us for turn in found if not turn.after]
    assert own == sorted(own)
