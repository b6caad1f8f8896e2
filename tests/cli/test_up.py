"""`forebay up` in a separate process: the OpenAI client, kill -9 and restart."""

import asyncio
import json
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import httpx
import openai
import pytest

from forebay.cli.processes import embedded
from forebay.transport.sqlite.log import LogUnusable
from tests.benchmarks.recordings import Shape, write_recording
from tests.cli import in_process
from tests.cli.up import ADMIN, LONG_PREFIX, PATIENCE_S, Up, forebay, running, verified
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


def test_embeddings_and_probabilities_of_a_mock_engine() -> None:
    with running("--workers", "2") as up, up.client() as client:
        texts = [f"text {at % 5}" for at in range(40)]
        given = [one.embedding for one in client.embeddings.create(model="forebay-default", input=texts).data]
        assert given == given[:5] * 8
        assert len({tuple(one) for one in given}) == 5
        answer = client.chat.completions.create(
            model="forebay-default",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=5,
            logprobs=True,
            top_logprobs=2,
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert "".join(one.token for one in logprobs.content) == answer.choices[0].message.content
        assert [len(one.top_logprobs) for one in logprobs.content] == [2] * 5


def test_an_unknown_tool_call_parser_is_reported() -> None:
    up = Up("--tool-call-parser", "hermez")
    output = up.process.communicate(timeout=PATIENCE_S)[0]
    assert up.process.returncode == 2
    assert "--tool-call-parser: unknown parser 'hermez'; did you mean hermes?" in output


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
        tail = forebay("topics", "tail", str(log), "decisions", "-n", "1")
        assert json.loads(tail.stdout)["event"]["type"] == "request.routed"
        assert up.end(signal.SIGINT) == 0
    verified(log)
    listed = forebay("topics", "list", str(log)).stdout
    assert "requests/0	2" in listed.splitlines()


def test_after_kill_9_the_journal_continues_and_prefixes_are_reused(tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    with running("--log", str(log)) as up:
        client = up.client()
        homes = [complete(client, f"{number}")[0] for number in range(6)]
        assert len(set(homes)) == 1
        assert up.end(signal.SIGKILL) == -signal.SIGKILL
    before = verified(log)
    with running("--log", str(log)) as up:
        worker, cached = complete(up.client(), "after")
        assert worker == homes[0]
        assert cached > 500
        assert up.end(signal.SIGTERM) == 0
    after = verified(log)
    assert int(str(after["decisions"])) > int(str(before["decisions"]))
    assert after["claims"] == 2


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
    refused = forebay("up", "--log", str(log), "--router-mode", "round-robin", "--port", str(free_ports(1)))
    assert (refused.returncode, "pass --allow-policy mine.Last" in refused.stderr) == (2, True)
    with running("--log", str(log), "--router-mode", "round-robin", "--allow-policy", "mine.Last") as up:
        assert len({complete(up.client(), f"{number}")[0] for number in range(4)}) == 4
        assert up.end(signal.SIGTERM) == 0
    allowed = ("verify", str(log), "--allow-policy", "mine.Last")
    assert json.loads(forebay(*allowed, "--json").stdout)["verified"] == 7
    (here / "mine.py").write_text(f"class Last:\n{decide.replace('len(world.candidates) - 1', '0')}")
    changed = forebay(*allowed, "--json")
    assert (changed.returncode, json.loads(changed.stdout)["divergence"] is None) == (1, False)
    monkeypatch.chdir(elsewhere)
    refused = forebay(*allowed)
    assert (refused.returncode, "the policy mine.Last cannot be imported" in refused.stderr) == (2, True)


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
        tail = forebay("topics", "tail", str(log), "decisions", "-n", "1")
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
        (["--taint", "mock-1:"], "the label is empty"),
        (["--taint", "a", "--taint", "a"], "--taint a: the name appears twice"),
        (["--lora", ""], "--lora '': a name has 1 to 256 characters, got 0"),
        (["--lora", "forebay-default"], "it is the name of the base model"),
        (["--router-temperature", "nan"], "--router-temperature must be a number"),
        (["--model", "/nowhere"], "--model /nowhere: no such directory /nowhere; expected a directory, or ORG/NAME"),
        (["--log", "/nowhere/log.db"], "nowhere"),
        (["--log-max-size", "10"], "--log-max-size 10: not a size; expected a number with kB, MB, GB or TB"),
        (["--log-max-size", "9MB"], "--log-max-size 9MB: too small; the minimum is 10MB"),
        (["--log-max-age", "0d"], "--log-max-age 0d"),
        (["--speedup", "0"], "--speedup must be a positive number"),
        (
            ["--workers", "1024", "--dp-size", "5"],
            "--workers 1024 with --dp-size 5 are 5120 ranks; the maximum is 4096",
        ),
    ],
)
def test_a_failed_start_gives_the_reason_in_one_line(options: list[str], message: str) -> None:
    run = forebay("up", "--port", str(free_ports(1)), *options)
    assert run.returncode == 2
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_a_port_in_use_and_a_locked_or_foreign_log_are_rejected(tmp_path: Path) -> None:
    log, foreign = tmp_path / "log.db", tmp_path / "foreign.db"
    foreign.write_text("this is no log")
    with running("--log", str(log)) as up:
        taken = forebay("up", "--port", str(up.port))
        assert (taken.returncode, "choose another --port" in taken.stderr) == (2, True)
        locked = forebay("up", "--port", str(free_ports(1)), "--log", str(log))
        assert (locked.returncode, str(up.process.pid) in locked.stderr) == (2, True)
    refused = forebay("verify", str(foreign))
    assert (refused.returncode, "foreign.db" in refused.stderr) == (2, True)
    assert forebay("up", "--port", str(free_ports(1)), "--log", str(foreign)).returncode == 2


@pytest.mark.parametrize("change", ['DELETE FROM requests WHERE "offset" > 40', "UPDATE snapshots SET checksum = 5"])
def test_a_damaged_log_is_rejected_in_one_line_and_not_changed(tmp_path: Path, change: str) -> None:
    log = tmp_path / "log.db"
    asyncio.run(write_recording(log, Shape(workers=1, decisions=60, cached_blocks=32, snapshot_every=20)))
    with closing(sqlite3.connect(log)) as db, db:
        db.execute(change)
    damaged = log.read_bytes()
    refused = forebay("up", "--port", str(free_ports(1)), "--log", str(log))
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "restore a copy" in refused.stderr
    assert f"forebay verify {log}" in refused.stderr
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
    run = in_process.forebay("up", "--port", str(free_ports(1)), "--log", path, *options)
    assert (run.returncode, run.stderr) == (2, "forebay: opened\n")
    assert opened == [sync]
