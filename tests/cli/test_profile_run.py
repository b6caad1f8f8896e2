"""`forebay profile run` against mock workers: points, resumption, several workers, and errors."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.cli.planner.planner_file import read_planner_file
from forebay.events.scaling import DecodePoint, PrefillPoint
from forebay.simulate.profiles.profile import load_profile
from tests.cli.in_process import forebay
from tests.cli.up import PATIENCE_S, Up, running
from tests.harness import fork_server
from tests.harness.local import free_ports

SMALL = ("--isl", "64,256,128", "--context", "256,128", "--concurrency", "1,2", "--repeats", "1")
PLANNER = """
[[pools]]
group = "forebay-default"
pool = "default"
profile = "p.json"
"""
OUTPUT = ("--output-tokens", "16")

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with running("--workers", "1", "--speedup", "1") as up:
        yield up


def profile(up: Up, out: Path, *options: str) -> Any:
    """Measure with success, and return the file."""
    run = forebay("profile", "run", "--url", up.url, "--out", str(out), *options)
    assert run.returncode == 0, run.stderr
    return json.loads(out.read_text())


def test_a_profile_has_every_point_an_engine_profile_and_a_page(up: Up, tmp_path: Path) -> None:
    engine, page = tmp_path / "engine.toml", tmp_path / "page.html"
    outputs = ("--engine-profile-out", str(engine), "--report", str(page))
    found = profile(up, tmp_path / "p.json", *SMALL, *OUTPUT, *outputs)
    prefill = msgspec.convert(found["prefill"], list[PrefillPoint])
    decode = msgspec.convert(found["decode"], list[DecodePoint])
    assert [one.isl for one in prefill] == [64, 128, 256]
    assert [(one.context, one.concurrency) for one in decode] == [(128, 1), (128, 2), (256, 1), (256, 2)]
    for one in decode:
        assert one.tokens_per_s == pytest.approx(one.concurrency * 1e3 / one.itl_ms)
    assert all(one.ttft_ms > 0 for one in prefill)
    assert found["left_out"] == []
    (planner := tmp_path / "planner.toml").write_text(PLANNER)
    assert read_planner_file(planner).settings.pools[0].prefill == tuple(prefill)
    loaded = load_profile(str(engine))
    assert (loaded.name, loaded.source) == ("forebay-default, measured", "forebay profile run")
    assert "<title>forebay profile: forebay-default</title>" in page.read_text()


@pytest.mark.parametrize(("role", "stages"), [("prefill", (1, 0)), ("decode", (0, 1))])
def test_a_role_has_the_points_of_its_stage(up: Up, tmp_path: Path, role: str, stages: tuple[int, int]) -> None:
    grid = ("--isl", "64", "--context", "64", "--concurrency", "1", "--repeats", "1")
    found = profile(up, tmp_path / "p.json", *grid, *OUTPUT, "--role", role)
    assert (len(found["prefill"]), len(found["decode"])) == stages


@pytest.mark.slow
def test_a_second_run_measures_only_what_is_missing(up: Up, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    first = profile(up, out, *SMALL, *OUTPUT)
    out.write_text(json.dumps(first | {"decode": first["decode"][:1]}))
    second = profile(up, out, *SMALL, *OUTPUT)
    assert second["prefill"] == first["prefill"]
    assert second["decode"][:1] == first["decode"][:1]
    assert len(second["decode"]) == len(first["decode"])


def test_other_settings_do_not_continue_a_file(up: Up, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    profile(up, out, *SMALL, *OUTPUT, "--role", "prefill")
    before = out.read_bytes()
    run = forebay("profile", "run", "--url", up.url, "--out", str(out), *SMALL, *OUTPUT, "--role", "decode")
    assert (run.returncode, "role was prefill, now decode" in run.stderr) == (2, True), run.stderr
    assert out.read_bytes() == before


@pytest.mark.parametrize("content", ["", "[]", '{"prefill": []}', "{", '{"settings": 1}'])
def test_another_file_is_not_overwritten(up: Up, tmp_path: Path, content: str) -> None:
    out = tmp_path / "p.json"
    out.write_text(content)
    run = forebay("profile", "run", "--url", up.url, "--out", str(out))
    assert (run.returncode, "not a file of this command" in run.stderr) == (2, True), run.stderr
    assert out.read_text() == content


def test_prompts_longer_than_the_context_are_left_out(up: Up, tmp_path: Path) -> None:
    grid = ("--isl", "64,200000,300000", "--role", "prefill", "--repeats", "1")
    found = profile(up, tmp_path / "p.json", *grid)
    assert [one["isl"] for one in found["prefill"]] == [64]
    assert [one["point"]["tokens"] for one in found["left_out"]] == [200_000, 300_000]
    assert all("exceed the context of 131072 tokens" in one["reason"] for one in found["left_out"])


@pytest.mark.slow
def test_an_interrupted_measurement_is_continued_on_another_system(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    grid = ("--isl", ",".join(map(str, range(100, 131))), "--role", "prefill", "--repeats", "1")
    with running("--workers", "1", "--speedup", "1") as up:
        ended = threading.Event()

        def kill_after_a_point() -> None:
            while not out.exists() and not ended.wait(0.01):
                pass
            up.process.kill()

        killer = threading.Thread(target=kill_after_a_point)
        killer.start()
        try:
            run = forebay("profile", "run", "--url", up.url, "--out", str(out), *grid)
        finally:
            ended.set()
            killer.join()
            up.process.communicate(timeout=PATIENCE_S)
    assert (run.returncode, "run the same command again" in run.stderr) == (1, True), run.stderr
    measured = json.loads(out.read_text())["prefill"]
    assert 1 <= len(measured) < 31
    with running("--workers", "1", "--speedup", "1") as up:
        found = profile(up, out, *grid)["prefill"]
    assert found[: len(measured)] == measured
    assert len(found) == 31


def test_an_interrupted_run_keeps_its_points(up: Up, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    run = fork_server.start("profile", "run", "--url", up.url, "--out", str(out), stderr=subprocess.PIPE)
    ends_s = time.monotonic() + PATIENCE_S
    while not out.exists() and time.monotonic() < ends_s:
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, "interrupted; run the same command again" in errors) == (130, True), errors
    assert json.loads(out.read_text())["prefill"]


def test_one_of_several_workers_has_to_be_named(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    grid = ("--isl", "64", "--role", "prefill", "--repeats", "1")
    with running("--workers", "2", "--routing-hints") as up:
        run = forebay("profile", "run", "--url", up.url, "--out", str(out), *grid)
        assert (run.returncode, "2 ready workers (mock-0, mock-1)" in run.stderr) == (2, True), run.stderr
        run = forebay("profile", "run", "--url", up.url, "--out", str(out), *grid, "--worker", "mock-2")
        assert (run.returncode, "mock-1" in run.stderr) == (2, True), run.stderr
        assert profile(up, out, *grid, "--worker", "mock-1")["settings"]["worker"] == "mock-1"


def test_a_rejected_first_request_ends_the_run(tmp_path: Path) -> None:
    with running("--workers", "2") as up:
        run = forebay("profile", "run", "--url", up.url, "--out", str(tmp_path / "p.json"), "--worker", "mock-1")
    assert (run.returncode, "--routing-hints" in run.stderr) == (2, True), run.stderr
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--isl", "0"), "--isl 0: '0' is not a number"),
        (("--isl", "64,x"), "'x' is not a number"),
        (("--concurrency", "5000"), "from 1 to 4,096"),
        (("--context", ",".join(map(str, range(100, 200)))), "100 numbers; give at most 64"),
        (("--context", "64", "--output-tokens", "64"), "must exceed --output-tokens 64"),
        (("--role", "prefill", "--engine-profile-out", "e.toml"), "--engine-profile-out requires --role aggregated"),
        (("--out", "missing/p.json"), "no such directory missing"),
        (("--model-name", "forebay-other"), "forebay-default"),
    ],
)
def test_invalid_options_are_rejected(up: Up, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    out = () if "--out" in options else ("--out", str(tmp_path / "p.json"))
    run = forebay("profile", "run", "--url", up.url, *out, *options)
    assert (run.returncode, message in run.stderr) == (2, True), run.stderr


def test_error_names_an_unreachable_system(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_ports(1)}"
    run = forebay("profile", "run", "--url", url, "--out", str(tmp_path / "p.json"))
    assert (run.returncode, f"no response from {url}" in run.stderr) == (2, True)
