"""The converter of traces of agents: Weka's with sub-agents, LMCache's with text, and several files in parallel."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.simulate.reading import open_workload
from forebay.simulate.workload import Turn, WorkloadOptions
from tests.harness.agent_traces import main, turns


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


def requests(*files: Path, spacing_s: float | None = None) -> list[Turn]:
    return turns(files, spacing_s)[1]


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
    found = requests(write(tmp_path / "weka.json", document))
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
    found = requests(write(tmp_path / "weka.json", run(request(0, [1]), untimed, request(20, [1]))))
    assert [turn.delay_us / 1e6 for turn in found] == [0, 8, 6]  # 0.2 s per token


def test_ids_of_different_files_are_different(tmp_path: Path) -> None:
    for name in ("a.json", "b.json", "c.json"):
        write(tmp_path / name, run(request(0, [1, 2]), request(5, [1, 2, 3])), indent=1)
    files = sorted(tmp_path.iterdir())
    found = requests(*files, spacing_s=2.5)
    assert [turn.after for turn in found] == [(), (0,), (), (2,), (), (4,)]
    assert [turn.at_us for turn in found] == [0, 0, 2_500_000, 0, 5_000_000, 0]
    ids = [set(turn.block_ids) for turn in found]
    assert len(ids[0] & ids[1]) == len(ids[2] & ids[3]) == len(ids[4] & ids[5]) == 2
    assert not (ids[0] | ids[1]) & (ids[2] | ids[3])
    assert {turn.at_us for turn in requests(*files)} == {0}


def call(at_us: int, text: str, answer: str = "done", session: str = "s") -> dict[str, Any]:
    return {"timestamp": at_us, "input": text, "output": answer, "session_id": session}


def write_calls(path: Path, *calls: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in calls))
    return path


def test_calls_are_played_in_time_order_after_the_previous_response(tmp_path: Path) -> None:
    first, second = "a" * 600, "a" * 600 + "b" * 300
    write_calls(tmp_path / "x.jsonl", call(9_000_000, second, "12345", "x"), call(7_000_000, first, "", "x"))
    write_calls(tmp_path / "y.jsonl", call(6_500_000, second + "c" * 200, session="y"))
    files = sorted(tmp_path.iterdir())
    found = requests(*files)
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
    assert [turn.at_us for turn in requests(*files, spacing_s=3)] == [0, 3_000_000, 5_000_000]


def test_a_file_can_hold_several_sessions(tmp_path: Path) -> None:
    calls = [call(5, "b", session="two"), call(9, "b", session="one"), call(0, "a", session="one")]
    found = requests(write_calls(tmp_path / "all.jsonl", *calls))
    assert [(turn.at_us, turn.after, turn.session_id) for turn in found] == [
        (0, (), "all/one"),
        (9, (0,), "all/one"),
        (5, (), "all/two"),
    ]


def test_the_output_is_a_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = write(tmp_path / "a.json", run(request(0, [1, 2]), request(5, [1, 2, 3])))
    monkeypatch.setattr("sys.argv", ["agent_traces", str(tmp_path / "out.jsonl"), str(trace)])
    main()
    assert list(open_workload(str(tmp_path / "out.jsonl"), WorkloadOptions(by_model=True)).turns()) == requests(trace)
