"""`forebay up` in a separate process: requests, kill -9, restart, shutdown, tiers and explanations."""

import asyncio
import json
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.events.request_ids import log_id_of
from forebay.processes import embedded
from forebay.transport.sqlite.log import LogUnusable
from tests import dashboard
from tests.benchmarks.recordings import Shape, write_recording
from tests.cli.in_process import error_of, forebay
from tests.cli.up import ADMIN, LONG_PREFIX, PATIENCE_S, Up, running, verified
from tests.harness.local import free_ports

pytestmark = pytest.mark.timeout(180)


def complete(client: openai.OpenAI, text: str) -> tuple[str, int]:
    """Complete a prompt with a long prefix. Return the worker and the number of cached prompt tokens."""
    answer = client.chat.completions.create(
        model="forebay-default", max_tokens=4, messages=[{"role": "user", "content": LONG_PREFIX + text}]
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.model_extra is not None
    return answer.model_extra["forebay"]["worker"], answer.usage.prompt_tokens_details.cached_tokens or 0


def test_the_openai_client_streams_and_reuses_its_prefix(tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    with running("--log", str(log)) as up:
        client = up.client()
        stream = client.chat.completions.create(
            model="forebay-default",
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            messages=[{"role": "user", "content": LONG_PREFIX + "one"}],
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert len(text.split()) >= 4
        ends = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
        assert [end.choices[0].finish_reason for end in ends] == ["length"]
        assert ends[0].model_extra is not None
        first = ends[0].model_extra["forebay"]["worker"]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        second, cached = complete(client, "two")
        assert second == first
        assert cached > 500
        assert "sqlite" not in up.url
        tail = forebay("topics", "tail", log, "decisions", "-n", "1")
        assert json.loads(tail.stdout)["event"]["type"] == "request.routed"
        assert up.end(signal.SIGINT) == 0
    verified(log)
    listed = forebay("topics", "list", log).stdout
    assert "requests/0	2" in listed.splitlines()


def test_a_custom_policy_decides_and_its_decisions_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    log = tmp_path / "log.db"
    decide = "    def decide(self, world, request):\n        return len(world.candidates) - 1\n"
    (here / "mine.py").write_text(f"class Last:\n{decide}")
    monkeypatch.chdir(here)
    with running("--log", str(log), "--router-mode", "mine.Last") as up:
        assert {complete(up.client(), f"{number}")[0] for number in range(3)} == {"mock-3"}
        assert up.end(signal.SIGKILL) == -signal.SIGKILL
    assert "pass --allow-policy mine.Last" in error_of(
        "up", "--log", str(log), "--router-mode", "round-robin", "--port", str(free_ports(1))
    )
    with running("--log", str(log), "--router-mode", "round-robin", "--allow-policy", "mine.Last") as up:
        assert len({complete(up.client(), f"{number}")[0] for number in range(4)}) == 4
        assert up.end(signal.SIGTERM) == 0
    allowed = ("verify", str(log), "--allow-policy", "mine.Last")
    assert json.loads(forebay(*allowed, "--json").stdout)["verified"] == 7
    (here / "mine.py").write_text(f"class Last:\n{decide.replace('len(world.candidates) - 1', '0')}")
    changed = forebay(*allowed, "--json")
    assert (changed.returncode, json.loads(changed.stdout)["divergence"] is None) == (1, False)
    monkeypatch.chdir(elsewhere)
    assert "the policy mine.Last cannot be imported" in error_of(*allowed)


def test_flags_set_labels_adapters_ranks_and_hints(tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    flags = ["--dp-size", "2", "--taint", "fast", "--taint", "mock-1:zone-b", "--lora", "legal", "--routing-hints"]

    def routed(client: openai.OpenAI, constraints: dict[str, object], model: str = "forebay-default") -> str:
        answer = client.chat.completions.create(
            model=model,
            max_tokens=4,
            messages=[{"role": "user", "content": LONG_PREFIX}],
            extra_body={"nvext": constraints},
        )
        assert answer.model_extra is not None
        return str(answer.model_extra["forebay"]["worker"])

    pinned: dict[str, object] = {"backend_instance_id": "mock-2", "dp_rank": 1}
    with running("--log", str(log), *flags, "--admin-api") as up, up.client() as client:
        models = [model.id for model in client.models.list().data]
        assert models == ["forebay-default", "legal"]
        assert routed(client, {"routing_constraints": {"required_taints": ["fast", "zone-b"]}}) == "mock-1"
        assert routed(client, {"routing_constraints": {"required_taints": ["zone-b"]}}, "legal") == "mock-1"
        assert routed(client, pinned) == "mock-2"
        with pytest.raises(openai.APIStatusError, match="zone-c"):
            routed(client, {"routing_constraints": {"required_taints": ["zone-c"]}})
        assert httpx.get(f"{up.url}/busy_threshold", headers=ADMIN).status_code == httpx.codes.OK
        assert up.end(signal.SIGTERM) == 0
    # The cache of the second rank also survives the restart.
    with running("--log", str(log), *flags) as up, up.client() as client:
        assert routed(client, pinned) == "mock-2"
        tail = forebay("topics", "tail", log, "decisions", "-n", "1")
        assert json.loads(tail.stdout)["event"]["terms"]["device_overlap"] > 0
        assert httpx.get(f"{up.url}/busy_threshold", headers=ADMIN).status_code == httpx.codes.NOT_FOUND
        assert up.end(signal.SIGTERM) == 0
    with running("--log", str(log), "--no-kv-events") as up:
        assert {complete(up.client(), "again")[0] for _ in range(3)} <= {"mock-0", "mock-1", "mock-2", "mock-3"}
    verified(log)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--taint", "mock-9:zone-a"], "unknown worker 'mock-9'; workers are: mock-0 to mock-3"),
        (["--lora", ""], "--lora '': a name has 1 to 256 characters, got 0"),
        (["--lora", "forebay-default"], "it is the name of the base model"),
        (["--router-temperature", "nan"], "--router-temperature must be a number"),
        (["--model", "/nowhere"], "--model /nowhere: no such directory /nowhere; expected a directory, or ORG/NAME"),
        (["--log-max-size", "10"], "--log-max-size 10: not a size; expected a number with kB, MB, GB or TB"),
        (["--speedup", "0"], "--speedup must be a positive number"),
        (
            ["--workers", "1024", "--dp-size", "5"],
            "--workers 1024 with --dp-size 5 are 5120 ranks; the maximum is 4096",
        ),
    ],
)
def test_a_failed_start_gives_the_reason_in_one_line(options: list[str], message: str) -> None:
    assert message in error_of("up", "--port", free_ports(1), *options)


def test_a_port_in_use_and_a_locked_or_foreign_log_are_rejected(tmp_path: Path) -> None:
    log, foreign = tmp_path / "log.db", tmp_path / "foreign.db"
    foreign.write_text("this is no log")
    with running("--log", str(log)) as up:
        assert "choose another --port" in error_of("up", "--port", str(up.port))
        assert str(up.process.pid) in error_of("up", "--port", free_ports(1), "--log", log)
    assert "foreign.db" in error_of("verify", foreign)
    assert forebay("up", "--port", free_ports(1), "--log", foreign).returncode == 2


@pytest.mark.parametrize("change", ['DELETE FROM requests WHERE "offset" > 40', "UPDATE snapshots SET checksum = 5"])
def test_a_damaged_log_is_rejected_in_one_line_and_not_changed(tmp_path: Path, change: str) -> None:
    log = tmp_path / "log.db"
    asyncio.run(write_recording(log, Shape(workers=1, decisions=60, cached_blocks=32, snapshot_every=20)))
    with closing(sqlite3.connect(log)) as db, db:
        db.execute(change)
    damaged = log.read_bytes()
    error = error_of("up", "--port", free_ports(1), "--log", log)
    assert "restore a copy" in error
    assert f"forebay verify {log}" in error
    assert log.read_bytes() == damaged


def test_a_signal_ends_a_slow_start(tmp_path: Path) -> None:
    log = tmp_path / "run.db"
    up = Up("--workers", "1024", "--log", str(log))
    while not log.exists():
        assert up.process.poll() is None, up.process.communicate()[0]
        time.sleep(0.005)
    up.process.send_signal(signal.SIGTERM)
    output = up.process.communicate(timeout=PATIENCE_S)[0]
    assert (up.process.returncode, output) == (0, "")


@pytest.mark.parametrize(("options", "sync"), [((), "normal"), (("--log-sync", "full"), "full")])
def test_log_sync_reaches_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], sync: str
) -> None:
    opened: list[str] = []

    async def refuse(*_: object, sync: str) -> None:
        opened.append(sync)
        raise LogUnusable("opened")

    monkeypatch.setattr(embedded, "open_checked", refuse)
    path = str(tmp_path / "log.db")
    assert error_of("up", "--port", free_ports(1), "--log", path, *options) == "opened"
    assert opened == [sync]


SLOW = ("--speedup", "0.02")  # a response of 2,000 tokens takes minutes
BODY = {"model": "forebay-default", "prompt": "hi", "max_tokens": 2_000}
IN_FLIGHT = "forebay: shutting down: waiting up to {:g} s for 2 requests in flight; press Ctrl-C again"


def stream_of(up: Up, started: threading.Event) -> list[str]:
    """Return the data of a stream until its end."""
    body = {**BODY, "stream": True}
    with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        found = []
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(line.removeprefix("data: "))
                started.set()
    return found


def in_flight(up: Up, clients: ThreadPoolExecutor) -> tuple["Future[list[str]]", "Future[httpx.Response]"]:
    """Start a stream and a whole response, and wait until both have their first token."""
    started = threading.Event()
    streamed = clients.submit(stream_of, up, started)
    assert started.wait(PATIENCE_S)
    whole = clients.submit(httpx.post, f"{up.url}/v1/completions", json=BODY, timeout=PATIENCE_S)
    metric = 'dynamo_frontend_time_to_first_token_seconds_count{model="forebay-default"} 2.0'
    while metric not in httpx.get(f"{up.url}/metrics").text:
        assert not whole.done()
    return streamed, whole


def stopped(up: Up, signals: int) -> str:
    """Send SIGINT as often as given, and return the output until the end of the process."""
    assert up.process.stdout is not None
    output = ""
    for number in range(signals):
        up.process.send_signal(signal.SIGINT)
        while not number and "shutting down" not in output:
            line = up.process.stdout.readline()
            assert line, output
            output += line
    output += up.process.communicate(timeout=PATIENCE_S)[0]
    assert up.process.returncode == 0, output
    return output


@pytest.mark.parametrize(
    ("drain_s", "signals"),
    [pytest.param(0.5, 1, id="drained"), pytest.param(3_600.0, 2, id="second-signal", marks=pytest.mark.slow)],
)
def test_ctrl_c_with_requests_in_flight_and_a_restart(tmp_path: Path, drain_s: float, signals: int) -> None:
    options = ("--log", str(tmp_path / "log.db"), "--drain-s", str(drain_s), *SLOW)
    with running(*options) as up, ThreadPoolExecutor(2) as clients:
        streamed, whole = in_flight(up, clients)
        output = stopped(up, signals)
        assert json.loads(streamed.result()[-1])["error"]["code"] == "shutting_down"
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "shutting_down"
    assert IN_FLIGHT.format(drain_s) in output
    assert ("Traceback" in output, " ERROR " in output) == (False, False)
    access = [line for line in output.splitlines() if "error=shutting_down" in line]
    assert [" worker=mock-" in line for line in access] == [True, True], output
    with running(*options) as up:
        up.process.send_signal(signal.SIGTERM)
        output = up.process.communicate(timeout=PATIENCE_S)[0]
    assert up.process.returncode == 0
    assert [line for line in output.splitlines() if "WARNING" in line or "is lost" in line] == []


def until_ended(pid: int) -> None:
    """Wait until a process has ended, whether or not its parent has reaped it."""
    ends_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_s:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
        if not state.stdout.strip() or state.stdout.startswith("Z"):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_response_id_is_explained_and_no_process_is_left(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log.db"
    with running("--log", str(log)) as up, up.client() as client:
        answers = [
            client.chat.completions.create(
                model="forebay-default", max_tokens=4, messages=[{"role": "user", "content": LONG_PREFIX + text}]
            )
            for text in ("one", "two")
        ]
        assert up.children() == []
        report = (
            httpx.get(f"{up.url}/v1/requests/{answers[1].id}/explain", timeout=PATIENCE_S).raise_for_status().json()
        )
        assert (report["request_id"], report["state"], report["ending"]["output_tokens"]) == (
            log_id_of(answers[1].id),
            "finished",
            4,
        )
        (routing,) = report["routings"]
        winner = routing["candidates"][routing["winner"]]
        assert answers[1].model_extra is not None
        assert winner["seen"]["worker_id"] == answers[1].model_extra["forebay"]["worker"]
        assert routing["reason"] == "lowest_cost"
        usage = answers[1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert report["first_token"]["cached_tokens"] == usage.prompt_tokens_details.cached_tokens
        for path in ("/v1/completions", "/v1/completions", "/v1/route"):
            named = httpx.post(
                f"{up.url}{path}",
                json={"model": "forebay-default", "prompt": "where"},
                headers={"x-request-id": "mine"},
                timeout=PATIENCE_S,
            )
            assert (named.status_code, named.headers["x-request-id"]) == (200, "mine")
        query = httpx.get(f"{up.url}/v1/requests/mine/explain", timeout=PATIENCE_S).json()
        assert (query["kind"], query["state"]) == ("query", "answered")
        assert httpx.get(f"{up.url}/v1/requests/nobody/explain", timeout=PATIENCE_S).status_code == 404
        (worker,) = up.children()
        assert up.end(number) == (0 if number == signal.SIGINT else -number)
        until_ended(worker)
    shown = forebay("explain", log, answers[1].id)
    assert (shown.returncode, f"request {log_id_of(answers[1].id)}: finished" in shown.stdout) == (0, True)
    assert "2 other requests have this ID too: mine~" in forebay("explain", log, "mine").stdout


WORKERS, PREFIXES = 8, 40
BLOCK = 64  # tokens, the default of workers
BLOCKS = 6  # per prompt
TOKEN_IDS = 1_000  # valid in every vocabulary
IDLE = 'forebay_owner_requests_in_flight{model="forebay-default"} 0.0'


def prompt(number: int) -> list[int]:
    """Return a prompt whose first block is unique to `number`."""
    return [(number * 7_919 + place * (number % 13 + 1)) % TOKEN_IDS for place in range(BLOCKS * BLOCK + 1)]


async def answered(client: httpx.AsyncClient, number: int) -> tuple[str, int]:
    """Complete a prompt. Return the worker and the number of cached prompt tokens."""
    body = {"model": "forebay-default", "prompt": prompt(number), "max_tokens": 1}
    answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    return answer["forebay"]["worker"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def one_by_one(up: Up) -> list[tuple[str, int]]:
    """Complete all prompts one by one, so that load does not affect routing."""
    found = []
    async with httpx.AsyncClient(base_url=up.url, timeout=PATIENCE_S) as client:
        for number in range(PREFIXES):
            found.append(await answered(client, number))
            await idle(client)
    return found


async def idle(client: httpx.AsyncClient) -> None:
    """Wait until the owner has applied the end of every request."""
    async with asyncio.timeout(PATIENCE_S):
        while IDLE not in (await client.get("/metrics")).text:  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.002)


async def spread(up: Up) -> list[tuple[str, int]]:
    """Complete all prompts concurrently, so that load spreads them over the workers."""
    async with httpx.AsyncClient(base_url=up.url, timeout=PATIENCE_S) as client:
        found = await asyncio.gather(*(answered(client, number) for number in range(PREFIXES)))
        await idle(client)
    return found


def test_all_prefixes_are_found_after_kill_9_and_every_decision_is_verified(tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    options = ("--log", str(log), "--workers", str(WORKERS))
    with running(*options) as up:
        cold = asyncio.run(spread(up))
        assert [cached for _, cached in cold] == [0] * PREFIXES
        homes = [worker for worker, _ in cold]
        assert set(homes) == {f"mock-{number}" for number in range(WORKERS)}
        assert up.end(signal.SIGKILL) == -signal.SIGKILL
    with running(*options) as up:
        warm = asyncio.run(one_by_one(up))
        assert warm == [(home, BLOCKS * BLOCK) for home in homes]
        assert up.end(signal.SIGKILL) == -signal.SIGKILL
    report = verified(log)
    assert (report["decisions"], report["claims"]) == (2 * PREFIXES, 2)


# A block of 16 tokens takes 16 ms to compute, so that loading it is faster.
PROFILE = 'kind = "linear"\ncosts_us = { step = 500, prefill_token = 1000, decode_step = 2000 }\n'
SIZES = ("--block-size", "16", "--kv-blocks", "10", "--speedup", "1", "--workers", "2")
PROMPTS = [[number * 31 + place * 7 for place in range(120)] for number in range(6)]


@contextmanager
def tiered(folder: Path, *options: str) -> Iterator[Up]:
    """Run two workers with disks and a shared directory in `folder`."""
    profile = folder / "engine.toml"
    profile.write_text(PROFILE)
    tiers = (
        "--kv-tier",
        f"disk:path={folder / 'disks'},filter=off",
        "--kv-tier",
        f"store:path={folder / 'store'}",
    )
    with running("--engine-profile", str(profile), *SIZES, *tiers, *options) as up:
        yield up


def texts(up: Up) -> list[str]:
    found = []
    for prompt in PROMPTS:
        body = {"model": "forebay-default", "prompt": prompt, "max_tokens": 6, "temperature": 0}
        response = httpx.post(f"{up.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == httpx.codes.OK, response.text
        found.append(response.json()["choices"][0]["text"])
    return found


def samples(up: Up) -> list[Any]:
    text = httpx.get(f"{up.url}/metrics", timeout=10).text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


@pytest.mark.slow
def test_tiers_of_up_survive_a_restart(tmp_path: Path) -> None:
    with running(*SIZES) as up:
        expected = texts(up)
    log = tmp_path / "log.db"
    with tiered(tmp_path, "--log", str(log), "--kv-tier", "host:size=1MB") as up:
        assert texts(up) == expected
        assert texts(up) == expected
        assert up.metric("kvbm_matched_tokens{") > 0, "device memory has room for one prompt per worker"
        assert up.metric("kvbm_offload_blocks_d2h{") > 0
        assert up.metric("kvbm_offload_blocks_h2d{") > 0
        assert up.metric("kvbm_offload_blocks_h2o{") > 0
        shown = {sample.name: {*sample.labels} for sample in samples(up)}
        queries = dashboard.queries()[dashboard.TIERS]
        assert queries
        for query in queries:
            for name in dashboard.metrics(query) - {"forebay_tier_misses_total"}:  # there are none
                assert name in shown, query
                assert "worker_id" in shown[name]
        up.end(signal.SIGKILL)
    assert sorted(folder.name for folder in (tmp_path / "disks").iterdir()) == ["mock-0", "mock-1"]
    with tiered(tmp_path, "--log", str(log)) as up:
        assert texts(up) == expected
        assert up.metric("kvbm_onboard_blocks_d2d{") + up.metric("kvbm_onboard_blocks_o2d{") > 0
        assert up.end(signal.SIGTERM) == 0
    verified(log)
