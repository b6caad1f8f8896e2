"""`forebay explain`, `replay at` and `replay diff`."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result

from forebay.core.block_hashes import extend_chain
from forebay.events.control import DisaggConfig, QueueConfig, RouterConfig
from forebay.events.progress import FirstTokenEmitted, PrefillFinished, RequestFinished
from forebay.events.requests import RequestCancelled, RoutingHints
from forebay.events.topics import DECISIONS, PROGRESS
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import error_of, json_of
from tests.cli.logs import invoke, written
from tests.core.worlds import PROMPTS, Driver, query, request
from tests.replay import incident
from tests.replay.mutations import read_more, replace_record
from tests.replay.recorded import MemoryLog, log_of, write
from tests.replay.recorder import Recorder, disaggregated
from tests.replay.simulated import played
from tests.simulate.scene import conversations

MANY = 300  # workers
DEEP = 1_500  # blocks per prompt


def explain(*arguments: str | Path) -> Result:
    return invoke("explain", *arguments)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    made = Recorder()
    made.fleet("a", "b", temperature=0.5, queue=QueueConfig(threshold=0.25))
    pinned = RoutingHints(worker_id="a", priority=3)
    made("requests", request("req-1", PROMPTS[0], at_us=100, routing=pinned, tenant="acme", key_id="0123456789ab"))
    made.progress("req-1", FirstTokenEmitted, after_us=500_000, cached_tokens=0, at_us=900)
    made.progress("req-1", RequestFinished, finish_reason="stop", output_tokens=7)
    made("requests", request("req-2", PROMPTS[1]))
    made.snapshot()
    made("requests", request("req-3", PROMPTS[2]))
    made("requests", request("req-4", PROMPTS[2], routing=RoutingHints(worker_id="nobody")))
    made("requests", request("req-5", PROMPTS[2]))
    made("requests", RequestCancelled(request_id="req-5", reason="\x1b[2Jgone"))
    made("requests", query("ask", PROMPTS[0]))
    made.progress("req-2", FirstTokenEmitted)
    return written(made, tmp_path / "log.db")


def test_a_timeline_is_shown_as_text(log: Path) -> None:
    output = explain(log, "req-1")
    assert output.exit_code == 0, output.output
    lines = output.stdout.splitlines()
    assert lines[0] == "request req-1: finished (stop) after 0.500 s, 7 output tokens"
    assert "34 prompt tokens in 8 full blocks, at most 2 output tokens, deadline after 1 s" in lines[1]
    assert "tenant acme, key 0123456789ab" in lines
    assert "hints: worker_id a, priority 3" in lines
    assert "    +0.000 s  routed to a: the request is pinned to it" in lines
    assert "              kv: temperature 0.5, queue.threshold 0.25" in lines
    assert any(line.split()[:3] == ["*", "a", "16.50"] for line in lines)
    assert "              excluded b/0: the request is pinned to a" in lines
    assert "    +0.500 s  finished (stop) with 7 output tokens" in lines
    assert "time to first token 0.500 s on the owner's clock (0.001 s on the clocks of ingress and worker)" in lines
    assert lines[-1] == "verified: journal offsets 0 to 2 derived again, every record equal"


def test_queries_and_aborted_requests_are_explained(log: Path) -> None:
    assert "held in queue class default, 0 requests ahead: " in explain(log, "req-5").stdout
    cancelled = explain(log, "req-5").stdout
    assert "aborted (cancelled): \\x1b[2Jgone" in cancelled
    assert "\x1b" not in cancelled
    assert "excluded a/0, b/0: the request is pinned to nobody" in explain(log, "req-4").stdout
    assert "would be held, then routed to" in explain(log, "ask").stdout
    last = explain(log, "req-2").stdout
    assert last.startswith("request req-2: decode\n")
    assert "(on the log, not in the journal yet)" in " ".join(last.split())
    assert "drawn at temperature 0.5" in explain(log, "req-3").stdout


def test_invalid_arguments_are_rejected(log: Path, tmp_path: Path) -> None:
    missing = explain(log, "req-")
    near = "req-5 or req-4 or req-3"
    assert (missing.exit_code, missing.stderr) == (2, f"forebay: {log}: unknown request 'req-'; did you mean {near}?\n")
    assert explain(log, "other").stderr == f"forebay: {log}: unknown request 'other'; check the ID\n"
    assert (explain("req-1").exit_code, explain("req-1").stderr) == (
        2,
        "forebay: expected LOG and REQUEST, or REQUEST and --kafka\n",
    )
    foreign = tmp_path / "foreign.db"
    foreign.write_text("this is no log")
    refused = explain(foreign, "req-1")
    assert (refused.exit_code, "foreign.db" in refused.stderr) == (2, True)


def test_explanation_ends_at_a_divergence(log: Path) -> None:
    digest = re.compile(rb'(?<="table_digest":")[0-9a-f]{16}')
    replace_record(log, DECISIONS, 1, lambda value: digest.sub(b"0" * 16, value))
    output = explain(log, "req-1")
    assert output.exit_code == 1
    assert output.stdout.startswith("request req-1: unknown\n")
    assert "DIVERGENCE at journal offset 1, before this request: differs in table_digest" in output.stdout
    assert "routed to" not in output.stdout
    assert json.loads(explain(log, "req-1", "--json").stdout)["divergence"]["offset"] == 1


def test_the_status_of_a_log_counts_requests_per_tenant(tmp_path: Path) -> None:
    made = Recorder()
    made.fleet("a")
    made("requests", request("r", PROMPTS[0], tenant="acme"))
    made.seal()
    lines = invoke("status", written(made, tmp_path / "log.db")).stdout.splitlines()
    assert "tenant     acme: 1 in flight, 0 queued" in lines


def test_a_large_fleet_and_a_long_prompt_stay_readable(tmp_path: Path) -> None:
    made = Recorder()
    made.fleet(*(f"w{number:03}" for number in range(MANY)))
    blocks = extend_chain(None, list(range(DEEP)))
    made("requests", request("x", blocks[:700]))
    made("requests", request("r", blocks))
    pinned = RoutingHints(allowed_workers=tuple(f"w{number:03}" for number in range(2, 20)))
    made("requests", request("p", blocks, routing=pinned))
    log = written(made, tmp_path / "log.db")
    lines = explain(log, "r").stdout.splitlines()
    assert len(lines) < 30
    assert sum(line.lstrip().startswith(("w", "*")) for line in lines) == 10
    assert any(line.strip().startswith("290 more candidates with costs up to ") for line in lines)
    assert max(map(len, lines)) <= 120
    assert len(explain(log, "r", "--all").stdout.splitlines()) > MANY
    some = " ".join(explain(log, "p").stdout.split())
    assert (
        "excluded w000/0, w001/0, w020/0, w021/0, w022/0, w023/0 and 276 more: it is not in the request's allowed"
        in some
    )


@pytest.fixture(scope="module")
def incident_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    incident_log = tmp_path_factory.mktemp("at") / "incident.db"
    asyncio.run(incident.record(incident_log))
    return incident_log


def at(*arguments: str | Path) -> Result:
    """Run the command in this process, which is faster than starting one."""
    return invoke("replay", "at", *arguments)


def test_the_default_is_the_last_record_shown_as_tables(incident_log: Path) -> None:
    last = json_of("replay", "at", incident_log)
    run = at(incident_log)
    assert run.exit_code == 0, run.stderr
    assert str(last["digest"]) in run.stdout
    for text in ("second, epoch", "w0/0", "lost: slow", "blocks of 4 tokens", "queue: empty"):
        assert text in run.stdout


def test_events_after_the_last_record_are_shown_or_counted(incident_log: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    copy.write_bytes(incident_log.read_bytes())

    async def append() -> int:
        log = SqliteLog.open(copy)
        (offset,) = await log.append([Draft(PROGRESS.name, 0, b"\xc1")])
        (record,) = log.records(PROGRESS.name, 0, offset, 1)
        log.close()
        return record.at_us

    at_us = asyncio.run(append())
    last = at(copy)
    assert last.exit_code == 0, last.stderr
    assert (
        "not shown  1 event (1 progress) on the log after this record; --time shows the state with later events"
        in last.stdout
    )
    shown = at(copy, "--time", str(at_us))
    assert shown.exit_code == 0, shown.stderr
    text = "then       1 event (1 progress) from the log, in the order of their append; no journal record shows"
    assert text in shown.stdout
    assert "not shown" not in shown.stdout
    late = json_of("replay", "at", copy, "--time", str(at_us))
    assert late["later"] == {"requested_us": at_us, "applied": {}, "unrecorded": {"progress": 1}, "not_applied": {}}
    early = at(copy, "--time", str(at_us - 1))
    assert "age        " in early.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--offset", "100000"], "no journal record 100000: the recording has records 0 to "),
        (["--time", "1"], "the recording begins at "),
        (["--time", "2999-01-01"], "the recording ends at "),
        (["--time", "yesterday"], "--time yesterday: not a time; expected 2026-01-31T12:00:00Z"),
        (["--time", "9" * 19], "the recording ends at "),
        (["--time", "9" * 20], "not a time; expected"),
        (["--time", "1", "--offset", "1"], "--time and --offset exclude each other; give one of them"),
    ],
)
def test_invalid_offsets_and_times_are_rejected(incident_log: Path, arguments: list[str], message: str) -> None:
    run = at(incident_log, *arguments)
    assert (run.exit_code, run.stdout) == (2, "")
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1


COMMAND = ["replay", "diff"]


@pytest.fixture(scope="module")
def simulated_history() -> MemoryLog:
    """Return the log of a simulated run, which the simulator can reproduce."""
    return played(conversations(sessions=11, turns=6, every_ms=2_000), RouterConfig(), workers=3, blocks=1_024).log


@pytest.fixture(scope="module")
def recording(simulated_history: MemoryLog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diff") / "run.db"
    asyncio.run(write(simulated_history, path))
    return path


def run_diff(*arguments: Any) -> tuple[int, str, str]:
    run = invoke(*COMMAND, *arguments)
    assert run.exception is None or isinstance(run.exception, SystemExit), run.exception
    return run.exit_code, run.stdout, run.stderr


def test_table_shows_moved_requests_and_notes(recording: Path) -> None:
    code, out, _ = run_diff(recording, "--policy", "round-robin")
    assert code == 0
    for text in ("--policy round-robin", "fork", "requests went to another worker", "Open loop"):
        assert text in out
    assert "w0/0" in out


def test_set_without_effect_is_reported(recording: Path) -> None:
    report = json_of("replay", "diff", recording, "--set", "temperature=0")
    assert report["idle"] == ["--set temperature=0"]
    _, out, _ = run_diff(recording, "--set", "temperature=0")
    assert "equal to the recorded configuration" in out


def test_invalid_comparisons_are_rejected(recording: Path, tmp_path: Path) -> None:
    policy = ("--policy", "random")
    assert "no change; pass" in error_of("replay", "diff", recording)
    assert "unknown field" in error_of("replay", "diff", recording, "--set", "heat=1")
    assert "unknown pool 'p'; pools are: default" in error_of("replay", "diff", recording, "--set", "p:temperature=1")
    assert "--allow: unknown check 'anything'; checks are: " in error_of(
        "replay", "diff", recording, *policy, "--allow", "anything"
    )
    assert "expected either a log file or --kafka" in error_of("replay", "diff", *policy)
    assert str(tmp_path / "none.db") in error_of("replay", "diff", tmp_path / "none.db", *policy)


def test_unknown_events_fail_the_comparison_unless_allowed(tmp_path: Path) -> None:
    drive = Driver().fleet("a", "b")
    drive("kv-events", None)
    drive("requests", request("r1", PROMPTS[0]))
    path = tmp_path / "newer.db"
    asyncio.run(write(log_of(drive, undecodable=msgspec.msgpack.encode({"type": "kv.blocks_moved"})), path))
    read_more(path)
    code, out, err = run_diff(path, "--policy", "random")
    assert code == 2
    assert "UNVERIFIED" in out
    assert (
        "not verified: 1 unknown-events; use the version that wrote it, or accept it with --allow unknown-events" in err
    )
    assert run_diff(path, "--policy", "random", "--allow", "unknown-events")[0] == 0


@pytest.fixture(scope="module")
def disagg_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log with a request whose KV is retained while it waits for a decode worker."""
    made = disaggregated("p", disagg=DisaggConfig(enforce=True))
    made("requests", request("r", PROMPTS[0]))
    for name in "de":
        made.lose(name)
    made.progress("r", PrefillFinished)
    made.seal()
    return written(made, tmp_path_factory.mktemp("disagg") / "disaggregated.db")


def shown(*arguments: str | Path) -> str:
    run = invoke(*arguments)
    assert run.exit_code == 0, run.stderr
    return " ".join(run.stdout.split())


def test_disagg_pools_and_retained_kv_are_shown(disagg_log: Path) -> None:
    text = shown("replay", "at", str(disagg_log))
    assert "m, for decode, blocks of 4 tokens" in text
    assert "m, for prefill, blocks of 4 tokens" in text
    assert "prompts computed remotely: always enforce=True" in text
    assert "r waiting KV at p" in text


def test_disagg_parts_of_the_time_to_first_token_are_shown(tmp_path: Path) -> None:
    made = disaggregated("p")
    made("requests", request("r", PROMPTS[0]))
    made.progress("r", PrefillFinished, after_us=18_600)
    made.progress("r", FirstTokenEmitted, after_us=9_100, transferred_bytes=34_000, transfer_us=900)
    made.seal()
    log = str(written(made, tmp_path / "disaggregated.db"))
    text = shown("explain", log, "r")
    parts = "of this: prefill 18.6 ms, KV transfer 900 us, network and first decode step 8.2 ms"
    assert f"time to first token 0.028 s on the owner's clock {parts}" in text


def test_disagg_stages_are_explained(disagg_log: Path) -> None:
    text = shown("explain", str(disagg_log), "r")
    assert "prefill sent to p: it was the only candidate; prompt computed by a prefill worker" in text
    assert "it keeps their KV, 34,000 bytes for 0.5 s" in text
    assert text.startswith("request r: waiting")
