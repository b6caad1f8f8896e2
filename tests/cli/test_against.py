"""`forebay simulate --against`: exact where the engines were the simulator's own, and honest elsewhere."""

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.analysis.comparison import STATISTICS
from forebay.events.codec import decode, encode
from forebay.events.control import DisaggConfig, DisaggPolicy, PoolConfigured, RouterConfig
from forebay.events.decisions import RequestRouted, SnapshotTaken
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.requests import RequestCancelled
from forebay.events.topics import DECISIONS
from forebay.simulate.settings import Transfer
from forebay.simulate.tiers.settings import DiskTier, FleetTiers, HostTier, StoreTier
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import error_of, forebay, json_of
from tests.cli.logs import at, made, written
from tests.core.worlds import PROMPTS, request
from tests.replay.disagg_history import history
from tests.replay.mutations import replace_record
from tests.replay.recorded import write
from tests.replay.recorder import Recorder, fleet
from tests.replay.simulated import played
from tests.replay.slices import journal_of, run
from tests.simulate.scene import conversations
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


def file(made: Recorder, path: Path) -> Path:
    made.seal()
    return written(made, path)


def test_a_simulated_recording_is_reproduced_exactly(recording: Path) -> None:
    report = json_of("simulate", "--against", recording)
    assert (report["requests"], report["workers"], report["left_out"], report["above"]) == (66, 3, {}, [])
    assert (report["observed"]["requests"], report["failed"], report["same_worker"]) == (66, 0, 1)
    latencies = {f"{name}.{of}" for name in ("ttft_ms", "itl_ms", "e2e_ms") for of in STATISTICS}
    assert report["errors"] == dict.fromkeys((*latencies, "load_max_over_mean", "prefix_reuse"), 0.0)
    assert report["observed"]["ttft_ms"] == report["simulated"]["ttft_ms"]
    assert report["observed"]["ttft_ms"]["p50"] > 0


def test_placements_and_reuse_of_a_live_system_are_reproduced(tmp_path: Path) -> None:
    asyncio.run(_record_sequential_requests(tmp_path / "run.db"))
    made(tmp_path / "run.db", tmp_path / "rec")
    report = json_of("simulate", "--against", tmp_path / "rec", "--speedup", SPEEDUP)
    assert (report["requests"], report["left_out"], report["same_worker"]) == (30, {}, 1)
    assert report["observed"]["prefix_reuse"] > 0.5
    assert report["errors"]["prefix_reuse"] == report["errors"]["load_max_over_mean"] == 0


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
    run = forebay("simulate", "--against", live, "--speedup", SPEEDUP)
    assert run.returncode == 0
    text = run.stdout
    assert re.search(r"60 requests in [0-9.]+ s, 3 worker ranks", text)
    assert re.search(r"(5\d|60) requests *\n", text)
    assert "3 workers joined with empty caches and 1 were lost" in text
    assert "ran on the same worker in both" in text
    assert "failed" not in text


def test_a_simulation_resumes_from_the_snapshot_of_a_recording(live: Path, tmp_path: Path) -> None:
    records = journal_of(live)
    middle = next(
        one for one in records[len(records) // 2 :] if isinstance(decode(DECISIONS, one.value), SnapshotTaken)
    )
    made("--from", at(middle.at_us), live, tmp_path / "rec")
    report = json_of("simulate", "--against", tmp_path / "rec", "--speedup", SPEEDUP)
    assert 0 < report["requests"] < 60
    assert any("Caches start with the blocks of the index" in note for note in report["notes"])
    # Prompts share their first blocks, so a simulation with empty caches would have fewer hits.
    assert report["simulated"]["prefix_reuse"] > 0.5


def test_requests_unfinished_in_history_are_simulated_and_not_compared(tmp_path: Path) -> None:
    made = fleet("a")
    for number, tokens in enumerate((5, 7, 9)):
        made("requests", request(f"r{number}", PROMPTS[0]))
        for kind, fields in (
            (FirstTokenEmitted, {}),
            (RequestFinished, {"finish_reason": "length", "output_tokens": tokens}),
        ):
            made.progress(f"r{number}", kind, 10_000, **fields)
    made("requests", request("cancelled", PROMPTS[1]))
    made("requests", RequestCancelled(request_id="cancelled"), 30_000)
    made("requests", request("left", PROMPTS[2]))
    made("requests", request("nobody", PROMPTS[2], model="another"))
    report = json_of("simulate", "--against", file(made, tmp_path / "run.db"))
    assert report["requests"] == 6
    assert report["left_out"] == {"cancelled by their clients": 1, "unfinished": 1, "rejected or never routed": 1}
    assert "3 unfinished requests are simulated with the median response length of the others, 7 tokens" in " ".join(
        report["notes"]
    )
    assert report["observed"]["requests"] == 3


def test_a_recording_without_requests_is_rejected(tmp_path: Path) -> None:
    made = fleet("a")
    made("requests", request("r1", PROMPTS[0]))
    assert error_of("simulate", "--against", file(made, tmp_path / "run.db")).startswith("no recorded request finished")


def test_an_error_above_the_limit_exits_1(recording: Path) -> None:
    options = ["--against", recording, "--speedup", 2]
    assert json_of("simulate", *options, "--fail-above", "reuse=100,load=1000")["above"] == []
    run = forebay("simulate", *options, "--fail-above", "ttft=10,itl=10.5,reuse=100")
    assert (run.returncode, "TTFT p50, ms" in run.stdout) == (1, True)
    assert [line.split(" is ")[0] for line in run.stderr.splitlines()] == [
        f"forebay: --fail-above: error of {time} {of}" for time in ("ttft_ms", "itl_ms") for of in ("p50", "p90")
    ]


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
    run = forebay("simulate", "--against", broken)
    assert (run.returncode, run.stdout) == (1, "")
    assert f"history diverges at journal offset {offset}" in run.stderr


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((), "no workload given"),
        (("trace.jsonl", "--speedup", 2), "--speedup, --fail-above and --allow-policy require --against"),
        (("--against", "REC", "trace.jsonl"), "a workload cannot be combined with --against"),
        (("--against", "REC", "--workers", 3, "--speed", 2), "--workers and --speed cannot be combined with --against"),
        (("--against", "REC", "--slo", "ttft=1"), "--slo cannot be combined with --against"),
        (("--against", "REC", "--fail-above", "ttft"), "--fail-above ttft: got 'ttft', expected NAME=NUMBER"),
        (("--against", "REC", "--fail-above", "tpot=3"), "--fail-above tpot=3: unknown metric 'tpot'; metrics are:"),
        (("--against", "REC", "--policy", "kv"), "--policy cannot be combined with --against"),
        (("--against", "REC", "--engine-profile", "none.toml"), "unknown engine profile 'none.toml'"),
        (
            ("--against", "REC", "--kv-transfer-bandwidth", 2),
            "the recording has no KV transfers; omit the --kv-transfer-*",
        ),
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
    assert reason in error_of("simulate", *(places.get(one, one) for one in given))


TRANSFER = Transfer(kv_bytes_per_token=100_000, kv_transfer_bandwidth=2.0, kv_transfer_latency_us=700)
LINK = ("--kv-transfer-bandwidth", "2.0", "--kv-transfer-latency-us", "700")


def disaggregated(path: Path, policy: DisaggPolicy = "isl_bounding", transfer: Transfer = TRANSFER) -> Path:
    """Write a simulated run of two prefill and two decode workers."""
    rule = DisaggConfig(policy=policy, eff_isl_threshold=3_000, eff_isl_ratio_threshold=0.95)
    rows = conversations(sessions=11, turns=6, every_ms=1_000)
    run = played(rows, RouterConfig(disagg=rule), 4, 1_024, prefill=2, transfer=transfer)
    asyncio.run(write(run.log, path))
    return path


def test_disagg_a_simulated_recording_is_reproduced_exactly(tmp_path: Path) -> None:
    log = disaggregated(tmp_path / "run.db")
    report = json_of("simulate", "--against", log, *LINK)
    assert (report["requests"], report["workers"], report["left_out"], report["same_worker"]) == (66, 4, {}, 1)
    assert {"prefill_ms.p99", "transfer_ms.p99", "prefilled_remotely", "transferred_bytes"} < set(report["errors"])
    assert set(report["errors"].values()) == {0.0}
    assert 66 > report["observed"]["prefilled_remotely"] > 0 < report["observed"]["transferred_bytes"]
    text = " ".join(forebay("simulate", "--against", log, *LINK).stdout.split())
    assert "transfers 700 us latency and 2 GB/s, 100,000 bytes per token" in text
    for row in ("transfer p99, ms", "prefill mean, ms", "prefilled remotely 13 13 +0.00 %"):
        assert row in text


def test_disagg_transfers_are_fitted_to_the_recording(tmp_path: Path) -> None:
    link = Transfer(kv_bytes_per_token=1_000, kv_transfer_bandwidth=0.5, kv_transfer_latency_us=3_000)
    report = json_of("simulate", "--against", disaggregated(tmp_path / "run.db", "always", link))
    assert report["transfer"]["kv_bytes_per_token"] == 1_000
    assert report["transfer"]["kv_transfer_bandwidth"] == pytest.approx(0.5, rel=0.1)
    assert report["transfer"]["kv_transfer_latency_us"] == pytest.approx(3_000, rel=0.1)
    assert abs(report["errors"]["transfer_ms.p50"]) < 5


def test_disagg_settings_of_operators_are_applied(tmp_path: Path) -> None:
    path = written(history("always", by_hand="never"), tmp_path / "run.db")
    assert json_of("simulate", "--against", path)["simulated"]["prefilled_remotely"] == 0


SIZES = {"host": "900blocks", "disk": "1500blocks", "store": "4000blocks"}


def test_tiers_of_a_simulated_recording_are_reproduced_exactly(tmp_path: Path) -> None:
    log = tmp_path / "run.db"
    tiers = FleetTiers(
        host=HostTier(size=SIZES["host"]), disk=DiskTier(size=SIZES["disk"]), store=StoreTier(size=SIZES["store"])
    )
    rows = conversations(sessions=11, turns=6, every_ms=2_000)
    asyncio.run(write(played(rows, RouterConfig(), workers=2, blocks=512, tiers=tiers).log, log))
    options = [part for tier, size in SIZES.items() for part in ("--kv-tier", f"{tier}:size={size}")]
    report = json_of("simulate", "--against", log, *options)
    assert {"from host", "from store"} < set(report["errors"])
    assert set(report["errors"].values()) == {0.0}
    assert "from host" in forebay("simulate", "--against", log, *options).stdout
    without = json_of("simulate", "--against", log)
    assert without["observed"]["from host"] > without["simulated"]["from host"] == 0.0
    smaller = json_of("simulate", "--against", log, "--kv-tier", "host:size=1GB", "--kv-bytes-per-token", "32768")
    assert 0.0 < smaller["simulated"]["from host"] < report["observed"]["from host"]
    error = "--kv-tier host: got a size of 1KB, but one block has 8388608 bytes"
    assert error in error_of("simulate", "--against", log, "--kv-tier", "host:size=1KB")
