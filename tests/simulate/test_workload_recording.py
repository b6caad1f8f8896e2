"""Recordings, logs and traces of agents as workloads, with their requests and arrival times."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from forebay.events.base import unpack_u64
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.requests import RequestCancelled, RequestSubmitted, RoutingHints
from forebay.replay.observed_history import observe_history
from forebay.replay.record.slice import Window
from forebay.runtime.errors import ConfigError
from forebay.simulate.reading import open_workload
from forebay.simulate.workload import Turn, Workload, WorkloadOptions, sequence_hashes
from tests.core.worlds import BLOCK, PROMPTS, request
from tests.harness.agent_traces import main
from tests.harness.agent_traces import turns as agent_turns
from tests.replay.recorder import Recorder, fleet
from tests.replay.slices import journal_of, opened, run, sliced

PLAIN = WorkloadOptions()


def workload(made: Recorder, path: Path, options: WorkloadOptions = PLAIN) -> Workload:
    """Write the recorded log to `path` and load it as a workload."""
    made.seal()
    asyncio.run(made.log(path)).close()
    return open_workload(str(path), options)


def turns(made: Recorder, path: Path, options: WorkloadOptions = PLAIN) -> list[Turn]:
    return list(workload(made, path, options).turns())


def submit(made: Recorder, name: str, prompt: list[int], tokens: int | None, **changes: object) -> RequestSubmitted:
    """Record a request and, if `tokens` is given, its completion 1 ms later."""
    submitted = request(name, prompt, **changes)
    made("requests", submitted, 1_000)
    if tokens is not None:
        made.progress(name, FirstTokenEmitted, 500)
        made.progress(name, RequestFinished, 500, finish_reason="length", output_tokens=tokens)
    return submitted


def test_recorded_requests_become_turns(tmp_path: Path) -> None:
    made = fleet("a", "b")
    hints = RoutingHints(session_id="s")
    recorded = [submit(made, f"r{number}", PROMPTS[number % 2], 3 + number, routing=hints) for number in range(4)]
    found = workload(made, tmp_path / "run.db")
    assert (found.name, found.block_tokens) == ("run.db", BLOCK)
    assert (found.survey().requests, found.survey().notes) == (4, [])
    for number, (turn, one) in enumerate(zip(found.turns(), recorded, strict=True)):
        assert (turn.number, turn.at_us, turn.session_id) == (number, number * 2_000, "s")
        assert (turn.prompt_tokens, turn.output_tokens) == (one.prompt_tokens, 3 + number)
        assert list(turn.block_ids[: len(PROMPTS[0])]) == unpack_u64(one.sequence_hashes)


@pytest.mark.parametrize("block_size", [1, 2, BLOCK, 3 * BLOCK])
def test_prefix_sharing_is_independent_of_the_block_size(tmp_path: Path, block_size: int) -> None:
    made = fleet("a")
    for name, prompt in (("r0", PROMPTS[0]), ("r1", PROMPTS[0]), ("r2", PROMPTS[0][:3] + PROMPTS[1][3:])):
        submit(made, name, prompt, 3)
    found = [unpack_u64(sequence_hashes(turn, BLOCK, block_size)) for turn in turns(made, tmp_path / "run.db")]
    for hashes, turn in zip(found, turns(made, tmp_path / "again.db"), strict=True):
        assert len(hashes) == len(set(hashes)) == turn.prompt_tokens // block_size
    whole = len(PROMPTS[0]) * BLOCK // block_size
    assert found[0][:whole] == found[1][:whole]
    shared = 3 * BLOCK // block_size
    assert found[0][:shared] == found[2][:shared]
    assert not set(found[0][shared:]) & set(found[2][shared:])


def test_unfinished_requests_get_the_median_length_and_a_note(tmp_path: Path) -> None:
    made = fleet("a")
    for number, tokens in enumerate((5, 9, 7)):
        submit(made, f"r{number}", PROMPTS[0], tokens)
    submit(made, "cancelled", PROMPTS[1], None, routing=RoutingHints(worker_id="a"))
    made("requests", RequestCancelled(request_id="cancelled"))
    found = workload(made, tmp_path / "run.db")
    assert [turn.output_tokens for turn in found.turns()] == [5, 9, 7, 7]
    assert found.survey().notes == [
        "1 of 4 requests were unfinished when the recording ended; "
        "their responses get the median length of the others, 7 tokens",
        "1 of 4 requests have worker, adapter or priority hints, which are ignored",
    ]


def test_a_repeated_id_is_a_new_request_once_the_first_has_ended(tmp_path: Path) -> None:
    made = fleet("a")
    first = request("r", PROMPTS[0])
    made("requests", first, 1_000)
    made("requests", first, 10)  # a redelivery
    made("requests", request("r", PROMPTS[1], nonce=7), 10)  # another request with the same id, rejected
    made.progress("r", FirstTokenEmitted, 10)
    made.progress("r", RequestFinished, 10, finish_reason="length", output_tokens=4)
    assert [turn.output_tokens for turn in turns(made, tmp_path / "run.db")] == [4]


def test_requests_match_the_observed_history(tmp_path: Path) -> None:
    """Requests taken from a whole log and from a recording of its second half match the observed history."""
    path = tmp_path / "run.db"
    asyncio.run(run(path))
    middle = journal_of(path)[len(journal_of(path)) // 2]
    with opened(path) as log:
        asyncio.run(sliced(log, tmp_path / "rec", Window(from_us=middle.at_us)))
    for where, least in ((path, 60), (tmp_path / "rec", 10)):
        with opened(where) as log:
            recorded = [one for one in asyncio.run(observe_history(log, 0)).requests if not one.in_flight]
        found = list(open_workload(str(where), WorkloadOptions()).turns())
        assert len(found) == len(recorded) >= least
        for turn, one in zip(found, recorded, strict=True):
            assert turn.at_us == one.at_us - recorded[0].at_us
            assert turn.prompt_tokens == one.prompt_tokens
            assert turn.output_tokens == (one.output_tokens or 3)


def test_unusable_recordings_are_rejected(tmp_path: Path) -> None:
    nobody = fleet("a")
    with pytest.raises(ConfigError, match="contains no request to play"):
        workload(nobody, tmp_path / "nobody.db").survey()
    unfinished = fleet("a")
    submit(unfinished, "r", PROMPTS[0], None)
    with pytest.raises(ConfigError, match="no request finished, so no response length is known"):
        workload(unfinished, tmp_path / "unfinished.db").survey()
    (tmp_path / "broken.db").write_bytes(b"SQLite format 3\0" + bytes(100))
    with pytest.raises(ConfigError, match="is not a forebay log"):
        open_workload(str(tmp_path / "broken.db"), WorkloadOptions())


# Traces of agents: Weka's with sub-agents, LMCache's with text, and several files in parallel


def agent_request(at_s: float, blocks: list[int], **more: Any) -> dict[str, Any]:
    """Return a request whose response took 2 s. Half a block of its prompt has no id."""
    return {"t": at_s, "type": "n", "model": "m", "in": 64 * len(blocks) + 32, "out": 10, "hash_ids": blocks} | {
        "api_time": 2.0,
        **more,
    }


def agent_run(*requests: dict[str, Any]) -> dict[str, Any]:
    return {"id": "x", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}


def sub_agent(end_s: float, duration_s: float, name: str, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"t": end_s, "type": "subagent", "agent_id": name, "duration_ms": duration_s * 1e3} | {
        "requests": list(requests)
    }


def requests(*files: Path, spacing_s: float | None = None) -> list[Turn]:
    return agent_turns(files, spacing_s)[1]


def write(path: Path, document: Any, indent: int | None = None) -> Path:
    path.write_text(json.dumps(document, indent=indent))
    return path


def test_a_parent_waits_for_its_parallel_sub_agent(tmp_path: Path) -> None:
    document = agent_run(
        agent_request(0, [1, 2]),
        # Both start 3 s after the first request, which took 2 s. The second ends last, at 20 s.
        sub_agent(9, 6, "one", agent_request(0, [50]), agent_request(4, [50, 51], model="small")),
        sub_agent(20, 17, "two", agent_request(0.5, [50])),
        agent_request(25, [1, 2, 3]),
        agent_request(30, [1, 2, 3, 4]),
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


def test_the_output_is_a_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = write(tmp_path / "a.json", agent_run(agent_request(0, [1, 2]), agent_request(5, [1, 2, 3])))
    monkeypatch.setattr("sys.argv", ["agent_traces", str(tmp_path / "out.jsonl"), str(trace)])
    main()
    assert list(open_workload(str(tmp_path / "out.jsonl"), WorkloadOptions(by_model=True)).turns()) == requests(trace)
