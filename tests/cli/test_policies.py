"""Policies named by `--allow-policy`, alternatives of `--set`, and `forebay shadow` with an alternative."""

import asyncio
import json
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from forebay.cli.policies.allowed import require_policy
from forebay.cli.policies.alternative import Alternative, AlternativeOptions
from forebay.cli.policies.router_options import RouterOptions
from forebay.events.codec import encode
from forebay.events.control import PoolConfigured, QueueClass, QueueConfig, RouterConfig
from forebay.events.decisions import RequestRouted
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.shadow import DecisionShadowed, ShadowEvent, ShadowStarted
from forebay.events.topics import DECISIONS
from forebay.replay.policies import ERROR_CHARS_MAX
from forebay.runtime.errors import ConfigError
from forebay.transport.sqlite.log import SqliteLog
from infra.kafka.kafka import HOST
from tests.cli.in_process import error_of, forebay
from tests.cli.logs import written
from tests.cli.up import forebay as process
from tests.core.worlds import PROMPTS, request
from tests.harness import fork_server
from tests.harness.cluster import FOREBAY
from tests.harness.local import free_ports
from tests.harness.processes import Processes
from tests.live.shared import valid
from tests.replay.mutations import find, replace_record
from tests.replay.recorder import Recorder
from tests.system import System, submitted, until, until_ended

MODE = "marked.Last"
SOURCE = """
from pathlib import Path
Path("imported").touch()

class Last:
    def decide(self, world, request):
        return len(world.candidates) - 1
"""
READING = [
    ("verify", "LOG"),
    ("explain", "LOG", "r0"),
    ("replay", "at", "LOG"),
    ("replay", "diff", "LOG", "--policy", "kv"),
    ("record", "LOG", "out.rec"),
    ("record", "LOG", "out.rec", "--anonymize"),
    ("index", "LOG"),
    ("simulate", "--against", "LOG"),
    ("fit", "LOG"),
    ("shadow", "LOG", "--policy", "kv"),
]


class Last:
    """Policy of the recorded owner: selects the last candidate."""

    def decide(self, world: Any, request: Any) -> int:
        return len(world.candidates) - 1


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a log whose owner ran a custom policy, in a directory with a module of the same name."""
    (tmp_path / "marked.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(Recorder({MODE: Last}))
    return "log.db"


def write(made: Recorder) -> None:
    made.fleet("a", "b", mode=MODE)
    for number in range(3):
        made("requests", request(f"r{number}", PROMPTS[number]))
        if made.world.requests.get(f"r{number}") is not None:
            made.progress(f"r{number}", FirstTokenEmitted)
            made.progress(f"r{number}", RequestFinished, finish_reason="stop", output_tokens=2)

    written(made, Path("log.db"))


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_a_policy_named_only_by_the_log_is_not_imported(log: str, command: tuple[str, ...]) -> None:
    error = error_of(*(log if argument == "LOG" else argument for argument in command))
    assert f"policy {MODE}" in error
    assert f"pass --allow-policy {MODE}" in error
    assert not Path("imported").exists()
    assert not Path("out.rec").exists() or "--anonymize" not in command


@pytest.mark.parametrize("command", READING[:7], ids=" ".join)
def test_an_allowed_policy_is_run(log: str, command: tuple[str, ...]) -> None:
    arguments = [log if argument == "LOG" else argument for argument in command]
    run = forebay(*arguments, "--allow-policy", MODE)
    assert (run.returncode, run.stderr) == (0, "")
    assert Path("imported").exists()


def test_rejections_by_an_owner_without_the_policy_need_no_option(log: str) -> None:
    Path(log).unlink()
    write(Recorder())
    report = json.loads(forebay("verify", log, "--json").stdout)
    assert (report["decisions"], report["verified"]) == (3, 3)
    assert f"the policy {MODE} is not allowed on this router" in forebay("explain", log, "r0").stdout
    allowed = json.loads(forebay("verify", log, "--allow-policy", MODE, "--json").stdout)
    assert allowed["verified"] == 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("kv", "--allow-policy kv: the policy is built in and always allowed"),
        ("nowhere.Policy", "--allow-policy nowhere.Policy: the policy nowhere.Policy cannot be imported"),
        ("fastest", "--allow-policy fastest: unknown router mode 'fastest'"),
    ],
)
def test_an_unusable_policy_is_rejected(log: str, path: str, message: str) -> None:
    assert message in error_of("verify", log, "--allow-policy", path)


CUSTOM = """
import queue

queue.Queue  # of the standard library, although the folder has a module of this name

class Policy:
    def decide(self, world, request):
        return 0
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder from which policies are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "custom", raising=False)
    (tmp_path / "custom.py").write_text(CUSTOM)
    (tmp_path / "queue.py").write_text("raise RuntimeError('the wrong one')")
    (tmp_path / "broken.py").write_text("class Policy")
    (tmp_path / "leaving.py").write_text("raise SystemExit('x' * 10_000)")
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("mode", ["kv", "power-of-two", "custom.Policy"])
def test_a_built_in_mode_and_a_class_of_the_folder_are_accepted(mode: str) -> None:
    require_policy(mode)
    assert RouterOptions(router_mode=mode).config().mode == mode


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("custom.Other", "custom.Other is not a class with a method `decide(world, request)`"),
        ("custom.queue", "custom.queue is not a class"),
        ("broken.Policy", "cannot be imported: SyntaxError"),
        ("leaving.Policy", "cannot be imported: SystemExit('xxx"),
        (f"mine.{'P' * 300}", "has 305 characters; maximum 256"),
    ],
)
def test_an_unusable_class_is_rejected_before_the_command_starts(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        require_policy(path)
    assert message in str(refusal.value)
    assert len(str(refusal.value)) <= ERROR_CHARS_MAX
    for command in (["up"], ["router", "--kafka", "127.0.0.1:1"]):
        assert error_of(*command, "--router-mode", path) == f"--router-mode: {refusal.value}"


POOL = PoolConfigured(pool="default", model="m", block_size=16, router=RouterConfig(temperature=0.5))


def error_line(*sets: str, policy: str | None = None, policy_config: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        AlternativeOptions(list(sets), policy, policy_config).alternative()
    (line,) = str(caught.value).splitlines()
    return line


def parse_sets(*sets: str) -> Alternative:
    return AlternativeOptions(list(sets)).alternative()


def test_set_changes_only_the_named_settings() -> None:
    changed = parse_sets(
        "prefill_load_scale=2",
        "use_kv_events=false",
        "queue.threshold=1.5",
        "busy.active_prefill_tokens_threshold=100",
        "attempts_max=5",
    ).of(POOL)
    router = msgspec.structs.replace(
        POOL.router,
        prefill_load_scale=2.0,
        use_kv_events=False,
        queue=QueueConfig(threshold=1.5),
        busy=msgspec.structs.replace(POOL.router.busy, active_prefill_tokens_threshold=100),
    )
    assert changed == msgspec.structs.replace(POOL, router=router, attempts_max=5)


def test_lists_and_null_are_json() -> None:
    one = parse_sets('queue.classes=[{"name": "default", "quantum": 5}]', "queue.threshold=null")
    assert one.of(POOL).router.queue == QueueConfig(classes=(QueueClass(quantum=5),))


def test_policy_sets_the_mode() -> None:
    assert AlternativeOptions(policy="round-robin").alternative().of(POOL).router == RouterConfig(
        mode="round-robin", temperature=0.5
    )


def test_a_policy_file_replaces_recorded_settings_and_flags_override_it(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("mode: least-loaded\nttl_s: 7\n")
    one = AlternativeOptions(["ttl_s=9"], policy_config=file).alternative()
    assert one.of(POOL).router == RouterConfig(mode="least-loaded", ttl_s=9.0)
    assert str(one) == f"--policy-config {file} --set ttl_s=9"


def test_a_setting_can_name_a_pool() -> None:
    one = parse_sets("a:b:temperature=0.1")
    other = msgspec.structs.replace(POOL, pool="a:b")
    assert one.of(POOL) == POOL
    assert one.of(other).router.temperature == 0.1
    one.require_pools([POOL, other])
    with pytest.raises(ConfigError, match="unknown pool 'a:b'; pools are: default"):
        one.require_pools([POOL])


def test_settings_without_effect_are_reported() -> None:
    one = parse_sets("temperature=0.5", "ttl_s=3")
    assert one.idle([POOL]) == ["--set temperature=0.5"]
    assert one.idle([POOL, msgspec.structs.replace(POOL, router=RouterConfig())]) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature", "expected PATH=VALUE"),
        ("=1", "unknown field ''; fields are: mode, .*attempts_max"),
        ("x=1", "unknown field 'x'; fields are: mode, "),
        ("router.temperature=1", "did you mean temperature"),
        ("busy=1", "is a group of fields; set one of busy.active_decode_blocks_threshold, "),
        ("block_size=1", "unknown field 'block_size'"),
        ("temperature=-1", "must be a number from 0 to 1000000$"),
        ("temperature=nan", "must be a number from 0 to 1000000$"),
        ("ttl_s=1e999", "must be a number from 0 to 31536000$"),
        ("queue.threshold=x", "must be a number from 0 to 1000000 or null$"),
        ("approximate_blocks_max=0", "must be a whole number from 1 to 1073741824$"),
        ("attempts_max=0", "must be a whole number of at least 1$"),
        ("track_prefill_tokens=maybe", "must be true or false$"),
        ("selection_policy=x", "must be one of default, lmetric$"),
        ("mode=kw", "unknown router mode 'kw'"),
        ("queue.classes=3", "must be a list$"),
        ('queue.classes=[{"name": "default", "size": 1}]', r"\[0\]: unknown field 'size'; fields are: name, "),
        ('queue.classes=[{"name": "default", "quantum": 0}]', r"\[0\].quantum: must be a whole number from 1"),
        ('queue.classes=[{"name": "a"}]', "missing queue class"),
    ],
)
def test_unknown_and_invalid_settings_are_rejected(text: str, message: str) -> None:
    line = error_line(text)
    assert line.startswith(f"--set {text}: ")
    assert re.search(message, line), line


def test_missing_duplicate_and_unusable_settings_are_rejected(tmp_path: Path) -> None:
    assert "no change; pass" in error_line()
    assert "set the same field" in error_line("mode=kv", policy="kv")
    assert error_line(policy="no.such.Policy").startswith("--policy no.such.Policy: ")
    file = tmp_path / "policy.json"
    file.write_text('{"mode": "no.such.Policy"}')
    assert error_line(policy_config=file).startswith(f"--policy-config {file}: ")


PREFIX = list(range(12))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    running = Processes(tmp_path, fork_server.spawn)
    yield running
    running.end_all()


@asynccontextmanager
async def owned(log: SqliteLog) -> AsyncIterator[System]:
    async with System(log).started(workers=2) as system, system.owned() as owner:
        await until(lambda: len(owner.world.fleet) == 2)
        yield system


async def complete(system: System, *names: str) -> None:
    for number, name in enumerate(names):
        system.send(submitted(name, [*PREFIX, *[number] * 4]))
        await until_ended(system, name)


async def record(path: Path) -> None:
    """Write a log of four requests."""
    log = SqliteLog.open(path)
    async with owned(log) as system:
        await complete(system, "a", "b", "c", "d")
    log.close()


def events(path: Path, kind: type = DecisionShadowed) -> list[ShadowEvent]:
    """Return the events of the complete lines of a shadow's file."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found: list[ShadowEvent] = [msgspec.json.decode(line, type=ShadowEvent) for line in lines]
    return [event for event in found if isinstance(event, kind)]


async def end(processes: Processes, name: str, number: signal.Signals) -> str:
    """End a shadow by a signal and return its output."""
    process = processes[name]
    process.signal(number)
    assert await processes.ended(name, within_s=20.0) == 0
    return process.output()


async def test_events_of_a_running_system_are_printed(tmp_path: Path, processes: Processes) -> None:
    path, out, port = tmp_path / "run.db", tmp_path / "out.jsonl", free_ports(1)
    command = [FOREBAY, "shadow", str(path), "--policy", "round-robin", "--json", "--metrics-port", str(port)]
    log = SqliteLog.open(path)
    async with owned(log) as system:
        processes.start("shadow", command, output=out)
        await until(lambda: len(events(out, ShadowStarted)) == 1)
        await complete(system, "a", "b", "c")
        await until(lambda: len(events(out)) == 3)
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://{HOST}:{port}/metrics")).text
        assert 'forebay_shadow_decisions_total{pool="default",shadow=' in text
        output = await end(processes, "shadow", signal.SIGINT)
        assert "3 decisions" in output.splitlines()[-1]
        routed = await valid(log, RequestRouted)
    log.close()
    assert [one.request_id for one in events(out) if isinstance(one, DecisionShadowed)] == list("abc")
    assert [one.request_id for one in routed] == list("abc")


async def test_a_divergence_ends_the_shadow(recorded: Path) -> None:
    offset, event = find(
        recorded, DECISIONS, lambda event: isinstance(event, RequestRouted) and event.request_id == "c"
    )
    assert isinstance(event, RequestRouted)
    lie = msgspec.structs.replace(event, terms=msgspec.structs.replace(event.terms, cost=event.terms.cost + 1))
    replace_record(recorded, DECISIONS, offset, lambda _: encode(DECISIONS, lie))
    run = await asyncio.to_thread(process, "shadow", str(recorded), "--policy", "random", "--from-start", "--json")
    assert run.returncode == 1
    assert f"journal record {offset} cannot be derived again (differs in terms)" in run.stderr
    printed = [msgspec.json.decode(line, type=ShadowEvent) for line in run.stdout.splitlines()]
    assert [one.request_id for one in printed if isinstance(one, DecisionShadowed)] == ["a", "b"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "run.db"
    asyncio.run(record(path))
    return path


@pytest.fixture
def recorded(original: Path, tmp_path: Path) -> Path:
    """Return a copy of the log."""
    path = tmp_path / "run.db"
    shutil.copy(original, path)
    return path


REFUSED = [
    (("run.db",), "no change; pass"),
    (("slice.rec", "--policy", "random"), "slice.rec is a recording, which does not grow"),
    (("--policy", "random"), "expected either a log file or --kafka"),
    (("nowhere.db", "--policy", "random"), "no such log file; check the path"),
    (("run.db", "--set", "heat=1"), "unknown field 'heat'"),
    (("run.db", "--set", "other:temperature=1"), "unknown pool 'other'; pools are: default"),
    (("run.db", "--policy", "lucky.Policy"), "lucky.Policy cannot be imported"),
    (("run.db", "--policy", "random", "--id", "a/b"), "1 to 64 letters, digits, dots"),
    (("--kafka", "127.0.0.1:1", "--policy", "random"), "check that it runs and its address"),
]


@pytest.mark.parametrize(("arguments", "why"), REFUSED)
def test_invalid_options_are_rejected(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], why: str
) -> None:
    monkeypatch.chdir(recorded.parent)
    if "slice.rec" in arguments:
        assert forebay("record", "run.db", "slice.rec").returncode == 0
    before = {path: path.read_bytes() for path in recorded.parent.glob("*.db")}
    assert why in error_of("shadow", *arguments)
    assert {path: path.read_bytes() for path in before} == before
