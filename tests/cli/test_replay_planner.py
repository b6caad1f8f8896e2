"""`forebay replay planner`: sizes of a planner with other settings on the observations of a log, or on its requests."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.events.scaling import DemandForecast, PoolDemand, ScalingEvent, ScalingObserved
from forebay.planner.predictors import predictor
from tests.benchmarks.recordings import Shape, write_recording
from tests.cli.in_process import forebay
from tests.cli.scaling_log import GROUP, PlannerDay, a_day, write_log

RATES = (20.0, 20.0, 70.0, 70.0, 35.0, 70.0, 5.0, 5.0)


def a_week() -> PlannerDay:
    """Return a journal whose decisions are executed. After each reply the planner decides again."""
    day = PlannerDay()
    sizes = {"prefill": 1, "decode": 2}
    for rate in RATES:
        day.round(rate, sizes["prefill"], sizes["decode"])
        while day.state.open:
            day.reply()
            day.decide()
        sizes = {pool: day.state.sizes.get((GROUP, pool), size) for pool, size in sizes.items()}
    return day


def forecast_by(name: str, records: list[ScalingEvent]) -> list[ScalingEvent]:
    """Replace the forecasts of records by those of a predictor."""
    history: list[Any] = []
    made: list[ScalingEvent] = []
    for offset, record in enumerate(records):
        if isinstance(record, DemandForecast):
            found = predictor(name)(history, record.observed)
            made.append(msgspec.structs.replace(found, planner_epoch=record.planner_epoch, at_us=record.at_us))
            continue
        if isinstance(record, ScalingObserved):
            history.append(record)
        made.append(record)
        assert len(made) == offset + 1
    return made


def replayed(log: Path, *options: str, code: int = 0) -> dict[str, Any]:
    run = forebay("replay", "planner", str(log), "--json", *options)
    assert run.returncode == code, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def sizes(found: dict[str, Any], kind: str, pool: str = "decode") -> list[int]:
    name = f"{GROUP}/{pool}"
    return [one[kind] for interval in found["intervals"] for one in interval["pools"] if one["pool"] == name]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "week.db", a_week().records)


def test_equal_settings_decide_the_recorded_sizes(log: Path) -> None:
    found = replayed(log)
    assert found["source"] == "observations"
    assert len(found["intervals"]) == len(RATES)
    assert sizes(found, "recorded") == sizes(found, "replayed")
    assert found["recorded"] == found["replayed"]
    assert found["recorded"]["changes"] > found["recorded"]["reversals"] > 0
    decode, prefill = sizes(found, "recorded"), sizes(found, "recorded", "prefill")
    assert found["recorded"]["gpu_hours"] == pytest.approx((2 * sum(decode) + sum(prefill)) * 10 / 3600)


def test_latency_and_gpu_hours_are_shown_over_time(log: Path, tmp_path: Path) -> None:
    found = replayed(log, "--set", "gpu_budget=3")
    for kind in ("recorded", "replayed"):
        hours = [one[f"{kind}_gpu_hours"] for one in found["intervals"]]
        assert hours == sorted(hours)
        assert hours[-1] == found[kind]["gpu_hours"]
    prefill, decode = found["intervals"][0]["pools"]
    assert (prefill["ttft_ms"], prefill.get("itl_ms"), decode["itl_ms"]) == (120.0, None, 25.0)
    assert (found["attained"], {one["attained"] for one in found["intervals"]}) == (1.0, {True})
    assert replayed(log, "--set", "itl_ms=24")["attained"] == 0.0
    page = tmp_path / "replay.html"
    assert forebay("replay", "planner", str(log), "--report", str(page)).returncode == 0
    text = page.read_text()
    for part in (f"Workers of {GROUP}/decode", "ITL (ms)", "GPU hours", "in 100.0% of the intervals"):
        assert part in text
    (tmp_path / "notes.html").write_text("mine")
    refused = forebay("replay", "planner", str(log), "--report", str(tmp_path / "notes.html"))
    assert (refused.returncode, "not a report of this command" in refused.stderr) == (2, True)


def test_other_settings_decide_other_sizes(log: Path) -> None:
    found = replayed(log, "--set", "cooldown_s=1e6", "--set", "predictor=moving-average")
    assert found["settings"]["predictor"] == "moving-average"
    assert found["replayed"]["reversals"] == 0 < found["recorded"]["reversals"]
    assert sizes(found, "replayed") == sorted(sizes(found, "replayed"))
    shown = forebay("replay", "planner", str(log), "--set", "gpu_budget=3")
    assert shown.returncode == 0
    assert "different sizes" in shown.stdout


@pytest.mark.parametrize("name", ["moving-average", "kalman", pytest.param("arima", marks=pytest.mark.slow)])
def test_forecasts_are_computed_again(tmp_path: Path, name: str) -> None:
    records = forecast_by(name, a_week().records)
    check = replayed(write_log(tmp_path / "log.db", records))["forecasts"]
    assert (check["checked"], check["different"], check["unavailable"]) == (len(RATES), 0, 0)
    assert check["difference_max"] <= check["tolerance"]


def test_a_forecast_that_does_not_follow_is_found(tmp_path: Path) -> None:
    records = a_week().records
    at = next(at for at, record in enumerate(records) if isinstance(record, DemandForecast))
    forecast = records[at]
    assert isinstance(forecast, DemandForecast)
    other = PoolDemand(group=GROUP, pool="decode", requests_per_s=20.1, isl=1_000.0, osl=200.0, kv_hit_rate=0.25)
    records[at] = msgspec.structs.replace(forecast, pools=(forecast.pools[0], other))
    found = replayed(write_log(tmp_path / "log.db", records), code=1)
    assert found["forecasts"]["different"] == 1
    assert found["forecasts"]["difference_max"] == pytest.approx(0.1 / 20.1)


def test_a_predictor_that_is_unknown_here_is_not_computed_again(tmp_path: Path) -> None:
    records = [
        msgspec.structs.replace(one, predictor="theirs") if isinstance(one, DemandForecast) else one
        for one in a_week().records
    ]
    check = replayed(write_log(tmp_path / "log.db", records))["forecasts"]
    assert (check["checked"], check["unavailable"]) == (0, len(RATES))


def test_a_day_with_operators_and_refusals_is_replayed(tmp_path: Path) -> None:
    found = replayed(write_log(tmp_path / "day.db", a_day().records), "--set", "method=load")
    assert found["settings"]["method"] == "load"
    assert sizes(found, "recorded") == [4, 4, 5, 5, 5]
    assert sizes(found, "replayed") == [2, 2, 2, 2, 2], "no worker has reported its load"


PLANNER = """
interval_s = 0.5
gpu_budget = 0

[[pools]]
group = "{group}"
pool = "default"
role = "prefill"
profile = "profile.json"
"""


def test_without_a_planner_observations_derive_from_the_requests(tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    asyncio.run(write_recording(log, Shape(workers=2, decisions=200, cached_blocks=32, snapshot_every=50)))
    (tmp_path / "profile.json").write_text(
        json.dumps({"prefill": [{"isl": 1000, "ttft_ms": 10, "tokens_per_s": 10000}]})
    )
    planner = tmp_path / "planner.toml"
    planner.write_text(PLANNER.format(group="bench"))
    refused = forebay("replay", "planner", str(log))
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "--planner" in refused.stderr
    run = forebay("replay", "planner", str(log), "--planner", str(planner), "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["source"] == "requests"
    sizes = [interval["pools"][0] for interval in found["intervals"]]
    assert {one["recorded"] for one in sizes} == {2}
    assert max(one["replayed"] for one in sizes) > 2
    assert found["replayed"]["gpu_hours"] > found["recorded"]["gpu_hours"]
    assert found["forecasts"]["checked"] == 0


@pytest.mark.parametrize("change", ["speed=3", "interval_s", "interval_s=0", "predictor=nobody", "method=simulate"])
def test_an_invalid_setting_ends_the_command(log: Path, change: str) -> None:
    run = forebay("replay", "planner", str(log), "--set", change)
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1)
