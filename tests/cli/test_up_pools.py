"""`forebay up` with pools by grid, canaries and drains, and with prefill and decode pools."""

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.ingress.group import NO_PREFILL_WORKER
from tests import dashboard
from tests.cli.in_process import error_of, forebay
from tests.cli.up import ADMIN, ADMIN_TOKEN, PATIENCE_S, Up, running, verified

pytestmark = pytest.mark.timeout(180)
APART = ("--prefill-workers", "2", "--decode-workers", "2", "--admin-api")
ALIKE = ("--block-size", "16", "--kv-blocks", "512", "--engine-args", '{"kv_checksum": true}')
BODIES: list[dict[str, Any]] = [
    {"prompt": f"request {number}, " + "the log is the truth " * (5 * number), "max_tokens": 8 + number}
    for number in range(8)
]


def complete(up: Up, body: dict[str, Any]) -> dict[str, Any]:
    request = {"model": "forebay-default", "temperature": 1.0, "seed": 7, **body}
    response = httpx.post(f"{up.url}/v1/completions", json=request, timeout=60)
    assert response.status_code == httpx.codes.OK, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete_all(up: Up) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(BODIES)) as threads:
        return list(threads.map(lambda body: complete(up, body), BODIES))


def texts(answers: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["choices"][0]["text"], one["choices"][0]["finish_reason"]) for one in answers]


def unseen(up: Up) -> set[str]:
    """Return the dashboard queries of the disaggregation row for which a scrape has no series."""
    seen: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{up.url}/metrics", timeout=10).text):
        for sample in family.samples:
            seen.setdefault(sample.name, set()).update(sample.labels)
    wanted = dashboard.queries()[dashboard.APART]
    assert wanted
    return {
        query
        for query in wanted
        for name in dashboard.metrics(query)
        if name not in seen or not dashboard.labels(query) <= seen[name]
    }


def set_to(up: Up, **changes: Any) -> dict[str, Any]:
    response = httpx.post(
        f"{up.url}/disaggregation", json={"model": "forebay-default", **changes}, headers=ADMIN, timeout=10
    )
    assert response.status_code == httpx.codes.OK, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.fixture(scope="module")
def aggregated() -> list[tuple[str, str]]:
    """Return the responses of a fleet without disaggregation."""
    with running("--workers", "2", "--block-size", "16", "--kv-blocks", "512") as up:
        return texts(complete_all(up))


def test_disagg_responses_equal_those_without_disaggregation(tmp_path: Path, aggregated: list[tuple[str, str]]) -> None:
    log = tmp_path / "log.db"
    with running(*APART, *ALIKE, "--log", str(log)) as up:
        answers = complete_all(up)
        assert texts(answers) == aggregated
        assert {one["forebay"]["worker"].rstrip("01") for one in answers} == {"decode-"}
        assert up.metric('forebay_router_stages_total{model="forebay-default",stage="decode"}') == len(BODIES)
        assert up.metric("forebay_router_prefills_total{") == len(BODIES)
        assert httpx.get(f"{up.url}/ready", timeout=10).json() == {"status": "ready", "kv_transport": "nixl"}
        assert up.metric("forebay_kv_transfer_fetches_total{") == len(BODIES)
        assert up.metric("forebay_kv_transfer_bytes_total{") > 0
        assert up.metric("forebay_kv_transfer_corrupt_blocks_total{") == 0
        assert up.metric("forebay_router_prefill_to_first_token_seconds_count{") == len(BODIES)
        assert up.metric("forebay_router_kv_fetched_bytes_total{") == up.metric("forebay_kv_transfer_bytes_total{")
        assert not unseen(up)
        assert set_to(up, policy="never")["policy"] == "never"
        assert texts(complete_all(up)) == aggregated
        assert up.metric('forebay_router_prefills_total{model="forebay-default",place="local",reason="never"}') == 8
        up.end(signal.SIGKILL)
    with running(*APART, *ALIKE, "--log", str(log)) as up:
        assert texts(complete_all(up)) == aggregated
        assert up.end(signal.SIGTERM) == 0
    report = verified(log)
    assert report["claims"] == 2


def test_disagg_decode_workers_prefill_without_prefill_workers_unless_enforced(
    aggregated: list[tuple[str, str]],
) -> None:
    with running("--prefill-workers", "0", "--decode-workers", "2", "--admin-api", *ALIKE[:4]) as up:
        assert texts(complete_all(up)) == aggregated
        set_to(up, enforce=True)
        body = {"model": "forebay-default", "prompt": "x", "max_tokens": 1}
        refused = httpx.post(f"{up.url}/v1/completions", json=body, timeout=60)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (503, "no_workers"), error
        assert "no prefill worker for the pool decode is ready" in error["message"]
        ready = httpx.get(f"{up.url}/ready", timeout=10)
        assert (ready.status_code, ready.json()["error"]["message"]) == (503, NO_PREFILL_WORKER)
        set_to(up, enforce=False)
        assert httpx.get(f"{up.url}/ready", timeout=10).status_code == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prefill-workers", "1"), "--prefill-workers and --decode-workers require each other"),
        (("--decode-workers", "1"), "--prefill-workers and --decode-workers require each other"),
        ((*APART, "--workers", "1"), "--workers cannot be combined with --decode-workers"),
        ((*APART, "--dp-size", "1024", "--workers", "1"), "--workers cannot be combined"),
        (
            (*APART, "--dp-size", "1024", "--decode-workers", "8"),
            "10 workers with --dp-size 1024 are 10240 ranks; the maximum",
        ),
        (("--workers", "2", "--enforce-disagg"), "--enforce-disagg requires --prefill-workers and --decode-workers"),
        (("--router-conditional-disagg",), "--router-conditional-disagg requires --prefill-workers and --decode"),
        (
            ("--role", "prefill"),
            "--role prefill: `forebay up` has no other role than aggregated; use --prefill-workers",
        ),
        (
            (*APART, "--taint", "decode-2:x"),
            "unknown worker 'decode-2'; workers are: prefill-0 to prefill-1, decode-0 to decode-1",
        ),
    ],
)
def test_disagg_an_invalid_fleet_is_rejected(options: tuple[str, ...], message: str) -> None:
    assert message in error_of("up", *options)


def test_disagg_settings_without_effect_in_a_policy_file_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("disagg:\n  policy: never\n")
    assert (
        error_of("up", "--workers", "2", "--router-policy-config", tmp_path / "policy.yaml")
        == "field disagg of the --router-policy-config file requires --prefill-workers and --decode-workers"
    )


RULES = """
[[models]]
name = "forebay-default"

[[models.grids]]
isl_max = 400
target_max_ms = 1000
pools = [{ pool = "short", priority = 0 }, { pool = "long", priority = 1 }]
cells = [["short"], ["long"]]
"""
SHORT, LONG = "once upon a time", "word " * 300
POOL_OF = {"mock-0": "short", "mock-1": "long"}


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    return path


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the token that `Up` requires."""
    monkeypatch.setenv("FOREBAY_ADMIN_TOKEN", ADMIN_TOKEN)


def pools(log: Path) -> tuple[str, ...]:
    return ("--log", str(log), "--pool-workers", "short=1", "--pool-workers", "long=1", "--admin-api")


def control(up: Up, *arguments: object) -> dict[str, Any]:
    run = forebay("control", *arguments, "--url", up.url, "--json")
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def served_by(up: Up, prompt: str, name: str = "") -> str:
    """Return the pool that served a completion."""
    body = {"model": "forebay-default", "prompt": prompt, "max_tokens": 4}
    headers = {"x-request-id": name} if name else {}
    response = httpx.post(f"{up.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == httpx.codes.OK, response.text
    return POOL_OF[response.json()["forebay"]["worker"]]


def choice(up: Up, name: str) -> str:
    """Return the explanation of the choice of a pool for a request."""
    explained = httpx.get(f"{up.url}/v1/requests/{name}/explain", timeout=60).json()
    (text,) = [entry["text"] for entry in explained["timeline"] if entry["what"] == "pool_chosen"]
    return str(text)


def test_requests_follow_the_grid_a_canary_and_a_drain_and_nothing_is_lost(tmp_path: Path, rules: Path) -> None:
    log = tmp_path / "log.db"
    with running(*pools(log), "--pool-routing", str(rules)) as up, ThreadPoolExecutor(4) as threads:
        assert (served_by(up, SHORT, "by-grid"), served_by(up, LONG)) == ("short", "long")
        assert choice(up, "by-grid").startswith("pool short: the grid names short")

        control(up, "pools", "--pool", "long", "--base", "short", "--share", "1")
        assert served_by(up, SHORT, "by-canary") == "long"
        assert choice(up, "by-canary").startswith("pool long: long is a canary of short")
        control(up, "pools", "--pool", "long", "--base", "short", "--share", "0.5")
        assert {served_by(up, SHORT) for _ in range(40)} == {"short", "long"}  # all in one: 1 in 10**12
        control(up, "pools", "--pool", "long", "--remove")
        assert {served_by(up, SHORT) for _ in range(5)} == {"short"}

        control(up, "power", "pause", "--pool", "short")
        waiting: list[Future[str]] = [threads.submit(served_by, up, SHORT) for _ in range(3)]
        until(up, lambda status: in_flight(status, "mock-0") == 3)
        control(up, "drain", "short")
        assert served_by(up, SHORT, "by-drain") == "long"
        assert choice(up, "by-drain").startswith("pool long: the grid names short")
        assert "; short is drain" in choice(up, "by-drain")
        control(up, "power", "resume", "--pool", "short")
        assert [one.result() for one in waiting] == ["short"] * 3
        control(up, "drain", "short", "--remove")
        assert served_by(up, SHORT) == "short"
        counted = choices(up)
        assert counted["short", "grid"] >= 4
        assert counted["long", "canary"] >= 2
    assert verified(log)["decisions"]


def test_requests_that_are_queued_in_a_drained_pool_move_and_none_is_lost(tmp_path: Path, rules: Path) -> None:
    log = tmp_path / "log.db"
    one_each = ("--max-num-seqs", "1", "--router-queue-run-ahead", "0", "--pool-routing", str(rules))
    with running(*pools(log), *one_each) as up, ThreadPoolExecutor(4) as threads:
        control(up, "power", "pause")
        waiting: list[Future[str]] = [threads.submit(served_by, up, SHORT, f"short-{number}") for number in range(3)]
        until(up, lambda status: status["requests"]["queued"] == 2)
        blocking = threads.submit(served_by, up, LONG)
        until(up, lambda status: status["requests"]["in_flight"] == 4)
        control(up, "drain", "short")
        control(up, "power", "resume", "--pool", "long")
        assert blocking.result() == "long"
        moved = list(islice(as_completed(waiting, timeout=PATIENCE_S), 2))
        assert [one.result() for one in moved] == ["long"] * 2
        control(up, "power", "resume", "--pool", "short")
        assert sorted(one.result() for one in waiting) == ["long", "long", "short"]
    assert verified(log)["decisions"]


def choices(up: Up) -> dict[tuple[str, str], float]:
    """Return the counted choices of pools by pool and reason."""
    families = text_string_to_metric_families(httpx.get(f"{up.url}/metrics", timeout=30).text)
    samples = (sample for family in families for sample in family.samples)
    name = "forebay_router_pool_choices_total"
    return {(one.labels["pool"], one.labels["reason"]): one.value for one in samples if one.name == name}


def until(up: Up, reached: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the status of the system fulfils a condition."""
    ends_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_s:
        status = httpx.get(f"{up.url}/v1/status", timeout=30).json()
        if reached(status):
            return
        time.sleep(0.02)
    raise AssertionError(status)


def in_flight(status: dict[str, Any], worker: str) -> int:
    (ranks,) = (one["ranks"] for one in status["workers"] if one["worker_id"] == worker)
    return sum(rank["active_requests"] for rank in ranks)


def test_the_file_replaces_rules_of_the_log_at_each_start_and_canaries_stay(tmp_path: Path, rules: Path) -> None:
    log = tmp_path / "log.db"
    with running(*pools(log)) as up:
        assert (served_by(up, SHORT), served_by(up, LONG)) == ("long", "long"), "without rules the first pool serves"
        shown = control(up, "pools", "--pool-routing", rules)
        assert [grid["cells"] for grid in shown["grids"]] == [[["short"], ["long"]]]
        control(up, "pools", "--pool", "long", "--base", "short", "--share", "0")
        assert served_by(up, LONG) == "long"
    with running(*pools(log)) as up:
        assert control(up, "pools")["grids"] == shown["grids"]
    rules.write_text(RULES.replace('[["short"], ["long"]]', '[["long"], ["short"]]'))
    with running(*pools(log), "--pool-routing", str(rules)) as up:
        assert served_by(up, LONG) == "short"
        listed = httpx.get(f"{up.url}/v1/pools", headers=ADMIN, timeout=30).json()
        assert [one["canary"] for one in listed["pools"]] == [{"base": "short", "share": 0.0}, None]
    assert verified(log)["decisions"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pool-workers", "a=1", "--workers", "2"), "--workers cannot be combined with --pool-workers"),
        (("--pool-workers", "a=1", "--pool-workers", "a=2"), "--pool-workers a=2: the name a appears twice"),
        (("--pool-workers", "a"), "--pool-workers a: expected NAME=COUNT, a pool and its number of workers from 1"),
        (("--pool-workers", "a=0"), "--pool-workers a=0: expected NAME=COUNT, a pool and its number of workers from 1"),
        (("--pool-workers", "a b=1"), "--pool-workers: the pool name 'a b' cannot be used: it is part of Kafka topics"),
        (
            ("--pool-workers", "a=1", "--pool-routing", "RULES"),
            "--pool-routing RULES: unknown pool 'short'; pools are: a",
        ),
        (("--model-name", "m", "--pool-routing", "RULES"), "--pool-routing: RULES: unknown model 'm'"),
        (("--pool-routing", "none.toml"), "--pool-routing: none.toml: No such file or directory"),
        (
            ("--pool-workers", "a=1000", "--dp-size", "8"),
            "1000 workers with --dp-size 8 are 8000 ranks; the maximum is 4096",
        ),
    ],
)
def test_contradictory_pools_are_rejected_in_one_line(options: tuple[str, ...], message: str, rules: Path) -> None:
    run = forebay("up", *(option.replace("RULES", str(rules)) for option in options))
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1)
    assert run.stderr.startswith(f"forebay: {message.replace('RULES', str(rules))}")
