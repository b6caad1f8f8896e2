"""`forebay up` with prefill and decode workers: real KV bytes by NIXL, the answers that one kind of worker gives."""

import asyncio
import json
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.ingress.ingress import NO_PREFILL_WORKER
from tests import dashboard
from tests.cli.in_process import forebay
from tests.cli.up import ADMIN, Up, running, verified

pytestmark = pytest.mark.timeout(180)

APART = ("--prefill-workers", "2", "--decode-workers", "2", "--admin-api")
ALIKE = ("--block-size", "16", "--kv-blocks", "512", "--kv-checksum")
BODIES: list[dict[str, Any]] = [
    {"prompt": f"request {number}, " + "the log is the truth " * (5 * number), "max_tokens": 8 + number}
    for number in range(8)
]


def ask(up: Up, body: dict[str, Any]) -> dict[str, Any]:
    asked = {"model": "forebay-default", "temperature": 1.0, "seed": 7, **body}
    response = httpx.post(f"{up.url}/v1/completions", json=asked, timeout=60)
    assert response.status_code == httpx.codes.OK, response.text
    answer: dict[str, Any] = response.json()
    return answer


def all_asked(up: Up) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(BODIES)) as threads:
        return list(threads.map(lambda body: ask(up, body), BODIES))


def texts(answers: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["choices"][0]["text"], one["choices"][0]["finish_reason"]) for one in answers]


def metric(up: Up, start: str) -> float:
    lines = [line for line in httpx.get(f"{up.url}/metrics", timeout=10).text.splitlines() if line.startswith(start)]
    assert lines, f"there is no metric {start}"
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def unseen(up: Up) -> set[str]:
    """Queries of the dashboard's row that a scrape has no series for, by name and labels."""
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
def whole() -> list[tuple[str, str]]:
    """What workers that do all of a request answer."""
    with running("--workers", "2", "--block-size", "16", "--kv-blocks", "512") as up:
        return texts(all_asked(up))


def test_disagg_answers_are_those_of_workers_that_do_all_of_a_request(
    tmp_path: Path, whole: list[tuple[str, str]]
) -> None:
    log = tmp_path / "log.db"
    with running(*APART, *ALIKE, "--log", str(log)) as up:
        answers = all_asked(up)
        assert texts(answers) == whole
        assert {one["forebay"]["worker"].rstrip("01") for one in answers} == {"decode-"}
        assert metric(up, 'forebay_router_stages_total{model="forebay-default",stage="decode"}') == len(BODIES)
        assert metric(up, "forebay_router_prefills_total{") == len(BODIES)
        assert httpx.get(f"{up.url}/ready", timeout=10).json() == {"status": "ready", "kv_transport": "nixl"}
        assert metric(up, "forebay_kv_transfer_fetches_total{") == len(BODIES)
        assert metric(up, "forebay_kv_transfer_bytes_total{") > 0
        assert metric(up, "forebay_kv_transfer_corrupt_blocks_total{") == 0
        assert metric(up, "forebay_router_prefill_to_first_token_seconds_count{") == len(BODIES)
        assert metric(up, "forebay_router_kv_fetched_bytes_total{") == metric(up, "forebay_kv_transfer_bytes_total{")
        assert not unseen(up)
        assert set_to(up, policy="never")["policy"] == "never"
        assert texts(all_asked(up)) == whole
        assert metric(up, 'forebay_router_prefills_total{model="forebay-default",place="local",reason="never"}') == 8
        up.end(signal.SIGKILL)
    with running(*APART, *ALIKE, "--log", str(log)) as up:
        assert texts(all_asked(up)) == whole
        assert up.end(signal.SIGTERM) == 0
    report = verified(log)
    assert report["claims"] == 2


def last_chunk(up: Up, body: dict[str, Any]) -> dict[str, Any]:
    """Of a streamed answer: the one that says why it ended, and who gave it."""
    asked = {"model": "forebay-default", "stream": True, **body}
    response = httpx.post(f"{up.url}/v1/completions", json=asked, timeout=60)
    chunks = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")]
    last: dict[str, Any] = json.loads(chunks[-1])
    return last


def test_disagg_answers_name_who_computed_the_prompt_and_who_answered() -> None:
    body = {"prompt": "the log is the truth " * 40, "max_tokens": 4, "nvext": {"extra_fields": ["worker_id"]}}
    with running(*APART, *ALIKE) as up:
        for told in (ask(up, body), last_chunk(up, body)):
            named, served = told["nvext"]["worker_id"], told["forebay"]
            assert named["prefill_worker_id"].rstrip("01") == "prefill-"
            assert named["decode_worker_id"].rstrip("01") == "decode-"
            assert (named["prefill_dp_rank"], named["decode_dp_rank"]) == (0, 0)
            assert (served["worker"], served["prefill"]["worker"]) == (
                named["decode_worker_id"],
                named["prefill_worker_id"],
            )
            assert served["prefill"]["transferred_bytes"] > 0
            assert served["prefill"]["transfer_ms"] > 0
        set_to(up, policy="never")
        told = ask(up, body)
        assert told["nvext"]["worker_id"]["prefill_worker_id"] == told["forebay"]["worker"]
        assert "prefill" not in told["forebay"]


def test_disagg_by_the_plain_path_when_told_so(whole: list[tuple[str, str]]) -> None:
    with running(*APART, *ALIKE, "--kv-transport", "tcp") as up:
        assert texts(all_asked(up)) == whole
        ready = httpx.get(f"{up.url}/ready", timeout=10).json()
        assert ready == {"status": "ready", "kv_transport": "tcp (without NIXL)"}
        plain = 'forebay_kv_transport_info{plain="true",transport="tcp",worker_id='
        assert metric(up, plain) == 4


def test_disagg_without_prefill_workers_decode_workers_do_it_unless_that_is_enforced(
    whole: list[tuple[str, str]],
) -> None:
    with running("--prefill-workers", "0", "--decode-workers", "2", "--admin-api", *ALIKE[:4]) as up:
        assert texts(all_asked(up)) == whole
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


SEED = 8
LEFT_OVER = (
    'forebay_owner_requests{model="forebay-default",phase=',
    "forebay_kv_transfer_held_blocks{",
    "forebay_kv_transfer_in_flight{",
    "dynamo_frontend_worker_active_decode_blocks{",
    "dynamo_frontend_worker_active_prefill_tokens{",
)


async def ask_and_leave(up: Up, count: int) -> tuple[int, int]:
    """Streams of which some are hung up on at any time: how many were whole, and how many were not waited for."""
    chance = random.Random(SEED)
    print(f"{SEED=}")

    async def one(client: httpx.AsyncClient, body: dict[str, Any], patience_s: float | None) -> bool:
        try:
            async with asyncio.timeout(patience_s):
                response = await client.post(f"{up.url}/v1/completions", json={"model": "forebay-default", **body})
                assert response.text.endswith("data: [DONE]\n\n"), response.text
        except TimeoutError:
            return False
        return True

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        asked = []
        for number in range(count):
            token_ids = [(number * 7_919 + place) % 1_000 for place in range(chance.choice((20, 200, 900)))]
            body = {"prompt": token_ids, "max_tokens": chance.randint(1, 60), "ignore_eos": True, "stream": True}
            patience_s = chance.uniform(0.0, 0.4) if chance.random() < 0.4 else None
            asked.append(asyncio.create_task(one(client, body, patience_s)))
            await asyncio.sleep(0.005)
        whole = sum(await asyncio.gather(*asked))
    return whole, count - whole


def test_disagg_nothing_is_kept_for_clients_that_left() -> None:
    # The lease is longer than anybody waits here: what is given back was cancelled or fetched.
    small = ("--kv-blocks", "400", "--block-size", "16", "--kv-lease-s", "600", "--speedup", "2")
    with running(*APART, *small) as up:
        whole, left = asyncio.run(ask_and_leave(up, 150))
        assert whole > 50, "those that were waited for came"
        assert left > 20
        ends_s = time.monotonic() + 20.0
        while (over := {start: metric(up, start) for start in LEFT_OVER}) != dict.fromkeys(LEFT_OVER, 0.0):
            assert time.monotonic() < ends_s, over
            time.sleep(0.05)
        assert metric(up, "forebay_kv_transfer_fetches_total{") > 0
        assert metric(up, 'forebay_router_requests_aborted_total{model="forebay-default",reason="cancelled"}') > 0


def test_disagg_up_ends_every_engine_before_it_ends(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import threading\n"
        "from forebay.cli.app import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print('left:', [thread.name for thread in threading.enumerate() if 'nixl' in thread.name])\n"
    )
    up = Up("--prefill-workers", "4", "--decode-workers", "4", program=[sys.executable, str(program)])
    up.wait_ready()
    all_asked(up)
    up.process.send_signal(signal.SIGINT)
    said = up.process.communicate(timeout=60)[0]
    assert said.splitlines()[-1] == "left: []", said
    assert up.process.returncode == 0, said


def test_disagg_a_log_goes_on_with_the_other_kind_of_workers(tmp_path: Path, whole: list[tuple[str, str]]) -> None:
    log = tmp_path / "log.db"
    for fleet in (("--workers", "2"), APART, ("--workers", "1")):
        with running(*fleet, "--block-size", "16", "--log", str(log)) as up:
            assert texts(all_asked(up)) == whole
            assert up.end(signal.SIGTERM) == 0
    assert verified(log)["claims"] == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--prefill-workers", "1"), "--prefill-workers and --decode-workers require each other"),
        (("--decode-workers", "1"), "--prefill-workers and --decode-workers require each other"),
        ((*APART, "--workers", "1"), "--workers cannot be combined with --decode-workers"),
        ((*APART, "--dp-size", "1024", "--workers", "1"), "--workers cannot be combined"),
        (
            (*APART, "--dp-size", "1024", "--decode-workers", "8"),
            "10 workers with --dp-size 1024 are 10240 ranks; maximum",
        ),
        (("--workers", "2", "--enforce-disagg"), "--enforce-disagg requires --prefill-workers and --decode-workers"),
        (("--router-conditional-disagg",), "--router-conditional-disagg requires --prefill-workers and --decode"),
        (("--workers", "2", "--kv-transport", "tcp"), "--kv-transport requires --prefill-workers and --decode-workers"),
        (("--kv-checksum",), "--kv-checksum requires --prefill-workers and --decode-workers"),
        (
            ("--role", "prefill"),
            "--role prefill: `forebay up` has no other role than aggregated; use --prefill-workers",
        ),
        (
            (*APART, "--taint", "decode-2:x"),
            "unknown worker decode-2; workers are prefill-0 to prefill-1 and decode-0 to decode-1",
        ),
    ],
)
def test_disagg_a_fleet_that_makes_no_sense_is_refused(options: tuple[str, ...], says: str) -> None:
    run = forebay("up", *options)
    assert run.returncode == 2
    assert says in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_disagg_of_a_policy_file_is_refused_where_it_would_do_nothing(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("disagg:\n  policy: never\n")
    run = forebay("up", "--workers", "2", "--router-policy-config", str(tmp_path / "policy.yaml"))
    assert (run.returncode, run.stderr) == (
        2,
        "forebay: field disagg of the --router-policy-config file requires --prefill-workers and --decode-workers\n",
    )


def test_disagg_up_says_who_computes_prompts(tmp_path: Path) -> None:
    limits = json.dumps({"policy": "classic"})
    conditional = ("--router-conditional-disagg", "--router-conditional-disagg-config", limits, "--enforce-disagg")
    told = told_by(*APART, *conditional, "--log", str(tmp_path / "log.db"))
    assert "mock workers: 2 prefill, 2 decode" in told
    assert (
        "by prefill workers if the policy classic requires it, KV transfer by nixl; requests that they cannot compute "
        "are rejected" in told
    )


def told_by(*options: str, then: dict[str, Any] | None = None) -> str:
    """What `forebay up` says when it is there; `then` is what an operator sets afterwards."""
    up = Up(*options)
    up.wait_ready()
    if then is not None:
        set_to(up, **then)
    said = up.banner()
    assert up.end(signal.SIGTERM) == 0
    return said


def test_disagg_up_says_who_computes_prompts_when_it_is_not_as_set(tmp_path: Path) -> None:
    log = ("--log", str(tmp_path / "log.db"))
    nobody = ("--prefill-workers", "0", "--decode-workers", "1", *log)
    limits = json.dumps({"policy": "classic"})
    conditional = ("--router-conditional-disagg", "--router-conditional-disagg-config", limits, "--enforce-disagg")
    assert "by decode workers, because there are no prefill workers\n" in told_by(*nobody)
    told = told_by(*nobody, *conditional)
    assert "by decode workers if the policy classic allows it; other requests are rejected\n" in told
    assert "computed by prefill workers, KV transfer by nixl\n" in told_by(*APART, *log, then={"policy": "never"})
    assert "computed by decode workers (set by `forebay control" in told_by(*APART, *log)
