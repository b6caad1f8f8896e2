"""`forebay simulate --against` a recording with disaggregation: both stages and KV transfers."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.simulate.fidelity import AS_RECORDED, PLACED, STAGE_TIMES, STATISTICS, TIMES
from forebay.cli.simulate.fidelity_stages import stages
from forebay.events.control import DisaggConfig, DisaggPolicy, RouterConfig
from forebay.simulate.outcome import RequestOutcome
from forebay.simulate.settings import Transfer
from forebay.simulate.transfer_fit import FITTED_MIN
from tests.cli.up import running
from tests.replay.disagg_history import COUNT, history
from tests.replay.recorded import write
from tests.replay.simulated import played
from tests.simulate.traces import conversations

TRANSFER = Transfer(kv_bytes_per_token=100_000, kv_transfer_bandwidth=2.0, kv_transfer_latency_us=700)
LINK = ("--kv-transfer-bandwidth", "2.0", "--kv-transfer-latency-us", "700")
STAGES = ["place", "prefill", "decode", "aggregated"]

pytestmark = pytest.mark.timeout(180)


def recording(path: Path, policy: DisaggPolicy = "isl_bounding", transfer: Transfer = TRANSFER) -> Path:
    """Write a simulated run of two prefill and two decode workers."""
    rule = DisaggConfig(policy=policy, eff_isl_threshold=3_000, eff_isl_ratio_threshold=0.95)
    rows = conversations(sessions=11, turns=6, every_ms=1_000)
    run = played(rows, RouterConfig(disagg=rule), 4, 1_024, prefill=2, transfer=transfer)
    asyncio.run(write(run.log, path))
    return path


@pytest.fixture(scope="module")
def disaggregated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recording(tmp_path_factory.mktemp("disaggregated") / "run.db")


def served(worker: int, prefiller: int | None) -> RequestOutcome:
    return RequestOutcome(0, 1, 1, worker=worker, prefiller=prefiller)


def test_disagg_stages_compare_requests_that_agree_on_earlier_stages() -> None:
    observed = [served(0, 2), served(0, 2), served(1, 3), served(0, None), served(1, None), served(1, None)]
    other = [served(0, 2), served(1, 3), served(1, None), served(0, 2), served(1, None), served(0, None)]
    agreed = stages(list(zip(observed, other, strict=True)))
    assert {name: (one.compared, one.equal, one.by_chance) for name, one in agreed.items()} == {
        "place": (6, 4 / 6, 0.5),
        "prefill": (2, 0.5, 0.5),
        "decode": (2, 0.5, 0.5),
        "aggregated": (2, 0.5, 0.5),
    }


def run_against(*arguments: Any, code: int = 0) -> str:
    run = CliRunner().invoke(app, ["simulate", "--against", *map(str, arguments)])
    assert run.exit_code == code, run.stderr
    return run.stdout + run.stderr


def found(*arguments: Any) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run_against(*arguments, "--json"))
    return result


def test_disagg_a_simulated_recording_is_reproduced_exactly(disaggregated: Path) -> None:
    report = found(disaggregated, *LINK)
    assert (report["requests"], report["workers"], report["left_out"]) == (66, 4, {})
    assert [one["name"] for one in report["simulated"]] == [AS_RECORDED, PLACED]
    for one in report["simulated"]:
        assert (one["compared"], one["failed"]) == (66, 0)
        for time in (*TIMES, *STAGE_TIMES):
            for of in STATISTICS:
                figure = one["times"][time][of]
                assert figure["observed"] == figure["simulated"] > 0, (time, of)
        assert one["prefix_reuse"]["error"] == one["load_max_over_mean"]["error"] == 0
        assert one["prefix_reuse"]["observed"] > 0.2
        assert {stage: agreed["equal"] for stage, agreed in one["stages"].items()} == dict.fromkeys(STAGES, 1)
        assert one["prefilled_remotely"]["observed"] == one["prefilled_remotely"]["simulated"]
        assert one["stages"]["prefill"]["compared"] == one["prefilled_remotely"]["observed"]
        assert one["stages"]["aggregated"]["compared"] == 66 - one["prefilled_remotely"]["observed"] > 0
        assert one["transferred_bytes"]["observed"] == one["transferred_bytes"]["simulated"] > 0


def test_disagg_links_are_fitted_to_recorded_transfers(disaggregated: Path, tmp_path: Path) -> None:
    few = found(disaggregated)["transfer"]
    assert (few["seen"], few["fitted"], few["transfer"]["kv_bytes_per_token"]) == (13, 13, 100_000)
    assert "transfers are needed for a fit" in few["note"]
    link = Transfer(kv_bytes_per_token=1_000, kv_transfer_bandwidth=0.5, kv_transfer_latency_us=3_000)
    report = found(recording(tmp_path / "run.db", "always", link))
    fit = report["transfer"]
    assert (fit["seen"], fit["transfer"]["kv_bytes_per_token"]) == (66, 1_000)
    assert FITTED_MIN <= fit["fitted"] < 66, "some shared a link"
    assert fit["transfer"]["kv_transfer_bandwidth"] == pytest.approx(0.5, rel=0.05)
    assert fit["transfer"]["kv_transfer_latency_us"] == pytest.approx(3_000, rel=0.05)
    placed = report["simulated"][1]
    for time in (*TIMES, *STAGE_TIMES):
        assert abs(placed["times"][time]["p50"]["error"]) < 5


def test_disagg_table_shows_placement_and_transfers(disaggregated: Path) -> None:
    text = " ".join(run_against(disaggregated, *LINK).split())
    assert "100.0% of 66 prompts were prefilled in the same pool in both" in text
    assert "100.0% of 13 prompts prefilled remotely in both used the same prefill worker" in text
    assert (
        "transfers 700 us latency and 2 GB/s, 100,000 bytes per token; from 13 of 13 transfers, median error 0.0 %"
        in text
    )
    for row in ("transfer p99, ms", "prefill mean, ms", "prefilled remotely 13 13 +0.00 %", "KV transferred, MB"):
        assert row in text


def test_disagg_policy_overrides_operator_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    asyncio.run(history("always", by_hand="never").log(path)).close()
    runs = {one["name"]: one for one in found(path, "--policy", "kv:disagg.policy=always")["simulated"]}
    assert {name: one["prefilled_remotely"]["simulated"] for name, one in runs.items()} == {
        AS_RECORDED: 0,
        PLACED: 0,
        "kv:disagg.policy=always": COUNT,
    }
    # History has no transfers, so relative errors are undefined.
    moved = runs["kv:disagg.policy=always"]["transferred_bytes"]
    assert (moved["observed"], moved["error"]) == (0, None)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (LINK, "the recording has no KV transfers; omit the --kv-transfer-* options"),
        (
            ("--policy", "kv:disagg.policy=never"),
            "kv:disagg.policy=never: disagg settings need prefill and decode workers, but the recording has none",
        ),
    ],
)
def test_disagg_options_without_effect_are_rejected(tmp_path: Path, given: tuple[str, ...], reason: str) -> None:
    run = played(conversations(sessions=2, turns=2), RouterConfig(), 2)
    asyncio.run(write(run.log, tmp_path / "run.db"))
    assert run_against(tmp_path / "run.db", *given, code=2) == f"forebay: {reason}\n"


@pytest.mark.slow
def test_disagg_a_live_fleet_is_reproduced(tmp_path: Path) -> None:
    rule = {"policy": "classic", "max_local_prefill_length": 100}
    fleet = ("--prefill-workers", "2", "--decode-workers", "2", "--block-size", "16", "--speedup", "20")
    conditional = ("--router-conditional-disagg", "--router-conditional-disagg-config", json.dumps(rule))
    log = tmp_path / "run.db"
    with running(*fleet, *conditional, "--router-mode", "round-robin", "--log", str(log)) as up:
        for number in range(40):  # each waits for the previous response, so that timing has no influence
            token_ids = [(number * 7_919 + place) % 1_000 for place in range(40 + 20 * (number % 9))]
            body = {"model": "forebay-default", "prompt": token_ids, "max_tokens": 4, "ignore_eos": True}
            assert httpx.post(f"{up.url}/v1/completions", json=body, timeout=60).status_code == httpx.codes.OK
        assert up.end(signal.SIGTERM) == 0
    report = found(log, "--speedup", 20)
    assert (report["requests"], report["left_out"]) == (40, {})
    fit = report["transfer"]
    assert fit["transfer"]["kv_bytes_per_token"] == 256
    assert fit["seen"] == report["simulated"][0]["prefilled_remotely"]["observed"]
    for one in report["simulated"]:
        assert one["compared"] == 40
        assert {stage: agreed["equal"] for stage, agreed in one["stages"].items()} == dict.fromkeys(STAGES, 1)
        assert one["prefilled_remotely"]["observed"] == one["prefilled_remotely"]["simulated"] == 20
        assert one["transferred_bytes"]["observed"] == one["transferred_bytes"]["simulated"] > 0
        assert one["prefix_reuse"]["error"] == 0
        assert one["times"]["transfer_ms"]["p50"]["observed"] > 0
