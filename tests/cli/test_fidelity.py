"""`forebay simulate --against`: exact where the engines were the simulator's own, and honest elsewhere."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.simulate.fidelity import AS_RECORDED, PLACED, STATISTICS, TIMES
from forebay.events.codec import decode, encode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.decisions import RequestRouted, SnapshotTaken
from forebay.events.fleet import WorkerLost
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.requests import RequestCancelled
from forebay.events.topics import DECISIONS
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.logs import at, made
from tests.core.worlds import PROMPTS, request
from tests.replay.mutations import replace_record
from tests.replay.recorded import write
from tests.replay.recorder import Recorder, fleet, report_progress
from tests.replay.simulated import played
from tests.replay.slices import journal_of, run
from tests.simulate.traces import conversations
from tests.system import BLOCK, MODEL, SPEEDUP, System, submitted, until, until_ended


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose engines are the simulator's own."""
    run = played(conversations(sessions=11, turns=6, every_ms=2_000), RouterConfig(), workers=3, blocks=1_024)
    path = tmp_path_factory.mktemp("fidelity") / "run.db"
    asyncio.run(write(run.log, path))
    return path


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log of a live system with three owners, snapshots and a lost worker."""
    path = tmp_path_factory.mktemp("live") / "run.db"
    asyncio.run(run(path))
    return path


def run_against(*arguments: Any) -> tuple[int, str, str]:
    given = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    assert given.exception is None or isinstance(given.exception, SystemExit), given.exception
    return given.exit_code, given.stdout, given.stderr


def found(*arguments: Any, code: int = 0) -> dict[str, Any]:
    ended, out, err = run_against(*arguments, "--json")
    assert ended == code, err
    result: dict[str, Any] = json.loads(out)
    return result


def error_line(*arguments: Any) -> str:
    code, out, err = run_against(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    return line.removeprefix("forebay: ")


def file(made: Recorder, path: Path) -> Path:
    made.seal()
    asyncio.run(made.log(path)).close()
    return path


def test_a_simulated_recording_is_reproduced_exactly(recording: Path) -> None:
    report = found("--against", recording)
    assert (report["requests"], report["workers"], report["left_out"], report["above"]) == (66, 3, {}, [])
    assert [one["name"] for one in report["simulated"]] == [AS_RECORDED, PLACED]
    for one in report["simulated"]:
        assert (one["compared"], one["failed"]) == (66, 0)
        for time in TIMES:
            for of in STATISTICS:
                figure = one["times"][time][of]
                assert figure["observed"] == figure["simulated"] > 0
                assert figure["error"] == 0
            assert set(one["single"][time].values()) == {0}
        assert one["prefix_reuse"]["error"] == one["load_max_over_mean"]["error"] == 0
        assert one["placement"]["equal"] == 1
        assert one["placement"]["by_chance"] < 0.6
    as_recorded, placed = report["simulated"]
    assert as_recorded["digest"] != placed["digest"]


def test_placements_and_reuse_of_a_live_system_are_reproduced(tmp_path: Path) -> None:
    asyncio.run(_record_sequential_requests(tmp_path / "run.db"))
    made(tmp_path / "run.db", tmp_path / "rec")
    report = found("--against", tmp_path / "rec", "--speedup", SPEEDUP)
    assert (report["requests"], report["left_out"]) == (30, {})
    for one in report["simulated"]:
        assert (one["compared"], one["placement"]["equal"]) == (30, 1)
        assert one["prefix_reuse"]["observed"] > 0.5
        assert one["prefix_reuse"]["error"] == one["load_max_over_mean"]["error"] == 0
    assert set(report["hops_ms"]) == {"progress"}  # no ingress reported its submission times


async def _record_sequential_requests(path: Path) -> None:
    """Record a live system with round-robin routing, where each request waits for the previous response."""
    log = SqliteLog.open(path)
    turns = PoolConfigured(pool="default", model=MODEL, block_size=BLOCK, router=RouterConfig(mode="round-robin"))
    async with System(log).started(workers=3) as system, system.owned(pool=turns) as owner:
        await until(lambda: len(owner.world.fleet) == 3)
        for number in range(30):
            system.send(submitted(f"r{number}", [*range(40), number % 5]))
            await until_ended(system, f"r{number}")
        await until(lambda: not len(owner.world.requests))
    log.close()


def test_workers_join_and_leave_as_recorded(live: Path) -> None:
    code, text, _ = run_against("--against", live, "--speedup", SPEEDUP)
    assert code == 0
    assert re.search(r"60 requests in [0-9.]+ s, 3 worker ranks", text)
    assert len(re.findall(r"observed, and simulated .*: (5\d|60) requests", text)) == 2
    assert "3 workers joined with empty caches and 1 were lost" in text
    assert "ran on the same worker in both" in text
    assert "failed" not in text


def test_a_simulation_resumes_from_the_snapshot_of_a_recording(live: Path, tmp_path: Path) -> None:
    records = journal_of(live)
    middle = next(
        one for one in records[len(records) // 2 :] if isinstance(decode(DECISIONS, one.value), SnapshotTaken)
    )
    made("--from", at(middle.at_us), live, tmp_path / "rec")
    report = found("--against", tmp_path / "rec", "--speedup", SPEEDUP)
    assert 0 < report["requests"] < 60
    assert any("Caches start with the blocks of the index" in note for note in report["notes"])
    # Prompts share their first blocks, so a simulation with empty caches would have fewer hits.
    assert report["simulated"][1]["prefix_reuse"]["simulated"] > 0.5


def test_worker_lost_in_the_recording_is_lost_in_the_simulation(tmp_path: Path) -> None:
    made = fleet("a", "b")
    made("requests", request("r1", PROMPTS[0]))
    worker = made.world.requests.get("r1")
    assert worker is not None
    lost = worker.worker_id
    made("fleet", WorkerLost(owner_epoch=0, worker_id=lost, worker_epoch=worker.worker_epoch))
    for kind, fields in ((FirstTokenEmitted, {}), (RequestFinished, {"finish_reason": "length", "output_tokens": 3})):
        made("progress", report_progress(made, "r1", kind, **fields), 10_000)
    report = found("--against", file(made, tmp_path / "run.db"))
    for one in report["simulated"]:
        assert (one["compared"], one["failed"], one["placement"]["equal"]) == (1, 0, 1)


def test_requests_unfinished_in_history_are_simulated_and_not_compared(tmp_path: Path) -> None:
    made = fleet("a")
    for number, tokens in enumerate((5, 7, 9)):
        made("requests", request(f"r{number}", PROMPTS[0]))
        for kind, fields in (
            (FirstTokenEmitted, {}),
            (RequestFinished, {"finish_reason": "length", "output_tokens": tokens}),
        ):
            made("progress", report_progress(made, f"r{number}", kind, **fields), 10_000)
    made("requests", request("cancelled", PROMPTS[1]))
    made("requests", RequestCancelled(request_id="cancelled"), 30_000)
    made("requests", request("left", PROMPTS[2]))
    made("requests", request("nobody", PROMPTS[2], model="another"))
    report = found("--against", file(made, tmp_path / "run.db"))
    assert report["requests"] == 6
    assert report["left_out"] == {
        "cancelled by their clients": 1,
        "unfinished": 1,
        "rejected or never routed": 1,
    }
    assert "3 unfinished requests are simulated with the median response length of the others, 7 tokens" in " ".join(
        report["notes"]
    )
    assert report["simulated"][0]["compared"] == 3


def test_a_recording_without_requests_is_rejected(tmp_path: Path) -> None:
    made = fleet("a")
    made("requests", request("r1", PROMPTS[0]))
    assert error_line("--against", file(made, tmp_path / "run.db")).startswith("no recorded request finished")


def test_other_policies_are_shown_and_not_checked_against_the_limits(recording: Path) -> None:
    bar = "ttft=0,itl=0,e2e=0,reuse=0,load=0"
    report = found("--against", recording, "--policy", "round-robin", "--fail-above", bar)
    assert [one["name"] for one in report["simulated"]] == [AS_RECORDED, PLACED, "round-robin"]
    other = report["simulated"][2]
    assert other["placement"]["equal"] < 1
    assert other["prefix_reuse"]["error"] < -1


def test_an_error_above_the_limit_exits_1(recording: Path) -> None:
    options = ["--against", recording, "--speedup", 2]
    assert found(*options, "--fail-above", "reuse=100,load=1000")["above"] == []
    code, out, err = run_against(*options, "--fail-above", "ttft=10,itl=10.5,reuse=100")
    assert code == 1
    assert "observed, and simulated as recorded" in out
    assert [line.split(" is ")[0] for line in err.splitlines()] == [
        f"forebay: --fail-above: error of {time} {of}" for time in ("ttft_ms", "itl_ms") for of in ("p50", "p90")
    ]


def test_repeated_draws_show_random_variation(recording: Path) -> None:
    report = found("--against", recording, "--repeat", 3)
    runs = [one for one in report["simulated"] if one["name"] == AS_RECORDED]
    assert [one["draw"] for one in runs] == [0, 1, 2]
    assert len({one["digest"] for one in runs}) == 3
    first, *others = (one["times"]["ttft_ms"]["mean"] for one in runs)
    assert first["error"] == 0
    assert all(0 < abs(one["error"]) < 10 for one in others)
    assert "all simulated" in run_against("--against", recording, "--repeat", 2)[1]


def test_a_diverging_log_is_not_compared(recording: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.db"
    broken.write_bytes(recording.read_bytes())
    offset, routed = next(
        (number, one)
        for number, one in enumerate(decode(DECISIONS, record.value) for record in journal_of(broken))
        if isinstance(one, RequestRouted)
    )
    elsewhere = msgspec.structs.replace(routed, worker_id="elsewhere")
    replace_record(broken, DECISIONS, offset, lambda _: encode(DECISIONS, elsewhere))
    code, out, err = run_against("--against", broken)
    assert (code, out) == (1, "")
    assert f"history diverges at journal offset {offset}" in err


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((), "no workload given"),
        (("trace.jsonl", "--repeat", 2), "--speedup, --repeat and --fail-above require --against"),
        (("--against", "REC", "trace.jsonl"), "a workload cannot be combined with --against"),
        (("--against", "REC", "--workers", 3, "--speed", 2), "--workers and --speed cannot be combined with --against"),
        (("--against", "REC", "--slo", "ttft=1"), "--slo cannot be combined with --against"),
        (("--against", "REC", "--fail-above", "ttft"), "--fail-above ttft: got 'ttft', expected NAME=NUMBER"),
        (("--against", "REC", "--fail-above", "tpot=3"), "--fail-above tpot=3: unknown metric 'tpot'; metrics are:"),
        (("--against", "REC", "--policy", "best"), "unknown router mode 'best'"),
        (("--against", "REC", "--engine-profile", "none.toml"), "unknown engine profile 'none.toml'"),
        (("--against", "nowhere.rec"), "nowhere.rec: no such log file; check the path"),
        (("--against", "BROKEN"), "broken.rec: is not a forebay log"),
    ],
)
def test_options_that_conflict_with_against_are_rejected(
    recording: Path, tmp_path: Path, given: tuple[Any, ...], reason: str
) -> None:
    broken = tmp_path / "broken.rec"
    broken.write_text("no log at all")
    places = {"REC": recording, "BROKEN": broken}
    assert reason in error_line(*(places.get(one, one) for one in given))
